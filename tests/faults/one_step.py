"""A job of one optimizer step."""

import sys

from rlhf import launch
from rlhf.options import RunOptions


def run(options: RunOptions) -> None:
    from rlhf import dist
    from tests import engine_runs

    with dist.process_group(options.timeout_s):
        engine = engine_runs.engine({"zero_stage": 1})
        engine_runs.step(engine, engine_runs.batches()[0])


if __name__ == "__main__":
    sys.exit(launch.stage_main(lambda _: RunOptions, "tests.faults.one_step", "one step", run))

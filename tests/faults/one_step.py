"""A job of one optimizer step."""

import sys

from rlhf.config.declaration import Declaration
from rlhf.config.options import RunOptions
from rlhf.training.stage_process import stage_main


def run(options: RunOptions) -> None:
    from rlhf.distributed import collectives
    from tests.support import engine_runs

    with collectives.process_group(options.timeout_s):
        engine = engine_runs.engine({"zero_stage": 1})
        engine_runs.step(engine, engine_runs.batches()[0])


if __name__ == "__main__":
    sys.exit(stage_main(None, Declaration("tests.faults.one_step", "one step", {}, ()), lambda _: RunOptions, run))

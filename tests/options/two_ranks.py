"""The bundles of `cases.on_two_ranks()` on two ranks, all in one launch, those of `cases.sharded()` under ZeRO-3:

    torchrun --nproc-per-node=2 -m tests.options.two_ranks FOLDER OUT.pt

FOLDER is where world.make wrote; OUT.pt gets what both ranks did, a bundle each.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from rlhf.distributed import collectives
from rlhf.training import stage_process
from tests.options import cases, harness

if __name__ == "__main__":
    folder, out = map(Path, sys.argv[1:])
    with collectives.process_group(timeout_s=60):
        observed = []
        for bundle in cases.on_two_ranks():
            changes = bundle.changes | ({"zero_stage": 3} if bundle in cases.sharded() else {})
            config = cases.config_of(folder, bundle.stage, bundle.algorithm, **changes)
            observed.append(asdict(harness.run(bundle.stage, config)))
        if collectives.is_main():
            torch.save(observed, out)
    stage_process.end_well()

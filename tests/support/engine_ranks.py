"""What is run on two ranks, all in one launch:

    torchrun --nproc-per-node=2 -m tests.support.engine_ranks OUT.pt

writes what rank 0 saw.
"""

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlhf.distributed import collectives
from rlhf.training import stage_process
from tests.support import reward_runs
from tests.support.engine_runs import accumulated, run, run_averaged, run_into_nan, scored_in_bf16
from tests.support.players import a_step_of_everything, two_iterations, with_a_bad_score

NAN, AVERAGED, SCORED = (0, 3), (0, 2), (1, 3)
"""ZeRO stages that differ in this; bf16 runs are beside them"""
RANKED: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 1, "num_train_epochs": 2, "zero_stage": 2}


def runs() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        results[f"fp32 {stage}"] = run({"zero_stage": stage}, size=3)
    for stage in NAN:
        results[f"nan {stage}"] = run_into_nan({"zero_stage": stage}, bad_rank=1)
    for stage in AVERAGED:
        results[f"averaged {stage}"] = run_averaged({"zero_stage": stage})
    results["averaged bf16"] = run_averaged({"zero_stage": 3, "dtype": "bf16"})
    results["everything"] = a_step_of_everything()
    results["ranked lists"] = reward_runs.run(Path(sys.argv[1]).parent / f"rank{collectives.rank()}", **RANKED)
    results["skipped iteration"] = with_a_bad_score(rank=1)
    gc.freeze()  # DeepSpeed collects garbage six times for each engine in bf16
    for stage in (1, 2, 3):
        results[f"bf16 {stage}"] = run({"zero_stage": stage, "dtype": "bf16"})
        results[f"accumulated {stage}"] = accumulated({"zero_stage": stage})
    for stage in SCORED:
        results[f"scored {stage}"] = scored_in_bf16({"zero_stage": stage})
    results["accumulated 1 offloaded"] = accumulated({"zero_stage": 1, "offload_optimizer": True})
    results["nan bf16"] = run_into_nan({"zero_stage": 1, "dtype": "bf16"}, bad_rank=1)
    for stage in (1, 3):
        results[f"lora {stage}"] = run({"zero_stage": stage}, adapter="lora", generating=True)
    results["generating 3"] = run({"zero_stage": 3}, generating=True)
    with tempfile.TemporaryDirectory() as folder:
        results["step 3"] = {name: two_iterations(name, folder) for name in sys.argv[2:]}
    results["checkpointing 3"] = run({"zero_stage": 3, "gradient_checkpointing": True}, generating=True)
    return results


if __name__ == "__main__":
    with collectives.process_group(timeout_s=60):
        results = runs()
        if collectives.is_main():
            torch.save(results, sys.argv[1])
    stage_process.end_well()

"""Rollouts by the stand-in for vLLM on two ranks under ZeRO-3, between steps:

    torchrun --nproc-per-node=2 -m tests.support.vllm_ranks OUT.pt

writes how far each rank's log-probs of sampling were from those of its actor's forward pass, at most.
"""

import sys

import torch

from rlhf import plugins
from rlhf.config.options import SamplingOptions
from rlhf.distributed import collectives
from rlhf.training import stage_process
from tests.support import engine_runs, stand_in_vllm, tiny


def mismatches(adapter: str | None) -> list[float]:
    """Of a rollout before each of three steps; ranks sample responses of unequal lengths."""
    trained = engine_runs.engine({"zero_stage": 3}, adapter=adapter)
    ends = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
    backend = plugins.build("rlhf.generation", {"name": "vllm", **ends, "adapter": adapter})
    differences = []
    for rows in engine_runs.batches(3):
        with trained.inference() as policy:
            sampling = SamplingOptions(response_length=3 + 8 * collectives.rank())
            rollout = backend(policy.lm, tiny.prompts([3, 9, 8]), sampling, None)
        with trained.inference() as policy:
            scored = policy(rollout.sequences)[0][:, rollout.prompt_ids.shape[1] :]
        differences.append(float((scored - rollout.sampled_logprobs).abs().max()))
        engine_runs.step(trained, rows)
    return differences


if __name__ == "__main__":
    sys.modules["vllm"] = stand_in_vllm.module()
    with collectives.process_group(timeout_s=60):
        results = {adapter: collectives.gather_objects(mismatches(adapter)) for adapter in (None, "lora")}
        if collectives.is_main():
            torch.save(results, sys.argv[1])
    stage_process.end_well()

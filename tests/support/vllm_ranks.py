"""Rollouts by the stand-in for vLLM, or by vLLM itself, on two ranks under ZeRO-3, between steps:

    torchrun --nproc-per-node=2 -m tests.support.vllm_ranks OUT.pt [itself]

writes how far each rank's log-probs of sampling were from those of its actor's forward pass, at most.
"""

import os
import sys

import torch

from rlhf import plugins
from rlhf.config.options import SamplingOptions
from rlhf.distributed import collectives
from rlhf.generation import _vllm_private
from rlhf.training import stage_process
from tests.support import engine_runs, stand_in_vllm, tiny

SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""heads of width 64, which vLLM's kernels take"""


def mismatches(adapter: str | None) -> list[float]:
    """Of a rollout before each of three steps; ranks sample responses of unequal lengths."""
    trained = engine_runs.engine({"zero_stage": 3}, adapter=adapter, model=tiny.causal_lm(std=0.05, **SHAPE))
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
    backend.close()
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    return differences


if __name__ == "__main__":
    if sys.argv[2:] != ["itself"]:
        sys.modules["vllm"] = stand_in_vllm.module()
        _vllm_private.shut_down = stand_in_vllm.shut_down
    with collectives.process_group(timeout_s=600):
        results = {adapter: collectives.gather_objects(mismatches(adapter)) for adapter in (None, "lora")}
        if collectives.is_main():
            torch.save(results, sys.argv[1])
    stage_process.end_well()

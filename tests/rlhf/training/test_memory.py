"""What is said when memory runs out."""

import re

import pytest
import torch

from rlhf import errors
from rlhf.config import option_names
from rlhf.config.options import RunOptions
from rlhf.training.run import out_of_memory
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.algorithms import ppo


@pytest.mark.parametrize(
    ("error", "is_out_of_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (OSError("cannot allocate memory"), False),
    ],
)
def test_what_is_a_lack_of_memory(error: Exception, is_out_of_memory: bool) -> None:
    assert errors.is_out_of_memory(error) == is_out_of_memory


def test_torch_says_it_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert errors.is_out_of_memory(caught.value)


@pytest.mark.parametrize("options", [SFTConfig(), RewardConfig(), ppo.Config()])
def test_the_line_has_the_message_and_options_of_the_stage(options: RunOptions) -> None:
    line = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), options)
    assert line.startswith("out of memory (CUDA out of memory. Tried to allocate 2 GiB.); lower --micro-batch-size, ")
    named = set(re.findall(r"--([\w-]+)", line))
    assert named <= {*option_names(type(options))} and "\n" not in line
    assert ("rollout-batch-size" in named) == isinstance(options, ppo.Config)
    assert out_of_memory(MemoryError(), options).startswith("out of memory (MemoryError); lower ")

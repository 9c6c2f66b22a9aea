"""The environment of every test: a CPU, one thread a process, no network, the same random numbers each time.

`DS_ACCELERATOR=cuda pytest` runs the same tests on a GPU. Processes that tests start inherit all of it.
"""

import atexit
import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator

if os.environ.setdefault("DS_ACCELERATOR", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RLHF_CACHE"] = tempfile.mkdtemp(prefix="rlhf-test-cache-")

# All that stands above is read when these are imported.
import numpy as np
import pytest
import torch

torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["RLHF_CACHE"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """DeepSpeed collects garbage for every engine, and need not search all that has been imported each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test's process group leaves in the environment is not the next test's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """`import vllm` finds the stand-in meanwhile; its LLM, which knows the engines made."""
    from tests import stand_in_vllm

    monkeypatch.setitem(sys.modules, "vllm", stand_in_vllm.module())
    yield stand_in_vllm.LLM

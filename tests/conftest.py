"""The environment of every test: a CPU, one thread a process, no network, the same random numbers each time.

`DS_ACCELERATOR=cuda pytest` runs the same tests on a GPU. Processes that tests start inherit all of it.
"""

import atexit
import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if os.environ.setdefault("DS_ACCELERATOR", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RLHF_CACHE"] = tempfile.mkdtemp(prefix="rlhf-test-cache-")
os.environ["GRADIO_TEMP_DIR"] = f"{os.environ['RLHF_CACHE']}/gradio"
if "PYTEST_XDIST_WORKER" not in os.environ:  # all workers have one: what one has compiled, another need not
    # of this run alone: a killed compilation leaves half a file
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{os.environ['RLHF_CACHE']}/inductor"

import pytest

from tests.support.disk import skip_fsync

skip_fsync()
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # as in a background job: tests of signals would wait
        signal.signal(number, handler)
atexit.register(shutil.rmtree, os.environ["RLHF_CACHE"], ignore_errors=True)


FIRST = (
    "rlhf/kernels/test_cpu_operations.py",
    "rlhf/chain/test_train.py",
    "rlhf/engine/test_engine.py",
    "options/test_on_two_ranks.py",
    "rlhf/plan/test_choose.py",
    "options/test_every_option.py",
    "rlhf/kernels/test_compiling.py",
    "rlhf/launch/test_team.py",
    "rlhf/launch/test_launch.py",
    "rlhf/distributed/test_sharding.py",
    "rlhf/training/test_going_on.py",
    "step3_ppo/test_stage.py",
    "rlhf/chain/test_on_a_gpu.py",
    "rlhf/chain/test_errors.py",
    "contracts/test_trunk.py",
    "rlhf/training/test_resume.py",
    "rlhf/models/test_splitting.py",
    "docs/test_tutorial.py",
    "rlhf/models/test_peft_directories.py",
    "rlhf/chain/test_diff.py",
    "rlhf/generation/test_vllm.py",
    "rlhf/plan/test_plan.py",
    "rules/test_devices.py",
)
"""Files of 10 CPU seconds and more, the longest first: at the end, one of them would leave a worker without work."""

SELDOM = ("ranks", "compiled", "faults", "browser", "vllm", "kernels")
"""Marks that few files have, and that stand there by name."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m ranks and ...` reads no file without that mark: to import all tests takes ten seconds of each worker."""
    mark = str(config.option.markexpr).partition(" ")[0]
    if mark not in SELDOM or collection_path.suffix != ".py":
        return None
    return f"pytest.mark.{mark}" not in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported is no garbage, and looking for some takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    rank = {tests / name: number for number, name in enumerate(FIRST)}
    assert all(path.is_file() for path in rank), "a file of FIRST is not there"
    marks = {(item.path, mark.name) for item in items for mark in item.iter_markers() if mark.name in SELDOM}
    unnamed = [str(path) for path, name in marks if f"pytest.mark.{name}" not in path.read_text(encoding="utf-8")]
    assert not unnamed, f"a mark of SELDOM does not stand in {unnamed}"
    items.sort(key=lambda item: rank.get(item.path, len(FIRST)))


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """DeepSpeed collects garbage for every engine. It need not search what earlier files have imported and left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def ranks() -> Iterator[None]:
    """This process as a group of one rank, for the tests of a file."""
    from tests.support import tiny

    with tiny.one_rank():
        yield


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """The working directory, in which --output-dir is `out`: what two runs leave can be compared to the byte."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test's process group leaves in the environment is not the next test's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def seeds() -> None:
    import numpy as np  # not at the top: the process that only hands out tests to others needs neither
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """`import vllm` finds the stand-in meanwhile; its LLM, which knows the engines made."""
    from rlhf.generation import _vllm_private
    from tests.support import stand_in_vllm

    monkeypatch.setattr(_vllm_private, "shut_down", stand_in_vllm.shut_down)
    monkeypatch.setitem(sys.modules, "vllm", stand_in_vllm.module())
    yield stand_in_vllm.LLM

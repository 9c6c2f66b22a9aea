"""The tensor code of the three stages on a device other than the CPU, without one (tests/support/devices.py).

An operation on tensors of two devices fails here as it would on a GPU. The host waits for the device once for each
number that it needs, never within a decode step or a micro-batch: a GPU without queued work idles.
"""

import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import device_runs, forked

ROOT = Path(__file__).parents[2]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and torch takes one kind of device")

RUNS = [name for name in device_runs.runs(Path()) if name != "instrument"]
ENGINE = ("rlhf/engine/training.py:step", "rlhf/distributed/tensor_parallel.py:gradient_norm")
"""where an optimizer step waits: for its summed metrics, and for the norm of the gradient"""
SAMPLE, SCORE = "rlhf/generation/loop.py:sample", "step3_ppo/rollout.py:score"
"""where a rollout is copied to the CPU: its ids, log-probs and mask of each batch; then its old and reference log-probs
and values"""
WAITS = {
    "fine-tuning": dict.fromkeys(ENGINE, 2) | {"rlhf/supervised/demonstrations.py:perplexity": 1},
    "pairs": dict.fromkeys(ENGINE, 1) | {"step2_reward/heldout.py:score_pairs": 1},
    "joined pairs": dict.fromkeys(ENGINE, 1) | {"step2_reward/heldout.py:score_pairs": 1},
    "ppo": dict.fromkeys(ENGINE, 8) | {SAMPLE: 2 * 3, SCORE: 3},
    "ppo, shared critic": dict.fromkeys(ENGINE, 4) | {SAMPLE: 2 * 3, SCORE: 3},
    "best_of_n with demonstrations": dict.fromkeys(ENGINE, 2) | {SAMPLE: 2 * 3, SCORE: 2},
    "rollout": {SAMPLE: 3},
}
"""how often the host waits in a run, by file and function; building engines apart"""
SAME = 1e3 * torch.finfo(torch.float32).eps
"""how far apart a thousand additions in another order leave two numbers, at most, as a share of them"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("devices")
    done = forked.python("-m", "tests.support.device_runs", str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    content: dict[str, Any] = json.loads((folder / "runs.json").read_text())
    return content


def waits_of(run: list[tuple[str, int]]) -> dict[str, int]:
    """By file and function; loading and building models, in which the host may wait, apart."""
    counts: Counter[str] = Counter()
    for line, count in run:
        counts[line.split(" line ")[0]] += count
    return {name: n for name, n in counts.items() if name.split()[0] != "elsewhere" and not name.endswith("__init__")}


@without_gpu
def test_the_device_refuses_mixed_operands_and_counts_waits(results: dict[str, Any]) -> None:
    on_gpu = results["numbers"]["instrument"]["gpu"]
    free = ("arithmetic", "an upload")
    assert on_gpu["mixed_refused"]
    assert on_gpu["counts"] == {name: int(name not in free) for name in on_gpu["counts"]}


@without_gpu
@pytest.mark.parametrize("name", RUNS)
def test_the_results_are_those_of_a_cpu(results: dict[str, Any], name: str) -> None:
    cpu, gpu = (results["numbers"][name][device] for device in ("cpu", "gpu"))
    assert cpu.keys() == gpu.keys()
    for key in cpu.keys() - {"decode_waits"}:
        assert gpu[key] == pytest.approx(cpu[key], rel=SAME, abs=SAME) if "tokens" not in key else gpu[key] == cpu[key]


@without_gpu
@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_for_numbers_that_it_needs_only(results: dict[str, Any], name: str) -> None:
    assert waits_of(results["waits"][name]) == WAITS[name], results["waits"][name]


@without_gpu
@pytest.mark.parametrize("name", ["decoding", "decoding, padded"])
def test_the_host_does_not_wait_for_a_decode_step(results: dict[str, Any], name: str) -> None:
    assert results["numbers"][name]["gpu"]["decode_waits"] == {}


def for_cuda_alone(code: ast.AST) -> bool:
    """Whether something is compared with "cuda", or torch.cuda or `is_cuda` is used."""
    if isinstance(code, ast.Compare | ast.MatchValue):
        return any(isinstance(x, ast.Constant) and x.value == "cuda" for x in ast.walk(code))
    return isinstance(code, ast.Attribute) and code.attr in ("cuda", "is_cuda")


def test_what_cuda_alone_runs_is_in_a_list_with_the_reason() -> None:
    """A file with lines that the device of these tests does not run is on docs/machines.md, with the reason."""
    page = (ROOT / "docs/machines.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\w+/[\w/]+\.py) \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    rooms = ("rlhf", "data", "step1_sft", "step2_reward", "step3_ppo")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    guarded = [path for path in files if any(map(for_cuda_alone, ast.walk(ast.parse(path.read_bytes()))))]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in guarded)

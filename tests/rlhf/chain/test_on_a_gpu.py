"""Every program on a GPU without a GPU (tests/support/devices.py): its files are those of the same command on a CPU.

They are equal but for rounding, because the layers of the two devices add up in another order. A stage that was killed
on the GPU, and went on from its checkpoint, is compared with one that was not.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.chain.stages import STAGES
from tests.support import forked
from tests.support.killing import CLOCKS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and torch takes one kind of device")

SAME = 1e3 * torch.finfo(torch.float32).eps
"""how far apart a thousand additions in another order leave two numbers, at most, as a share of them"""
OF_FOLDER = {"files", "user_files", "sha256", "manifest_sha256", "weights", "base_model_name_or_path"}
"""digests of the bytes of other files, and an absolute path"""
KINDS = (".json", ".jsonl", ".safetensors")
"""the files with numbers; the others are words, and pictures of these numbers"""
NUMBER = re.compile(r"-?\d+(\.\d+)?")
ONLY_LONG = ("trunk", "grpo", "rehearsal")
Results = dict[str, dict[str, Any]]


def content(file: Path) -> Any:
    """What a file says, but for times."""
    if file.suffix == ".safetensors":
        return load_file(file)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return json.loads(text)
    rows = [json.loads(line) for line in text.splitlines()]
    return [{name: x for name, x in row.items() if not name.startswith(CLOCKS)} for row in rows]


def require_same(cpu: Any, gpu: Any, where: str) -> None:
    """The same but for rounding, in all that it has."""
    assert type(cpu) is type(gpu), where
    if isinstance(cpu, dict):
        assert cpu.keys() == gpu.keys(), where
        for name in cpu.keys() - OF_FOLDER:
            require_same(cpu[name], gpu[name], f"{where}: {name}")
    elif isinstance(cpu, list):
        assert len(cpu) == len(gpu), where
        for i, (x, y) in enumerate(zip(cpu, gpu, strict=True)):
            require_same(x, y, f"{where}[{i}]")
    elif isinstance(cpu, torch.Tensor):
        assert (cpu.dtype, cpu.shape) == (gpu.dtype, gpu.shape), where
        assert (cpu - gpu).norm() <= SAME * cpu.norm(), where
    elif isinstance(cpu, float):
        assert gpu == pytest.approx(cpu, rel=SAME, abs=SAME), where
    else:
        assert gpu == cpu, where


def files(folder: Path) -> dict[str, Path]:
    """What the commands have written, by name."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path for path in paths if path.name not in ("commands.json", "verified.json")
    }


def commands(folder: Path, name: str) -> tuple[Results, Results]:
    """What the commands of that name print on the CPU, and on the GPU, where all layers compute on the GPU."""
    done = forked.python("-m", "tests.support.device_commands", str(folder), name)
    assert done.returncode == 0, done.stderr[-4000:]
    on_cpu, on_gpu = (json.loads((folder / device / "commands.json").read_text()) for device in ("cpu", "gpu"))
    for words, result in [*on_cpu.items(), *on_gpu.items()]:
        assert result["code"] == 0, f"{words}: {result['error']}"
    for words, result in on_cpu.items():
        assert (result["waits"], result["devices"]) == (0, [] if words.startswith("export") else ["cpu"]), words
        # torch knows the GPU by now, as it knows an Ascend NPU: as the device of a backend that is not its own
        assert words.startswith("export") or "note: the CPU is used, not the gpu device" in result["out"], words
    for words, result in on_gpu.items():
        assert result["waits"] > 0, words
        assert result["devices"] == ([] if words.startswith("export") else ["gpu"]), words
    return on_cpu, on_gpu


@pytest.mark.parametrize("name", ["chain", *(pytest.param(each, marks=pytest.mark.long) for each in ONLY_LONG)])
def test_a_gpu_makes_what_a_cpu_makes(name: str, tmp_path: Path) -> None:
    on_cpu, on_gpu = commands(tmp_path, name)
    for words, result in on_gpu.items():
        if words.startswith("train"):
            assert len(re.findall("resumes after step 1", result["out"])) == len(STAGES)
            assert "resumes" not in on_cpu[words]["out"]
            assert ("rehearsal: passed" in result["out"]) == ("--rehearse" in words)
        if words.startswith("chat"):
            assert NUMBER.sub("", result["out"]) == NUMBER.sub("", on_cpu[words]["out"])
    from_cpu, from_gpu = files(tmp_path / "cpu"), files(tmp_path / "gpu")
    assert from_cpu.keys() == from_gpu.keys()
    for file, path in from_cpu.items():
        if path.suffix in KINDS:
            require_same(content(path), content(from_gpu[file]), file)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fine-tuning beside fp32 on a CPU, where fp16 is refused. A mean of log-probs is off by less than one rounding of
    them. `verify` recounts the weights."""
    _, on_gpu = commands(tmp_path, {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype])
    assert "resumes after step 1" in next(iter(on_gpu.values()))["out"]
    fp32, half = (content(tmp_path / device / "run/step1_sft/metrics.jsonl") for device in ("cpu", "gpu"))
    for one, other in zip(fp32, half, strict=True):
        assert (one["kind"], one["step"], one.get("skipped")) == (other["kind"], other["step"], other.get("skipped"))
        for name, number in {"loss": float, "eval_perplexity": math.log}.items():
            if name in one:
                assert number(other[name]) == pytest.approx(number(one[name]), rel=torch.finfo(dtype).eps), one["step"]

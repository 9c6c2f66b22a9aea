"""`python -m benchmarks.memory`: the measured memory of step 1 against the plan. For Linux, on the CPU.

A Llama-shaped model of 135 million random weights (that of SmolLM2-135M) is trained for three steps, of which the later
have Adam's moments, under each ZeRO stage. Each process reports its peak of resident memory (VmHWM of
/proc/self/status) minus its memory before loading the model: Python, the libraries, the tokenizer and the rows. On a
CPU the device's memory is that of the process, so the peak is compared with the sum of device and host in `rlhf.plan`.
Libraries that are imported later, 0.13 to 0.16 GB, are included in the measurement but not in the plan. glibc keeps
blocks that a program frees, so a process can grow beyond the size of its tensors: runs are measured with
MALLOC_MMAP_THRESHOLD_=131072, which returns freed blocks.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from benchmarks import outcome
from benchmarks.harness import ROOT, memory_bytes
from rlhf import errors
from rlhf.config import Config, parser
from rlhf.errors import UserError

RESULTS = outcome.RESULTS / "memory.json"
TARGET = 0.15
"""maximal relative error of the plan"""
STAGE = "step1_sft"
SHAPE = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
LENGTH, MICRO, BATCH, STEPS = 24, 1, 4, 3
"""tokens of each row, rows of a micro-batch, rows of a step over all processes, steps"""
SETTINGS: tuple[dict[str, Any], ...] = (
    *({"zero_stage": stage, "dtype": "fp32"} for stage in (0, 1, 2, 3)),
    *({"zero_stage": stage, "dtype": "bf16"} for stage in (1, 2, 3)),
    {"zero_stage": 2, "dtype": "bf16", "offload_optimizer": True},
    {"zero_stage": 3, "dtype": "bf16", "offload_optimizer": True, "offload_param": True},
    {"zero_stage": 1, "dtype": "fp32", "gradient_checkpointing": True},
    {"zero_stage": 1, "dtype": "bf16", "adapter": "lora"},
)


class Options(Config):
    """What to measure, and where to write it."""

    processes: tuple[int, ...] = (1, 2)
    """numbers of processes"""
    settings: tuple[int, ...] = Field(tuple(range(len(SETTINGS))), min_length=1)
    """numbers of the settings, in the order of SETTINGS"""
    output: str = str(RESULTS)
    """JSON file, written after each run"""


def measure(setting: dict[str, Any], processes: int) -> dict[str, Any]:
    """One run: the peak of the process with the most memory, in total and by moment, and the plan's, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        options = write_inputs(Path(folder), setting)
        run_stage(Path(folder), processes)
        marks = [json.loads((Path(folder) / f"marks-{rank}.json").read_text()) for rank in range(processes)]
        predicted = predict(options, processes)
    peaks = [max(mark["peak"] for mark in each[1:]) - each[0]["now"] for each in marks]
    worst = marks[peaks.index(max(peaks))]
    moments: dict[str, int] = {}
    for mark in worst[1:]:
        moments[mark["name"]] = max(moments.get(mark["name"], 0), mark["peak"] - worst[0]["now"])
    return {
        "stage": STAGE,
        "setting": setting,
        "processes": processes,
        "malloc": "returning",
        "baseline": worst[0]["now"],
        "measured": max(peaks),
        **predicted,
        "off": round(predicted["predicted"] / max(peaks) - 1, 4),
        "measured_moments": moments,
    }


def write_inputs(folder: Path, setting: dict[str, Any]) -> Any:
    """The model, the rows and the config of a run in `folder`; the config."""
    tokenizer = yaml.safe_load((ROOT / "configs/models/demo-llama.yaml").read_text(encoding="utf-8"))["tokenizer"]
    model, words = {"model": SHAPE, "tokenizer": tokenizer}, tokenizer["words"]
    (folder / "model.yaml").write_text(yaml.safe_dump(model), encoding="utf-8")
    rows = [
        {"prompt": f"tell me about {a} {b}", "response": f"{a} " * LENGTH} for a in words[11:31] for b in words[31:]
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {
        "model": str(folder / "model.yaml"), "data_path": [str(folder / "rows.jsonl")], "data_split": [1, 0, 0],
        "data_cache": str(folder / "cache"), "chat_template": "human_assistant", "truncate": "tokens",
        "max_length": LENGTH, "max_prompt_length": LENGTH // 2, "max_train_rows": BATCH * STEPS, "max_eval_rows": 2,
        "batch_size": BATCH, "micro_batch_size": MICRO, "sample_rows": 0, "output_dir": str(folder / "run"),
        "learning_rate": 1e-7, **setting,  # a run that ends worse than guessing is refused
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    from step1_sft.config import SFTConfig

    return SFTConfig(**options)


def run_stage(folder: Path, processes: int) -> None:
    """Run all ranks of the stage. Each writes its marks into `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-m", "benchmarks.memory", "--rank-of", str(folder)]
    ranks = []
    for rank in range(processes):
        env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for process in ranks:
        _, stderr = process.communicate(timeout=900)
        if process.returncode:
            raise UserError(f"{STAGE} ended with {process.returncode}: {stderr.decode()[-2000:]}")


def predict(options: Any, processes: int) -> dict[str, Any]:
    """The plan's prediction of such a run: its peak, and that of each moment, in bytes."""
    from rlhf.plan.devices import PlanOptions
    from rlhf.plan.forecast import forecast
    from rlhf.plan.machine import describe_machine
    from step1_sft.stage import FINE_TUNING

    machine = describe_machine(PlanOptions(device="cpu", devices=processes), processes)
    stage_forecast = forecast(FINE_TUNING.workload(FINE_TUNING.roles(options), options, "cpu"), machine)
    moments = {moment.name: round(moment.bytes.total) for moment in stage_forecast.moments}
    return {
        "predicted": round(stage_forecast.peak),
        "at": stage_forecast.peak_moment.name,
        "predicted_moments": moments,
    }


class _PeakLog:
    """Writes the peaks of this process between marked moments to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._marks = path, list[dict[str, Any]]()
        threading.Thread(target=self._write_continuously, daemon=True).start()

    def mark(self, name: str) -> None:
        """Record the peak since the last mark under the name of the period that ends now, and reset the peak."""
        self._marks.append(self._memory(name))
        Path("/proc/self/clear_refs").write_text("5")

    def _write_continuously(self) -> None:
        # The last period has no mark at its end.
        while True:
            written = [*self._marks, self._memory("save")]
            self._path.with_suffix(".tmp").write_text(json.dumps(written))
            self._path.with_suffix(".tmp").replace(self._path)
            threading.Event().wait(0.1)

    @staticmethod
    def _memory(name: str) -> dict[str, Any]:
        return {"name": name, "peak": memory_bytes("VmHWM"), "now": memory_bytes("VmRSS")}


def rank(folder: str) -> None:
    """Run `python -m step1_sft` with marks after loading a model, building an engine, and each optimizer step."""
    from rlhf.engine.training import Engine
    from rlhf.models import load

    marks = _PeakLog(Path(folder) / f"marks-{os.environ['RANK']}.json")
    _record_around(load, "_load", marks, "load", "baseline")
    _record_around(Engine, "__init__", marks, "start")
    _record_around(Engine, "step", marks, "train")
    from step1_sft.__main__ import main as run

    raise SystemExit(run(["--config", f"{folder}/config.yaml"]))


def _record_around(owner: Any, name: str, marks: _PeakLog, after: str, before: str | None = None) -> None:
    inner = getattr(owner, name)

    def marked(*args: Any, **options: Any) -> Any:
        if before is not None:
            marks.mark(before)
        result = inner(*args, **options)
        marks.mark(after)
        return result

    setattr(owner, name, marked)


def table(results: dict[str, Any]) -> str:
    """The runs as a Markdown table."""
    lines = ["| stage | setting | processes | measured, GB | plan, GB | off | most memory |", "|---" * 7 + "|"]
    for run in results["runs"]:
        setting = " ".join(f"{name} {value}" if value is not True else name for name, value in run["setting"].items())
        numbers = f"{run['measured'] / 1e9:.2f} | {run['predicted'] / 1e9:.2f} | {run['off']:+.1%}"
        lines.append(f"| {run['stage']} | {setting} | {run['processes']} | {numbers} | {run['at']} |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--rank-of"]:
        rank(*sys.argv[2:])
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.memory", "Memory against the plan.")
    workload = {"rows": f"{BATCH} a step in micro-batches of {MICRO}, {LENGTH} tokens each", "steps": STEPS}
    runs: list[dict[str, Any]] = []
    results = {**outcome.environment_info(), **workload, "target": TARGET, "runs": runs}
    for number in options.settings:
        for processes in options.processes:
            runs.append(measure(SETTINGS[number], processes))
            outcome.write_json(Path(options.output), results)
            print(table({"runs": runs[-1:]}).splitlines()[-1], flush=True)
    print(table(results))
    return 0 if all(abs(run["off"]) <= TARGET for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

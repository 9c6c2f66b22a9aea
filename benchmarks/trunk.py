"""`python -m benchmarks.trunk`: peak memory and seconds of PPO on a shared trunk, beside separate models. On the CPU.

A Llama-shaped model of 135 million random weights (that of SmolLM2-135M), at the sizes of benchmarks.ppo: 16 responses
of 48 tokens to prompts of 128, one pass of one optimizer step of actor and critic. The contenders:

    full      four models, all weights of actor and critic trained
    trunk     four adapters on one base model
    one       one base model with one adapter: no critic or reward model, the reference is the adapter off

Each runs in a process of its own, which reports its peak of resident memory (VmHWM of /proc/self/status) minus what the
plan counts for Python and the libraries, and of the iterations after the first the shortest, in seconds and in CPU
seconds of all threads, which count when the machine has other work. glibc returns freed blocks to the system
(MALLOC_MMAP_THRESHOLD_=131072). The plan's peak is beside it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness import ROOT, memory_bytes
from benchmarks.memory import RETURNING, SHAPE, forecast_on_cpu, hardware, write_model
from rlhf import errors
from rlhf.config import parser

RESULTS = Path(__file__).parent / "results" / "trunk.json"
ADAPTER = "lora"
NO_TOKEN = -1
"""an id that no token has: no response ends early"""


class Options(parser.Config):
    """What to measure, and where to write it."""

    contenders: tuple[Literal["full", "trunk", "one"], ...] = ("full", "trunk", "one")
    """which to measure"""
    iterations: int = Field(3, ge=1)
    """iterations of each; the first is not timed"""
    batch_size: int = Field(16, ge=1)
    """responses of an iteration"""
    micro_batch_size: int = Field(16, ge=1)
    """rows of a forward and backward pass"""
    response_length: int = Field(48, ge=1)
    """tokens of each response"""
    max_prompt_length: int = Field(128, ge=1)
    """tokens of each prompt"""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """dtype of all models"""
    gradient_checkpointing: bool = False
    """recompute activations"""
    output: str = str(RESULTS)
    """JSON file to write"""


def write_models(folder: Path) -> None:
    """The base model, a reward model of its size, and adapters on the base as steps 1 and 2 save them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhf import adapters
    from rlhf.models import adapter_files
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

    write_model(folder / "model.yaml")
    tokenizer = prepare_tokenizer(load_tokenizer(str(folder / "model.yaml")), "human_assistant")
    config = AutoConfig.for_model(**SHAPE, pad_token_id=tokenizer.pad_token_id)
    one_label = AutoConfig.for_model(**SHAPE, pad_token_id=tokenizer.pad_token_id, num_labels=1)
    base = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    classifier = AutoModelForSequenceClassification.from_config(one_label).to(torch.bfloat16)
    models = {"base": base, "reward": classifier}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    adapters.wrap(base, ADAPTER)
    for name, head in {"policy-adapter": None, "reward-adapter": classifier.score.weight.float()}.items():
        (folder / name).mkdir()
        adapter_files.save(base, adapter_files.ONLY, str(folder / "base"), folder / name, head)
        config.save_pretrained(folder / name)
    for name in (*models, "policy-adapter", "reward-adapter"):
        tokenizer.save_pretrained(folder / name)


def stage_config(contender: str, folder: Path, options: Options) -> Any:
    """The options of step 3 for a contender."""
    from rlhf import plugins

    names = ("policy-adapter", "reward-adapter") if contender == "trunk" else ("base", "reward")
    policy, reward = (str(folder / name) for name in names)
    settings = options.model_dump(exclude={"contenders", "iterations", "output"})
    settings |= {"total_episodes": options.batch_size * options.iterations, "num_ppo_epochs": 1, "num_mini_batches": 1}
    settings |= {"actor_model": policy, "reward_model": reward, "critic_model": reward}
    settings |= {"output_dir": str(folder / "run")}
    settings |= {"zero_stage": 1, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "max_length": 512}
    settings |= {"adapter": None if contender == "full" else ADAPTER, "share_trunk": contender == "trunk"}
    if contender == "one":
        settings |= {"reward": (f"length,target={options.response_length}",), "critic_model": None}
    algorithm = "reinforce" if contender == "one" else "ppo"
    return plugins.find("step3_ppo.algorithms", algorithm).Config(algorithm=algorithm, **settings)


def work(contender: str, folder: Path, options: Options) -> None:
    """Run the iterations of one contender; write its memory and seconds into the folder."""
    import torch

    from data.build.encode import Prompt
    from rlhf import generation
    from rlhf.distributed import collectives
    from rlhf.plan.machine import PROGRAM
    from rlhf.text.tokenizer import load_tokenizer
    from rlhf.types import Message, Row
    from step3_ppo import models as step3
    from step3_ppo import stage
    from step3_ppo.schedule import Schedule

    config = stage_config(contender, folder, options)
    tokenizer = load_tokenizer(str(folder / "base"))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 40, (64, options.max_prompt_length), generator=draw).tolist()
    prompts: Any = [Prompt(tuple(row), Row((Message("user", "a"),))) for row in ids]
    with collectives.process_group(timeout_s=600):
        models = step3.set_up(config, tokenizer)
        backend = generation.open_backend("loop", eos_token_id=NO_TOKEN, pad_token_id=tokenizer.pad_token_id)
        models = replace(models, backend=backend)
        seconds = []
        start = _clocks()
        for metrics in stage.train(models, prompts, Schedule(len(prompts), config, 0), config):
            if "skipped_iteration" in metrics:
                raise SystemExit(f"{contender}: an iteration was skipped, so its memory and seconds say nothing")
            end = _clocks()
            seconds.append([now - before for now, before in zip(end, start, strict=True)])
            start = end
    wall, cpu = (round(min(kind), 2) for kind in zip(*(seconds[1:] or seconds), strict=True))
    result = {"measured": memory_bytes("VmHWM") - round(PROGRAM), "seconds": wall, "cpu_seconds": cpu}
    (folder / "result.json").write_text(json.dumps(result))


def _clocks() -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads."""
    return time.perf_counter(), time.process_time()


def predict(contender: str, folder: Path, options: Options) -> int:
    """The plan's peak, in bytes."""
    from step3_ppo import plan

    workload = plan.workload(stage_config(contender, folder, options), "cpu", {"reward_model": ""})
    return round(forecast_on_cpu(workload, 1).peak)


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The runs as a Markdown table."""
    lines = ["| models | peak, GB | plan, GB | off | seconds an iteration | CPU seconds |", "|---|---|---|---|---|---|"]
    for name, run in runs.items():
        memory = f"{run['measured'] / 1e9:.2f} | {run['predicted'] / 1e9:.2f} | {run['off']:+.1%}"
        lines.append(f"| {name} | {memory} | {run['seconds']:.1f} | {run['cpu_seconds']:.1f} |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], Path(sys.argv[3]), Options.model_validate_json(sys.argv[4]))
        return 0
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.trunk", "Memory of PPO on a shared trunk.")
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        for contender in options.contenders:
            command = [sys.executable, "-m", "benchmarks.trunk", "--worker", contender, name, options.model_dump_json()]
            subprocess.run(command, env=os.environ | RETURNING, cwd=ROOT, check=True)
            run, predicted = json.loads((folder / "result.json").read_text()), predict(contender, folder, options)
            runs[contender] = run | {"predicted": predicted, "off": round(predicted / run["measured"] - 1, 4)}
            print(table({contender: runs[contender]}).splitlines()[-1], flush=True)
    if "trunk" in runs:
        for run in runs.values():
            run["trunk_share"] = round(runs["trunk"]["measured"] / run["measured"], 4)
    results = {"date": date.today().isoformat(), "hardware": hardware(), "options": options.model_dump(), "runs": runs}
    Path(options.output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

"""`python -m benchmarks.adapters`: what each method of rlhf/adapters trains, costs and learns.

Size, memory and speed are those of two layers with the widths of SmolLM2-135M, one thread, fp32. What it learns is
step 3 of the demo from its SFT and reward model, once for each of `rates`, which are multiples of the method's own
rates: the demo's model is tiny and trains all weights at hundreds of times the default rates. A run that is in the file
of results is not repeated, so an interrupted call can be resumed, and another call can add rates. Writes
docs/results/adapters.json and a table of it to adapters.md.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf import adapters, errors
from rlhf.chain.options import chain_config, resolve
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.storage import disk

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs" / "demo.yaml")
ALL = "all weights"
METHODS = {
    ALL: "",
    "LoRA": "lora",
    "LoRA, rsLoRA": "lora,use_rslora=true",
    "LoRA, DoRA": "lora,use_dora=true",
    "LoRA, PiSSA": "lora,init_lora_weights=pissa",
    "LoRA, OLoRA": "lora,init_lora_weights=olora",
    "LoRA, orthogonal": "lora,init_lora_weights=orthogonal",
    "LoRA, EVA": "lora,init_lora_weights=eva",
    "LoRA over nf4": "lora",
    "LoRA over nf4, LoftQ": "lora,init_lora_weights=loftq",
    "(IA)^3": "ia3",
    "LN tuning": "ln_tuning",
    "BitFit": "bitfit",
    "OFT": "oft",
    "BOFT": "boft",
    "HRA": "hra",
    "LoHa": "loha",
    "LoKr": "lokr",
    "VeRA": "vera",
    "RandLoRA": "randlora",
    "SHiRA": "shira,r=16",
    "MiSS": "miss",
    "C3A": "c3a",
    "FourierFT": "fourierft",
    "prompt tuning": "prompt_tuning",
    "p-tuning": "p_tuning",
    "prefix tuning": "prefix_tuning",
    "trainable tokens": f"trainable_tokens,token_indices={list(range(4, 64))}".replace(" ", ""),
}
"""by name, with options that the demo's layers of 64 inputs allow"""
QUANTIZED = "over nf4"
"""in the name of a method that is measured with --quantize nf4 in the demo"""
LAYERS = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
ROWS = (4, 128)
"""rows and tokens of a pass"""
STEPS = 3
"""timed steps; the fastest counts"""


class Options(parser.Config):
    """Which methods, and where the models and results are."""

    methods: tuple[str, ...] = tuple(METHODS)
    """names of the table"""
    rates: tuple[float, ...] = Field((1.0, 4.0), min_length=1)
    """multiples of the learning rates that a method has in supervised fine-tuning, for the actor; twice that for the
    critic, as in configs/demo.yaml"""
    total_episodes: int = Field(1280, ge=1)
    """responses of a run"""
    models: str = "runs/demo"
    """directory of the demo's SFT and reward model: `python train.py --steps 1 2`"""
    output_dir: str = "runs/adapters"
    """directory of the runs"""
    results: str = str(ROOT / "docs" / "results" / "adapters.json")
    """JSON file to write"""


def layers(spec: str) -> Any:
    """Two layers with random weights, wrapped."""
    torch.manual_seed(0)
    config = LlamaConfig(**LAYERS, num_hidden_layers=2, vocab_size=128, tie_word_embeddings=True)
    return adapters.wrap(LlamaForCausalLM(config), spec or None)


def cost(spec: str) -> dict[str, float]:
    """Trained weights of two layers, their share of the layers' weights, MB that a pass keeps for the backward pass,
    and CPU seconds of both passes."""
    model = layers(spec)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    whole = sum(weight.numel() for weight in layers("").parameters())
    own = {weight.data_ptr() for weight in [*model.parameters(), *model.buffers()]}
    saved_bytes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.layout != torch.strided:  # the indices of a sparse tensor are the method's own
            saved_bytes[id(x)] = x._values().nbytes
        elif x.data_ptr() not in own:
            saved_bytes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = torch.randint(128, ROWS, generator=torch.Generator().manual_seed(1))
    seconds = math.inf
    for _ in range(STEPS + 1):
        saved_bytes.clear()
        start = time.process_time()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(input_ids=ids, labels=ids).loss
        megabytes = sum(saved_bytes.values()) / 1e6
        loss.backward()
        seconds = min(seconds, time.process_time() - start)
        for weight in trained:
            weight.grad = None
    count = sum(weight.numel() for weight in trained)
    return {"trained": count, "share": count / whole, "kept_mb": megabytes, "seconds": seconds}


def demo(name: str, rate: float, options: Options) -> dict[str, float]:
    """Step 3 of the demo with a method: the true score of held-out responses before and after, and the KL."""
    from step3_ppo.stage import run

    spec = METHODS[name]
    folder = Path(options.output_dir) / f"{name.replace(' ', '-').replace(',', '')}-{rate:g}"
    argv = ["--config", DEMO, "--output-dir", str(folder), "--steps", "3", "--sample-rows", "0"]
    argv += ["--ppo.actor-model", f"{options.models}/step1_sft", "--ppo.reward-model", f"{options.models}/step2_reward"]
    argv += ["--ppo.total-episodes", str(options.total_episodes)]
    if spec:
        learning_rate = rate * (adapters.open_adapter(spec).learning_rate or adapters.FULL_RATE)
        argv += ["--adapter", spec, "--ppo.learning-rate", str(learning_rate)]
        argv += ["--ppo.critic-learning-rate", str(2 * learning_rate)]
    if QUANTIZED in name:
        argv += ["--quantize", "nf4"]
    config = resolve(parser.parse(chain_config(argv), argv, "benchmarks.adapters", ""), argv).ppo
    folder.mkdir(parents=True, exist_ok=True)
    start = time.process_time()
    with (folder / "output.txt").open("w") as output, contextlib.redirect_stdout(output):
        run(config)
    metrics = json.loads((folder / "step3_ppo" / "manifest.json").read_text(encoding="utf-8"))["metrics"]
    return {
        "rate": config.learning_rate,
        "before": metrics["eval_judge_before"],
        "after": metrics["eval_judge"],
        "ci95": metrics["eval_judge_gain_ci95"],
        "kl": metrics["eval_kl"],
        "seconds": time.process_time() - start,
    }


def check_models(options: Options) -> None:
    """Raises: UserError unless the demo's SFT and reward model are finished."""
    for stage in ("step1_sft", "step2_reward"):
        if not (Path(options.models) / stage / "manifest.json").is_file():
            raise UserError(
                f"--models {options.models}: got no {stage}/manifest.json, expected the demo's models; run "
                "python train.py --steps 1 2, or name another directory"
            )


def measure(name: str, options: Options, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row of a method after each of its runs; what is `known` is not repeated. `refused`: why the adapter has none.

    Raises: UserError if a run fails, or if the known ones were made with other settings.
    """
    spec = METHODS[name]
    settings = {"spec": spec, "total_episodes": options.total_episodes, "models": Path(options.models).name}
    row = known
    if "runs" not in known:
        try:
            row = {**settings, **cost(spec), "runs": {}}
        except UserError as error:
            yield {"spec": spec, "refused": str(error)}
            return
    for setting in (setting for setting, value in settings.items() if row[setting] != value):
        raise UserError(
            f"{options.results}: {name}: got runs with {setting} {row[setting]}, expected {settings[setting]}; "
            "write other runs to another file with --results"
        )
    for rate in options.rates if spec else (1.0,):
        if f"{rate:g}" not in row["runs"]:
            row = {**row, "runs": {**row["runs"], f"{rate:g}": demo(name, rate, options)}}
            yield row


def markdown(results: dict[str, Any]) -> str:
    """One row a method; of its runs the one whose gain is surest: the lower end of its interval is highest.

    The gain is that over the policy without an adapter. Virtual tokens change the policy before the first step: the
    interval of a run is that of its gain over its own start, so they have none.
    """
    base = results[ALL]
    [start] = {run["before"] for run in base["runs"].values()}
    lines = [
        "| method | `--adapter` | trained share of a layer | kept for backward, MB | time of a step | learning rate "
        "| true score: gain | KL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        spec = f"`{row['spec']}`" if 0 < len(row["spec"]) < 60 else f"`{row['spec'][:38]}...`" if row["spec"] else ""
        if "refused" in row:
            lines.append(f"| {name} | {spec} | | | | | {row['refused']} | |")
            continue
        best = max(row["runs"].values(), key=lambda run: run["after"] - run["ci95"])
        interval = f" ± {best['ci95']:.2f}" if math.isclose(best["before"], start, abs_tol=1e-6) else ""
        gain = f"{best['after'] - start:.2f}{interval}"
        lines.append(
            f"| {name} | {spec} | {row['share']:.2%} | {row['kept_mb']:.0f} | {row['seconds'] / base['seconds']:.2f} "
            f"| {best['rate']:g} | {gain} | {best['kl']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.adapters", "Every method of rlhf/adapters.")
    unknown = [name for name in options.methods if name not in METHODS]
    if unknown:
        raise UserError(f"--methods: got '{unknown[0]}', expected of {', '.join(METHODS)}")
    check_models(options)
    torch.set_num_threads(1)
    path = Path(options.results)
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in options.methods:
        for row in measure(name, options, results.get(name, {})):
            results = {each: {**results, name: row}[each] for each in METHODS if each in (*results, name)}
            disk.write_json(path, results)
            print(name, row, flush=True)
    if ALL in results:
        disk.write_text(path.with_suffix(".md"), markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

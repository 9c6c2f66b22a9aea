"""`python -m benchmarks.scaling`: how cost grows with processes and with the sizes of the work. For Linux, on the CPU.

Ranks: steps of fine-tuning a small model of random weights in fp32 under ZeRO 0 to 3, by one process of one thread, one
of two threads, and two of one thread each. Strong scaling keeps the rows of a step, weak scaling those of a process;
both are reported as throughput over that of one thread, and two processes over two threads in one process. Two runs of
one process at the same time send nothing, but share the machine's memory and clock: weak scaling over their sum is what
communication and waiting leave. The bytes sent are counted where libraries call torch.distributed: a device sends
(n - 1) / n of the bytes that it gathers or scatters, twice that in an all-reduce (a ring; gloo may differ).
`bytes_sent` predicts it.

Growth: seconds of a step and of a rollout against the tokens of prompts, of responses, rows and weights, one of them
changing at a time, with the exponent of the power law a x^e that fits best. Every number is a median.
"""

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks import harness, outcome
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError

STAGES = (0, 1, 2, 3)
LAYOUTS = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1))
"""(runs at the same time, processes of each, threads of each process)"""
RATIOS = ("strong_over_one_thread", "weak_over_one_thread", "strong_over_two_threads", "weak_over_two_runs")
SEED = 0
VOCABULARY = 4096
COLLECTIVES = {
    "all_reduce": (2, 0), "reduce": (1, 0), "broadcast": (1, 0), "all_gather_into_tensor": (1, 0),
    "_all_gather_base": (1, 0), "all_gather": (1, 0), "reduce_scatter_tensor": (1, 1), "_reduce_scatter_base": (1, 1),
    "reduce_scatter": (1, 1), "all_to_all_single": (1, 1),
}  # fmt: skip
"""(how often (n - 1) / n of the bytes are sent, the number of the argument with the bytes)"""


class Options(parser.Config):
    """What to measure, and where to write it."""

    parts: tuple[Literal["ranks", "growth"], ...] = ("ranks", "growth")
    """what to measure"""
    width: int = Field(256, ge=64, multiple_of=64)
    """width of the hidden states of the model in `ranks`"""
    layers: int = Field(6, ge=1)
    """layers of that model"""
    rows: int = Field(8, ge=2, multiple_of=2)
    """rows of a step of one process, 128 tokens each"""
    repeats: int = Field(5, ge=1)
    """steps or rollouts for each median, after a first one that does not count"""
    output: str | None = None
    """JSON file to write; by default benchmarks/results/scaling.json, if all other options are the defaults"""


def write_model(folder: Path, width: int, layers: int) -> str:
    """A directory with a Llama-shaped model of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder_of_model = folder / f"llama-{width}-{layers}"
    if not folder_of_model.is_dir():
        heads = width // 64
        config = AutoConfig.for_model(
            "llama", vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2048,
            tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(SEED)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder_of_model)
    return str(folder_of_model)


def items(rows: int, prompt: int, response: int) -> list[Any]:
    """Demonstrations of random ids."""
    import torch

    from data.build.encode import Demonstration

    ids = torch.randint(VOCABULARY, (rows, prompt + response), generator=torch.Generator().manual_seed(SEED))
    return [Demonstration(tuple(row), ((prompt, prompt + response),)) for row in ids.tolist()]


class Trainer:
    """The `train` of step 1 on random rows."""

    def __init__(self, model: str, stage: int, dtype: str) -> None:
        import torch

        from rlhf.engine.training import Engine, shards_of
        from rlhf.models.load import Loading, load_causal_lm
        from rlhf.models.policy import Policy
        from step1_sft.config import SFTConfig

        self.config = SFTConfig(model=model, zero_stage=stage, dtype=dtype, micro_batch_size=64)  # type: ignore[arg-type]
        torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        self.lm = load_causal_lm(model, torch_dtype, VOCABULARY, Loading(SEED, shards_of(self.config)))
        self.policy = Engine(Policy(self.lm), self.config, self.config, 10**6)

    def step(self, rows: list[Any]) -> None:
        """One optimizer step on these rows, over all ranks."""
        from data.batches import Batches
        from rlhf.distributed import collectives
        from step1_sft import stage

        batches = Batches(len(rows), len(rows), SEED, (collectives.rank(), collectives.world_size()))
        for _ in stage.train(self.policy, rows, batches, self.config, 0):  # type: ignore[arg-type]
            pass


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of the seconds of `repeats` calls, after a first call that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# --- ranks


class ByteCounter:
    """Counts the bytes that this rank sends through torch.distributed. Create it before DeepSpeed is imported."""

    def __init__(self) -> None:
        import torch.distributed

        self.sent: dict[str, float] = {}
        for name, (times, argument) in COLLECTIVES.items():
            inner = getattr(torch.distributed, name, None)
            if inner is not None:
                setattr(torch.distributed, name, self._counting(name, inner, times, argument))

    def _counting(self, name: str, inner: Any, times: int, argument: int) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            from torch import distributed

            n = distributed.get_world_size(options.get("group"))
            named = (value for key, value in options.items() if "tensor" in key or key in ("input", "output"))
            tensors = [*args, *named][argument]
            parts = tensors if isinstance(tensors, list | tuple) else [tensors]
            size = sum(part.numel() * part.element_size() for part in parts)
            self.sent[name] = self.sent.get(name, 0.0) + times * size * (n - 1) / n
            return inner(*args, **options)

        return counting


def run_rank(path: str) -> int:
    """One process of `ranks`: measure every ZeRO stage with each number of rows. Rank 0 writes the results."""
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    counter = ByteCounter()
    from rlhf.distributed import collectives

    results = []
    with collectives.process_group(600):
        for stage in STAGES:
            trainer = Trainer(settings["model"], stage, "fp32")
            for rows in settings["rows"]:
                batch = items(rows, 64, 64)
                trainer.step(batch)
                counter.sent.clear()
                trainer.step(batch)
                sent = dict(counter.sent)
                seconds = median_seconds(partial(trainer.step, batch), settings["repeats"])
                results.append({"stage": stage, "rows": rows, "seconds": seconds, "sent": sent})
        if collectives.is_main():
            Path(settings["output"]).write_text(json.dumps(results), encoding="utf-8")
        collectives.barrier()
    return 0


def launch(settings: dict[str, Any], runs: int, processes: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    """All ranks of `runs` runs at the same time. Returns the measurements of the first run's rank 0.

    Raises: UserError, with the end of its log, if a rank fails.
    """
    ranks = []
    for run in range(runs):
        path = folder / f"settings-{run}.json"
        output = folder / f"ranks-{run}.json"
        path.write_text(json.dumps({**settings, "output": str(output)}), encoding="utf-8")
        ranks += start_ranks(path, processes, threads)
    try:
        for process in ranks:
            _, stderr = process.communicate(timeout=900)
            if process.returncode:
                log_tail = stderr.decode(errors="replace")[-2000:]
                raise UserError(f"scaling: a rank ended with {process.returncode}: {log_tail}")
    finally:
        for process in ranks:
            process.kill()  # no effect on processes that have ended
    results: list[dict[str, Any]] = json.loads((folder / "ranks-0.json").read_text(encoding="utf-8"))
    return results


def start_ranks(settings: Path, processes: int, threads: int) -> list[subprocess.Popen[bytes]]:
    """The processes of one run."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    rendezvous = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "benchmarks.scaling", "--rank", str(settings)]
    env = {**os.environ, **harness.thread_variables(threads), **rendezvous}
    ranks = []
    for rank in map(str, range(processes)):
        own = env | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(
            subprocess.Popen(command, env=own, cwd=harness.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        )
    return ranks


def bytes_sent(stage: int, weights: int, ranks: int) -> float:
    """Bytes that a device sends in a step of one micro-batch in fp32, for a model of at most 500 million weights, which
    ZeRO-3 gathers once (ZeRO, arXiv 1910.02054, section 7; DeepSpeed's ZeRO-1 and 2 all-reduce the gradients)."""
    return (2, 3, 3, 2)[stage] * 4 * weights * (ranks - 1) / ranks


def measure_ranks(options: Options, folder: Path) -> list[dict[str, Any]]:
    """For every ZeRO stage: rows per second of each layout, their ratios, and the bytes sent against the formula."""
    from rlhf.plan.sizes import size

    model = write_model(folder, options.width, options.layers)
    settings = {"model": model, "repeats": options.repeats}
    results: dict[tuple[int, int, int, int, int], dict[str, Any]] = {}
    for layout in LAYOUTS:
        runs, processes, threads = layout
        sizes = (options.rows, 2 * options.rows) if processes == 2 else (options.rows,)
        for result in launch({**settings, "rows": sizes}, *layout, folder):
            results[(*layout, result["stage"], result["rows"])] = result
        print(f"{runs} x {processes} x {threads} thread(s) measured", flush=True)
    weights = size(model, "lm").total
    return [compare_layouts(results, stage, options.rows, bytes_sent(stage, weights, 2)) for stage in STAGES]


def compare_layouts(results: dict[Any, dict[str, Any]], stage: int, rows: int, formula: float) -> dict[str, Any]:
    """One ZeRO stage: rates in rows per second. results: by (runs, processes, threads, stage, rows)"""
    rates = {
        name: key[0] * key[4] / results[key]["seconds"]
        for name, key in {
            "one_thread": (1, 1, 1, stage, rows),
            "two_threads": (1, 1, 2, stage, rows),
            "two_runs": (2, 1, 1, stage, rows),
            "strong": (1, 2, 1, stage, rows),
            "weak": (1, 2, 1, stage, 2 * rows),
        }.items()
    }
    sent = results[(1, 2, 1, stage, rows)]["sent"]
    return {
        "zero_stage": stage,
        "rows_per_s": {name: round(rate, 3) for name, rate in rates.items()},
        **{ratio: round(rates[ratio.split("_over_")[0]] / rates[ratio.split("_over_")[1]], 3) for ratio in RATIOS},
        "sent_bytes": round(sum(sent.values())),
        "sent_by": {name: round(size) for name, size in sent.items()},
        "formula_bytes": round(formula),
        "sent_over_formula": round(sum(sent.values()) / formula, 4),
    }


# --- growth


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """e of the power law a x^e that fits best: the slope of the logarithms by least squares."""
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def series() -> dict[str, list[dict[str, int]]]:
    """The varied quantity -> all sizes of each measurement. width and layers are those of the model."""
    base = {"prompt": 64, "response": 32, "rows": 4, "width": 256, "layers": 4}
    changes: dict[str, list[dict[str, int]]] = {
        "prompt tokens": [{"prompt": size} for size in (64, 128, 256, 512)],
        "response tokens": [{"response": size} for size in (16, 32, 64, 128)],
        "rows": [{"rows": size} for size in (2, 4, 8, 16)],
        "weights": [{"width": size, "layers": size // 64} for size in (128, 256, 384, 512)],
    }
    return {name: [base | change for change in each] for name, each in changes.items()}


def measure_growth(options: Options, folder: Path) -> list[dict[str, Any]]:
    """For each series: the varied quantity, seconds of a step and of a rollout, and the exponents."""
    from rlhf.distributed import collectives

    lines = []
    with collectives.process_group(600):
        for name, sizes in series().items():
            points = [measure_point(size, options.repeats, folder) for size in sizes]
            xs = [float(measured["weights"] if name == "weights" else measured[name.split()[0]]) for measured in points]
            line = {"against": name, "x": xs}
            for quantity in ("step_s", "rollout_s"):
                ys = [measured[quantity] for measured in points]
                line |= {
                    quantity: [float(f"{y:.4g}") for y in ys],
                    f"{quantity[:-2]}_exponent": round(exponent(xs, ys), 2),
                }
            lines.append(line)
            print(f"against {name}: {line}", flush=True)
    return lines


def measure_point(size: dict[str, int], repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds of one optimizer step, and of one rollout, for given sizes."""
    import torch

    from rlhf.config.options import SamplingOptions
    from rlhf.generation import loop
    from rlhf.maths.uniforms import uniforms
    from rlhf.types import Prompts, Row

    trainer = Trainer(write_model(folder, size["width"], size["layers"]), 0, "fp32")
    rows = items(size["rows"], size["prompt"], size["response"])
    ids = torch.tensor([row.ids[: size["prompt"]] for row in rows])
    prompts = Prompts(ids, torch.ones_like(ids, dtype=torch.bool), (Row(()),) * len(rows))
    draws = uniforms([(SEED, i) for i in range(len(rows))], size["response"])
    backend = loop.build(loop.Config(eos_token_id=-1, pad_token_id=0))

    def rollout() -> None:
        with trainer.policy.inference() as policy:
            backend(policy.lm, prompts, SamplingOptions(response_length=size["response"]), draws)

    weights = sum(p.numel() for p in trainer.lm.parameters())
    seconds = {
        "step_s": median_seconds(lambda: trainer.step(rows), repeats),
        "rollout_s": median_seconds(rollout, repeats),
    }
    return {**size, "weights": weights, **seconds}


# --- the whole


def table(results: dict[str, Any]) -> str:
    """Both parts as Markdown tables."""
    lines = []
    if "ranks" in results:
        heads = "rows/s: 1 thread | 2 threads | 2 processes | strong | weak | strong / 2 threads | weak / 2 runs"
        lines += [f"| ZeRO | {heads} | sent, MB | / formula |", "|" + "---|" * 10]
    for entry in results.get("ranks", []):
        rates = " | ".join(f"{entry['rows_per_s'][name]:.3g}" for name in ("one_thread", "two_threads", "strong"))
        over = " | ".join(f"{entry[ratio]:.2f}" for ratio in RATIOS)
        sent = f"{entry['sent_bytes'] / 1e6:.1f} | {entry['sent_over_formula']:.3f}"
        lines.append(f"| {entry['zero_stage']} | {rates} | {over} | {sent} |")
    if "growth" in results:
        lines += ["", "| against | x | step, s | exponent | rollout, s | exponent |", "|---|---|---|---|---|---|"]
    for entry in results.get("growth", []):
        xs, steps, rollouts = (", ".join(f"{v:.3g}" for v in entry[key]) for key in ("x", "step_s", "rollout_s"))
        exponents = entry["step_exponent"], entry["rollout_exponent"]
        lines.append(f"| {entry['against']} | {xs} | {steps} | {exponents[0]} | {rollouts} | {exponents[1]} |")
    return "\n".join(lines)


def measure(options: Options) -> dict[str, Any]:
    """All measurements, as written to the JSON file. Ratios are of two processes over one thread."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {}
        if "ranks" in options.parts:
            result["ranks"] = measure_ranks(options, folder)
            result["ratios"] = {
                f"{ratio.replace('_', ' ')}, ZeRO {one['zero_stage']}": {"median": one[ratio]}
                for one in result["ranks"]
                for ratio in RATIOS
            }
        if "growth" in options.parts:
            result["growth"] = measure_growth(options, folder)
    import torch

    about = {
        "options": options.model_dump(mode="json", exclude={"output"}),
        "threads_of_growth": torch.get_num_threads(),
    }
    return {"name": "scaling", **outcome.environment_info(), **about, **result}


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(sys.argv[2])
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.scaling", "How cost grows.")
    result = measure(options)
    print(table(result))
    outcome.save(result, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

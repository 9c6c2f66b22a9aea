"""`python -m benchmarks.gpu`, or `make gpu`: everything that only a GPU can answer, in order of worth.

Each part is a process of at most 8 minutes, and writes its result to build/gpu/NAME.json as it goes, so that a machine
that is lent for half an hour leaves results behind. Models have random weights: no model hub is needed.

| part | what it answers |
|---|---|
| decode | share of the memory bandwidth in decode steps, eager and compiled |
| ppo | OPT-1.3B with a reward model of 350M, 256 + 256 tokens, beside DeepSpeed-Chat; its memory beside the plan |
| train | share of the peak in fine-tuning (MFU) |
| demo | all stages of the demo in bf16 and fp16 |
| tests | the tests of tensor code on the GPU |
| peers | fine-tuning, reward model and PPO beside TRL |

`--tiny` runs the same parts with tiny models on any machine: a test of this program.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks import random_models
from benchmarks.random_models import timed
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = 3212
"""tokens per second and GPU: DeepSpeed-Chat, OPT-1.3B with a reward model of 350M, 256 + 256 tokens"""
PROMPT, RESPONSE = 256, 256
BENCHMARKS = ("sft", "reward", "ppo")
TESTS = ("contracts", "rlhf/maths", "rlhf/models", "rlhf/generation", "rlhf/engine", "step3_ppo")
TINY_TESTS = ("rlhf/maths/test_draws.py",)


class Options(parser.Config):
    """What to run, and how large."""

    only: tuple[str, ...] = ()
    """parts to run; none: all"""
    tiny: bool = False
    """tiny models, on any machine"""
    limit_s: int = Field(480, ge=1)
    """seconds of each part"""
    output: str = "build/gpu"
    """folder of the results"""
    part: str | None = None
    """run this part in this process; the program sets it itself"""


class Results:
    """The numbers of a part, written to disk after each of them."""

    def __init__(self, path: Path) -> None:
        self._path, self._numbers = path, dict[str, Any]()
        self.failed = False
        """whether a program of the part ended with an exit code other than 0"""

    def add_code(self, name: str, code: int) -> None:
        """Record and print the exit code of a program."""
        self.failed |= code != 0
        self.add(**{name: code})

    def add(self, **numbers: Any) -> None:
        """Record and print numbers."""
        self._numbers |= numbers
        self._path.write_text(json.dumps(self._numbers, indent=1), encoding="utf-8")
        print(" ".join(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                       for name, value in numbers.items()), flush=True)  # fmt: skip


def decode(options: Options, results: Results) -> None:
    """Decode steps of 16 and 64 rows without an end: bytes of weights and cache over the bandwidth of the machine."""
    import torch

    from benchmarks.limits import read_rate
    from rlhf.config.options import SamplingOptions
    from rlhf.generation import open_backend
    from rlhf.maths.uniforms import uniforms
    from rlhf.models.cpu import compiling
    from rlhf.models.load import load_causal_lm

    device, (actor, _) = random_models.device(), random_models.models(options.tiny, Path(options.output))
    ids, size = random_models.vocabulary(actor), random_models.size(actor)
    lm = load_causal_lm(actor, random_models.dtype(), ids).to(device)
    width = next(lm.parameters()).element_size()
    bandwidth = read_rate(torch.ones(2**20 if options.tiny else 2**30, device=device))
    results.add(read_gb_per_s=bandwidth / 1e9, model=Path(actor).stem, dtype=str(random_models.dtype()))
    backend = open_backend("loop", eos_token_id=-1, pad_token_id=0)
    prompt, response = (8, 8) if options.tiny else (PROMPT, RESPONSE)

    def seconds(rows: int, length: int) -> float:
        draws = uniforms([(0, i) for i in range(rows)], length)
        prompts = random_models.prompts(rows, prompt, ids)
        with timed() as clock:
            backend(lm, prompts, SamplingOptions(response_length=length), draws)
        return clock[0]

    for name in ("eager",) if options.tiny else ("eager", "compiled"):
        if name == "compiled":
            compiling.compile_layers(lm)
        for rows in (2,) if options.tiny else (16, 64):
            seconds(rows, response)
            step = (seconds(rows, response) - seconds(rows, 1)) / (response - 1)
            read = width * ((size.total - size.outer) + size.vocabulary * size.hidden)
            read += width * size.cache * rows * (prompt + response / 2)
            results.add(**{f"{name}_{rows}_step_ms": 1e3 * step, f"{name}_{rows}_share": read / bandwidth / step})


def ppo(options: Options, results: Results) -> None:
    """Iterations of step 3 on prompts and responses of full length, scoring counted; peak memory beside the plan."""
    from dataclasses import replace

    import torch

    from rlhf import plugins
    from rlhf.distributed import collectives
    from rlhf.generation import open_backend
    from rlhf.plan.forecast import forecast
    from rlhf.plan.machine import describe_machine
    from rlhf.plan.options import PlanOptions
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
    from step3_ppo import stage
    from step3_ppo.models import set_up
    from step3_ppo.plan import workload
    from step3_ppo.schedule import Schedule

    prompt, response, batch, micro = (8, 8, 4, 2) if options.tiny else (PROMPT, RESPONSE, 64, 8)
    actor, reward = random_models.models(options.tiny, Path(options.output))
    config = plugins.find("step3_ppo.algorithms", "ppo").Config(
        actor_model=actor, reward_model=reward, critic_model=reward, batch_size=batch, micro_batch_size=micro,
        rollout_batch_size=batch, max_prompt_length=prompt, response_length=response, num_ppo_epochs=1,
        num_mini_batches=1, total_episodes=100 * batch, output_dir=str(Path(options.output) / "run"), zero_stage=0,
        dtype="auto",
    )  # fmt: skip
    machine = describe_machine(PlanOptions(), 1)
    planned = forecast(workload(config, machine.device.kind, {}), machine)
    results.add(planned_peak_gb=planned.peak / 1e9, moment=planned.peak_moment.name)
    with collectives.process_group(config.timeout_s):
        tokenizer = prepare_tokenizer(load_tokenizer(actor), "auto")
        models = replace(set_up(config, tokenizer), backend=open_backend("loop", eos_token_id=-1, pad_token_id=0))
        items = random_models.prompt_items(2 * batch, prompt, random_models.vocabulary(actor))
        steps = stage.train(models, items, Schedule(len(items), config, config.seed), config)
        for number in range(2 if options.tiny else 4):
            with timed() as clock:
                metrics = next(steps)
            rate = batch * (prompt + response) / clock[0]
            parts = {name: metrics[f"seconds_{name}"] for name in ("generate", "score", "update")}
            results.add(iteration=number, seconds=clock[0], tokens_per_s=rate, over_published=rate / PUBLISHED, **parts)
            if torch.cuda.is_available():
                results.add(peak_gb=torch.cuda.max_memory_allocated() / 1e9)


def train(options: Options, results: Results) -> None:
    """Steps of fine-tuning on full rows: operations of the model over the peak of the device."""
    from benchmarks.limits import product_rate
    from data.batches import Batches
    from data.build.encode import Demonstration
    from rlhf.distributed import collectives
    from rlhf.engine.training import Engine
    from rlhf.models.load import load_causal_lm
    from rlhf.models.policy import Policy
    from rlhf.plan.cost import forward_flops
    from rlhf.plan.machine import known_gpu
    from step1_sft import stage
    from step1_sft.config import SFTConfig

    rows, tokens, micro = (4, 16, 2) if options.tiny else (64, 512, 8)
    actor, _ = random_models.models(options.tiny, Path(options.output))
    ids, size = random_models.vocabulary(actor), random_models.size(actor)
    flops = 3 * forward_flops(size, rows, tokens, tokens - 1)
    gpu = known_gpu()
    square = (256, 256, 256) if options.tiny else (8192, 8192, 8192)
    peak = gpu.flops if gpu is not None else product_rate(square, random_models.dtype(), random_models.device())
    results.add(peak_tflops=peak / 1e12, published=gpu is not None, tokens_of_a_step=rows * tokens)
    for compiled in (False, True):
        config = SFTConfig(batch_size=rows, micro_batch_size=micro, num_train_epochs=1000, torch_compile=compiled)
        with collectives.process_group(config.timeout_s):
            lm = load_causal_lm(actor, random_models.dtype(), ids)
            policy = Engine(Policy(lm), config, config, 100)
            items = [Demonstration(p.ids, ((1, tokens),)) for p in random_models.prompt_items(rows, tokens, ids)]
            steps = stage.train(policy, items, Batches(rows, rows), config, 0)
            next(steps)
            with timed() as clock:
                next(steps)
            name = "compiled" if compiled else "eager"
            results.add(**{f"{name}_tokens_per_s": rows * tokens / clock[0], f"{name}_mfu": flops / clock[0] / peak})
        if options.tiny:
            return


def demo(options: Options, results: Results) -> None:
    """The README's demo in the two 16-bit types: exit code, seconds, and what the policy gained."""
    small = ["--data-path", "demo,rows=400", "--max-eval-rows", "8", "--sft.num-train-epochs", "1"]
    small += ["--reward.num-train-epochs", "1", "--ppo.total-episodes", "128"]
    for dtype in ("fp32",) if options.tiny else ("bf16", "fp16"):
        out = Path(options.output) / f"demo-{dtype}"
        command = ["train.py", "--output-dir", str(out), "--dtype", dtype, "--overwrite"]
        with timed() as clock:
            code = _run([*command, *(small if options.tiny else [])])
        manifest = out / "step3_ppo" / "manifest.json"
        metrics = json.loads(manifest.read_text())["metrics"] if manifest.is_file() else {}
        gain = metrics.get("eval_score", 0.0) - metrics.get("eval_score_before", 0.0)
        results.add_code(f"{dtype}_code", code)
        results.add(**{f"{dtype}_seconds": clock[0], f"{dtype}_score_gain": gain})


def tests(options: Options, results: Results) -> None:
    """The tests of tensor code, one folder after the other, on the GPU."""
    for name in TINY_TESTS if options.tiny else TESTS:
        accelerator = "cpu" if options.tiny else "cuda"
        command = ["-m", "pytest", "-q", "-n", "0", "--maxfail", "20", f"tests/{name}"]
        results.add_code(name, _run(command, DS_ACCELERATOR=accelerator))


def peers(options: Options, results: Results) -> None:
    """The comparisons of `make bench` with TRL, which each of them installs."""
    for name in BENCHMARKS:
        words = ["-m", f"benchmarks.{name}", "--output", str(Path(options.output) / f"beside-trl-{name}.json")]
        if options.tiny:
            results.add(**{name: "left out"})
        else:
            results.add_code(name, _run(words))


PARTS: dict[str, Callable[[Options, Results], None]] = {
    "decode": decode, "ppo": ppo, "train": train, "demo": demo, "tests": tests, "peers": peers,
}  # fmt: skip


def _run(words: list[str], **variables: str) -> int:
    """The exit code of `python WORDS`, which shares the time of its part."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | variables, check=False).returncode


def run_part(name: str, options: Options) -> str:
    """Run a part in a process of its own. Returns how it ended."""
    words = ["-m", "benchmarks.gpu", "--part", name, "--output", options.output]
    process = subprocess.Popen(
        [sys.executable, *words, *(["--tiny"] if options.tiny else [])], cwd=ROOT, start_new_session=True
    )
    try:
        code = process.wait(options.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the programs that it has started
        process.wait()
        return f"stopped after {options.limit_s} s"
    return "done" if code == 0 else f"exit code {code}"


def main() -> int:
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.gpu", "What only a GPU can answer.")
    unknown = [name for name in (*options.only, *filter(None, [options.part])) if name not in PARTS]
    if unknown:
        raise UserError(f"--only {unknown[0]}: expected some of {', '.join(PARTS)}")
    import torch

    if not options.tiny and not torch.cuda.is_available():
        raise UserError("make gpu: torch finds no GPU here; --tiny runs the same parts with tiny models on a CPU")
    folder = Path(options.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options = options.model_copy(update={"output": str(folder)})
    if options.part is not None:
        results = Results(folder / f"{options.part}.json")
        PARTS[options.part](options, results)
        return int(results.failed)
    ends = {name: run_part(name, options) for name in options.only or PARTS}
    print("\n".join(f"{name}: {end}" for name, end in ends.items()))
    return int(any(end != "done" for end in ends.values()))


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

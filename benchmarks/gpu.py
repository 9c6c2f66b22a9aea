"""`python -m benchmarks.gpu`, or `make gpu`: everything that only a GPU can answer, in order of worth.

Each part is a process of at most two minutes, and writes its result to build/gpu/gpu-PART.json as it goes, so that a
machine that is lent for a quarter of an hour leaves results behind. Models have random weights: no model hub is needed.
Results worth keeping go to benchmarks/results/ (`--output`).

| part | what it answers |
|---|---|
| ppo | OPT-1.3B with a reward model of 350M, 256 + 256 tokens, beside DeepSpeed-Chat; its memory beside the plan |
| profile | the kernels of decode steps, scoring and the update |
| compiled | the first part with compiled layers |
| sweep | the same with other batches and micro-batches, and with log-probs of sampling (`--ppo.rescore` off) |
| rates | what bounds them: memory, products, the host, the optimizer step |
| decode | share of the memory bandwidth in decode steps, eager and compiled, and whether the tokens are the same |
| determinism | bits of a backward pass, with `--deterministic` and without |
| train | share of the peak in fine-tuning (MFU) |
| resume | an interrupted run and one that was not, under `--deterministic`, byte for byte |
| demo | all stages of the demo in bf16 and fp16 |
| tests | the tests of tensor code on the GPU; those of two processes need two |
| trl-sft, trl-reward, trl-ppo | fine-tuning, reward model and PPO beside TRL |

`--tiny` runs the same parts with tiny models on any machine: a test of this program.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import gpu_device, gpu_ppo, random_models
from benchmarks.gpu_part import Options, Results
from benchmarks.harness import seconds_of
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ("sft", "reward", "ppo")
TESTS = ("contracts", "rlhf/maths", "rlhf/models", "rlhf/generation", "rlhf/engine", "step3_ppo")
TINY_TESTS = ("rlhf/maths/test_draws.py",)
SMALL = ("--data-path", "demo,rows=400", "--max-eval-rows", "8", "--sft.num-train-epochs", "1",
         "--reward.num-train-epochs", "1", "--ppo.total-episodes", "128")  # fmt: skip
"""a demo of seconds"""
MODELS = ("step1_sft/model", "step2_reward/model", "step3_ppo/actor", "step3_ppo/critic")
SLOW = 10
"""how many times as long a part may take with --tiny, on a busy CPU"""


def train(options: Options, results: Results) -> None:
    """Steps of fine-tuning on full rows: operations of the model over the peak of the device."""
    from benchmarks.limits import product_rate
    from data.batches import Batches
    from data.prepare.encode import Demonstration
    from rlhf.distributed import collectives
    from rlhf.engine.training import Engine
    from rlhf.models.load import load_causal_lm
    from rlhf.models.policy import Policy
    from rlhf.plan import sizes
    from rlhf.plan.cost import forward_flops
    from rlhf.plan.machine import known_gpu
    from step1_sft import stage
    from step1_sft.config import SFTConfig

    rows, tokens, micro = (4, 16, 2) if options.tiny else (64, 512, 8)
    actor, _ = random_models.models(options.tiny, Path(options.work))
    ids, size = random_models.vocabulary(actor), sizes.size(actor, "lm")
    flops = 3 * forward_flops(size, rows, tokens, tokens - 1)
    gpu = known_gpu()
    square = (256, 256, 256) if options.tiny else (8192, 8192, 8192)
    peak = gpu.flops if gpu is not None else product_rate(square, random_models.dtype(), collectives.local_device())
    results.add(peak_tflops=peak / 1e12, published=gpu is not None, tokens_of_a_step=rows * tokens)
    for compiled in (False, True):
        config = SFTConfig(batch_size=rows, micro_batch_size=micro, num_train_epochs=1000, torch_compile=compiled)
        with collectives.process_group(config.timeout_s):
            lm = load_causal_lm(actor, random_models.dtype(), ids)
            policy = Engine(Policy(lm), config, 100)
            items = [Demonstration(p.ids, ((1, tokens),)) for p in random_models.prompt_items(rows, tokens, ids)]
            steps = stage.train(policy, items, Batches(rows, rows), config, 0)
            next(steps)
            seconds, name = seconds_of(partial(next, steps)), "compiled" if compiled else "eager"
            results.add(**{f"{name}_tokens_per_s": rows * tokens / seconds, f"{name}_mfu": flops / seconds / peak})
        if options.tiny:
            return


def demo(options: Options, results: Results) -> None:
    """The README's demo in the two 16-bit types: exit code, seconds, and what the policy gained."""
    for dtype in ("fp32",) if options.tiny else ("bf16", "fp16"):
        out = Path(options.work) / f"demo-{dtype}"
        command = ["train.py", "--output-dir", str(out), "--dtype", dtype, "--overwrite"]
        start = time.perf_counter()
        code = _run([*command, *(SMALL if options.tiny else [])])
        seconds = time.perf_counter() - start
        manifest = out / "step3_ppo" / "manifest.json"
        metrics = json.loads(manifest.read_text())["metrics"] if manifest.is_file() else {}
        gain = metrics.get("eval_score", 0.0) - metrics.get("eval_score_before", 0.0)
        results.add_code(f"{dtype}_code", code)
        results.add(**{f"{dtype}_seconds": seconds, f"{dtype}_score_gain": gain})


def resume(options: Options, results: Results) -> None:
    """A run that is interrupted in its last stage and resumed, beside one that is not: models with equal bytes."""
    words = ["train.py", "--deterministic", "--save-every", "1", *SMALL, *["--steps", "1"] * options.tiny]
    whole, broken = (Path(options.work) / f"resume-{name}" for name in ("whole", "broken"))
    for folder in (whole, broken):
        shutil.rmtree(folder, ignore_errors=True)
    results.add_code("whole_code", _run([*words, "--output-dir", str(whole)]))
    again = [*words, "--output-dir", str(broken)]
    process = subprocess.Popen([sys.executable, *again], cwd=ROOT)
    log = broken / ("step1_sft" if options.tiny else "step3_ppo") / "metrics.jsonl"
    while process.poll() is None and not (log.is_file() and log.read_text().count("\n") >= 2):
        time.sleep(0.1)
    process.terminate()
    results.add(interrupted_code=process.wait())
    results.add_code("resumed_code", _run(again))
    for name in MODELS[: 1 if options.tiny else None]:
        one, other = (folder / name / "model.safetensors" for folder in (whole, broken))
        results.add(**{name: one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()})


def tests(options: Options, results: Results) -> None:
    """The tests of tensor code, one folder after the other, on the GPU, by up to 12 processes."""
    workers = str(min(12, os.cpu_count() or 1))
    for name in TINY_TESTS if options.tiny else TESTS:
        accelerator = "cpu" if options.tiny else "cuda"
        command = ["-m", "pytest", "-q", "-n", workers, "--dist", "loadfile", "--tb", "line", f"tests/{name}"]
        results.add_code(name, _run(command, DS_ACCELERATOR=accelerator))


def beside_trl(name: str, options: Options, results: Results) -> None:
    """A comparison of `make bench` with TRL, which it installs."""
    words = ["-m", f"benchmarks.{name}", "--output", str(Path(options.output) / f"gpu-{name}.json")]
    if options.tiny:
        results.add(**{name: "left out"})
    else:
        results.add_code(name, _run(words))


PARTS: dict[str, Callable[[Options, Results], None]] = {
    "ppo": gpu_ppo.ppo, "profile": gpu_ppo.profile, "compiled": partial(gpu_ppo.ppo, compiled=True),
    "sweep": gpu_ppo.sweep, "rates": gpu_device.rates, "decode": gpu_device.decode,
    "determinism": gpu_device.determinism, "train": train, "resume": resume, "demo": demo, "tests": tests,
    **{f"trl-{name}": partial(beside_trl, name) for name in BENCHMARKS},
}  # fmt: skip


def _run(words: list[str], **variables: str) -> int:
    """The exit code of `python WORDS`, which shares the time of its part."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | variables, check=False).returncode


def run_part(name: str, options: Options) -> str:
    """Run a part in a process of its own. Returns how it ended."""
    words = ["-m", "benchmarks.gpu", "--part", name, "--output", options.output, "--work", options.work]
    limit = options.limit_s * (SLOW if options.tiny else 1)
    process = subprocess.Popen(
        [sys.executable, *words, *(["--tiny"] if options.tiny else [])], cwd=ROOT, start_new_session=True
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the programs that it has started
        process.wait()
        return f"stopped after {limit} s"
    return "done" if code == 0 else f"exit code {code}"


def main() -> int:
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.gpu", "What only a GPU can answer.")
    unknown = [name for name in (*options.only, *filter(None, [options.part])) if name not in PARTS]
    if unknown:
        raise UserError(f"--only {unknown[0]}: expected some of {', '.join(PARTS)}")
    import torch

    if not options.tiny and not torch.cuda.is_available():
        raise UserError("make gpu: torch finds no GPU here; --tiny runs the same parts with tiny models on a CPU")
    folders = {name: Path(getattr(options, name)).resolve() for name in ("output", "work")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    options = options.model_copy(update={name: str(folder) for name, folder in folders.items()})
    if options.part is not None:
        results = Results(folders["output"] / f"gpu-{options.part}.json")
        PARTS[options.part](options, results)
        return int(results.failed)
    ends = {name: run_part(name, options) for name in options.only or PARTS}
    print("\n".join(f"{name}: {end}" for name, end in ends.items()))
    return int(any(end != "done" for end in ends.values()))


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

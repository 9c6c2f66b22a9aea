"""The headline of benchmarks/gpu.py: iterations of step 3 on OPT-1.3B with a reward model and a critic of 350M.

Random weights, prompts and responses of full length, as in DeepSpeed-Chat's benchmark; scoring counts.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import inputs, random_models
from benchmarks.gpu_part import Options, Results
from benchmarks.harness import clock

PUBLISHED = 3213
"""tokens per second and GPU: DeepSpeed-Chat, 264,292 rows of 512 tokens in 11.7 h on one A100 of 80 GB"""
PARTS = ("generate", "score", "update")
SWEEP = ((64, 16, True), (64, 32, True), (256, 16, False), (256, 16, True), (256, 32, True))
"""rows of an iteration and of a micro-batch, whether the policy scores its responses again (`--ppo.rescore`)"""
PROFILED_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Iterations:
    """Step 3, ready to run."""

    learner: Any
    actor: str
    reward: str

    @property
    def config(self) -> Any:
        return self.learner.config

    def steps(self, items: list[Any]) -> Iterator[Any]:
        """Iterations of `batch_size` rows."""
        from step3_ppo import stage
        from step3_ppo.schedule import Schedule

        schedule = Schedule(len(items), self.config)
        return stage.observe(stage.train(self.learner, items, schedule), self.learner)

    def items(self) -> list[Any]:
        """Prompts of two iterations."""
        ids = random_models.vocabulary(self.actor)
        return random_models.prompt_items(2 * self.config.batch_size, self.config.max_prompt_length, ids)

    def measured(self, repeats: int) -> dict[str, float]:
        """Medians of iterations after a warm-up, and rates."""
        steps, found = self.steps(self.items()), list[dict[str, float]]()
        next(steps)
        for _ in range(repeats):
            start = clock()
            metrics = next(steps)
            found.append({"seconds": clock() - start, **{part: metrics[f"seconds_{part}"] for part in PARTS}})
        medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
        c, flops = self.config, self.flops()
        rate = c.batch_size * (c.max_prompt_length + c.response_length) / medians["seconds"]
        shares = {f"{part}_tflops": flops[part] / medians[part] / 1e12 for part in flops}
        return {**medians, "tokens_per_s": rate, "over_published": rate / PUBLISHED, **shares}

    def flops(self) -> dict[str, float]:
        """Operations of the update and of scoring in an iteration."""
        from rlhf.plan import sizes
        from rlhf.plan.cost import forward_flops

        c = self.config
        tokens = c.max_prompt_length + c.response_length
        policy = forward_flops(sizes.size(self.actor, "lm"), c.batch_size, tokens, c.response_length)
        scalar = forward_flops(sizes.size(self.reward, "scalar"), c.batch_size, tokens, 0)
        return {"score": policy * (1 + c.rescore) + 2 * scalar, "update": 3 * (policy + scalar)}

    def with_rows(self, rows: int, micro: int, rescore: bool) -> "Iterations":
        """The same models with other batches."""
        changes = {"batch_size": rows, "micro_batch_size": micro, "rollout_batch_size": rows, "rescore": rescore}
        learner, config = self.learner, self.config.model_copy(update=changes)
        return replace(self, learner=replace(learner, config=config, scorer=replace(learner.scorer, rescore=rescore)))


def configured(options: Options, compiled: bool) -> tuple[Any, str, str]:
    """Options of step 3, the policy, the reward model."""
    from rlhf import plugins

    (prompt, response), (batch, micro) = options.lengths, (4, 2) if options.tiny else (64, 8)
    actor, reward = random_models.models(options.tiny, Path(options.work))
    config = plugins.find("step3_ppo.algorithms", "ppo").Config(
        actor_model=actor, reward_model=reward, critic_model=reward, batch_size=batch, micro_batch_size=micro,
        rollout_batch_size=batch, max_prompt_length=prompt, response_length=response, num_ppo_epochs=1,
        num_mini_batches=1, total_episodes=100 * batch, output_dir=str(Path(options.work) / "run"), zero_stage=0,
        dtype="auto", eval_batch_size=batch, torch_compile=compiled,
    )  # fmt: skip
    return config, actor, reward


@contextlib.contextmanager
def opened(options: Options, compiled: bool = False) -> Iterator[Iterations]:
    """Step 3 with its models on the device; responses have no end."""
    from rlhf.distributed import collectives
    from rlhf.generation import open_backend
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
    from step3_ppo.models import set_up
    from step3_ppo.roles import roles

    config, actor, reward = configured(options, compiled)
    with collectives.process_group(config.timeout_s):
        learner = set_up(config, roles(config), prepare_tokenizer(load_tokenizer(actor), "auto"), None)
        endless = open_backend("loop", eos_token_id=inputs.NO_TOKEN, pad_token_id=0)
        yield Iterations(replace(learner, backend=endless), actor, reward)


def ppo(options: Options, results: Results, compiled: bool = False) -> None:
    """Iterations of 64 rows in micro-batches of 8; peak memory beside the plan."""
    from rlhf.plan.devices import PlanOptions
    from rlhf.plan.forecast import forecast
    from rlhf.plan.machine import describe_machine
    from step3_ppo.roles import roles, workload

    device = describe_machine(PlanOptions(), 1)
    config, _, _ = configured(options, compiled)
    planned = forecast(workload(roles(config), config, device.device.kind), device)
    results.add(planned_peak_gb=planned.peak / 1e9, moment=planned.peak_moment.name)
    with opened(options, compiled) as iterations:
        results.add(**iterations.measured(1 if options.tiny else 3))
        if torch.cuda.is_available():
            results.add(peak_gb=torch.cuda.max_memory_allocated() / 1e9)


def sweep(options: Options, results: Results) -> None:
    """Other numbers of rows in an iteration and in a micro-batch."""
    with opened(options) as iterations:
        for rows, micro, rescore in ((4, 1, False),) if options.tiny else SWEEP:
            numbers = iterations.with_rows(rows, micro, rescore).measured(1)
            name = f"{rows}_{micro}" if rescore else f"{rows}_{micro}_once"
            results.add(**{f"{name}_{key}": value for key, value in numbers.items()})


def profile(options: Options, results: Results) -> None:
    """The kernels of decode steps, of scoring and of the update: tables beside the numbers, in gpu-profile.txt."""
    from step3_ppo.algorithms import Iteration

    texts: list[str] = []
    with opened(options) as iterations:
        learner, config, items = iterations.learner, iterations.config, iterations.items()
        next(iterations.steps(items))  # the warm-up
        iteration = Iteration(900, list(range(config.batch_size)))
        short = config.model_copy(update={"response_length": min(PROFILED_TOKENS, config.response_length)})
        brief = replace(learner, config=short, scorer=replace(learner.scorer, sampling=short))
        _profiled("decode", lambda: brief.generate(items, iteration), results, texts)
        sampled = learner.generate(items, iteration)
        scored = _profiled("score", lambda: learner.score(sampled), results, texts)
        credit = learner.algorithm.credit(scored, iteration)
        _profiled("update", lambda: learner.update(scored, credit, iteration), results, texts)
    results.path.with_suffix(".txt").write_text("\n".join(texts), encoding="utf-8")


def _profiled(name: str, call: Callable[[], Any], results: Results, texts: list[str]) -> Any:
    """The value of a call; its seconds and kernels into the results, its table into `texts`."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profiler(activities=activities) as recorded:
        start = clock()
        value = call()
        seconds = clock() - start
    events = recorded.key_averages()
    kernels = [event for event in events if "cuda" in str(event.device_type).lower()]
    results.add(**{
        f"{name}_s": seconds,
        f"{name}_device_s": sum(event.self_device_time_total for event in kernels) / 1e6,
        f"{name}_kernels": sum(event.count for event in kernels),
        f"{name}_operations": sum(event.count for event in events if event.key.startswith("aten::")),
    })  # fmt: skip
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    texts.append(f"{name}\n{events.table(sort_by=order, row_limit=30, max_name_column_width=70)}")
    return value

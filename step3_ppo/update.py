"""The second half of an iteration: epochs of minibatches on actor and critic."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlhf import dist, losses, ops
from rlhf.engine import Engine
from rlhf.types import Credit, Metrics, Rollout, length_groups
from step3_ppo.config import Step3Config
from step3_ppo.rollout import critic_values

Part = tuple[Rollout, Credit]


def update(
    actor: Engine | None,
    critic: Engine | None,
    algorithm: Any,
    scored: Part,
    config: Step3Config,
    generator: torch.Generator,
) -> Metrics:
    """`num_ppo_epochs` passes over the rollout, each in `num_mini_batches` optimizer steps; fewer beyond `target_kl`.

    Without an actor (critic warm-up) or a critic (the algorithm needs none) the other learns alone.
    Returns metrics averaged over the steps, how many there were, and `first_approx_kl`: that of the first minibatch,
    on which the policy is still the one that sampled, so it must be 0.
    """

    def policy_loss(part: Part) -> losses.Loss:
        rollout, credit = part
        assert actor is not None
        logprobs, entropy = actor(rollout.sequences, config.temperature, with_entropy=True)
        prompt = rollout.prompt_ids.shape[1]
        loss, metrics = algorithm.policy_loss(logprobs[:, prompt:], rollout, credit, count)
        return loss, {**metrics, "entropy": ops.masked_mean(entropy[:, prompt:], rollout.mask, count)}

    def value_loss(part: Part) -> losses.Loss:
        rollout, credit = part
        assert critic is not None
        values = critic_values(critic)(rollout.sequences, rollout.prompt_ids.shape[1])
        return algorithm.value_loss(values, rollout, credit, count)

    seen: dict[str, list[float]] = defaultdict(list)
    steps = 0
    for rows in _minibatches(len(scored[0]), config, generator):
        minibatch = (scored[0][rows], scored[1][rows])
        count = dist.sum_over_ranks(minibatch[0].mask.sum())
        micros = list(_micro_batches(minibatch, config.micro_batch_size))
        metrics: Metrics = {}
        if actor is not None:
            metrics |= {f"policy_{n}" if n in SHARED else n: v for n, v in actor.step(micros, policy_loss).items()}
        if critic is not None:
            metrics |= {f"value_{n}" if n in SHARED else n: v for n, v in critic.step(micros, value_loss).items()}
        for name, value in metrics.items():
            seen[name].append(value)
        steps += 1
        if config.target_kl is not None and metrics.get("approx_kl", 0.0) > config.target_kl:
            break
    skipped = [sum(seen.pop(name, ())) for name in ("policy_skipped", "value_skipped")]
    if "ratio_square" in seen:
        squares = zip(seen.pop("ratio_square"), seen["ratio_mean"], strict=True)
        seen["ratio_std"] = [math.sqrt(max(0.0, square - (mean - 1) ** 2)) for square, mean in squares]
    means = {name: sum(values) / len(values) for name, values in seen.items()}
    first = {f"first_{name}": seen[name][0] for name in ("approx_kl", "ratio_std") if name in seen}
    return {**means, **first, "optimizer_steps": float(steps), "skipped_steps": skipped[0]}


SHARED = ("loss", "grad_norm", "learning_rate", "skipped")
"""What every engine reports, so that actor and critic need a prefix."""


def _minibatches(size: int, config: Step3Config, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each optimizer step: this rank's rows shuffled anew every epoch."""
    for _ in range(config.num_ppo_epochs):
        yield from torch.randperm(size, generator=generator).tensor_split(config.num_mini_batches)


def _micro_batches(minibatch: Part, size: int) -> Iterator[Part]:
    rollout, credit = minibatch
    for index in length_groups(rollout.sequences.lengths, size):
        part = rollout[index].trimmed()
        width = part.mask.shape[1]
        yield part, Credit(credit.advantages[index, :width], credit.returns[index, :width])

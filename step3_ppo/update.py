"""The second half of an iteration: epochs of minibatches on actor and critic."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.engine.ema import EMA
from rlhf.engine.training import Engine
from rlhf.maths import losses, ops
from rlhf.types import Credit, Metrics, Sequences, length_groups
from step3_ppo.algorithms import Algorithm
from step3_ppo.config import UpdateOptions
from step3_ppo.global_rollout import Part, dealt
from step3_ppo.ptx import Ptx
from step3_ppo.rollout import critic_values


@dataclass(frozen=True, slots=True)
class Learners:
    """Who learns in an iteration. Without an actor (critic warm-up) or a critic (the algorithm needs none) the other
    learns alone; with `ptx` the actor learns its batches too, and `ema` follows its weights."""

    actor: Engine | None
    critic: Engine | None
    algorithm: Algorithm
    ptx: Ptx | None = None
    ema: EMA | None = None


def update(
    learners: Learners, scored: Part, config: UpdateOptions, generator: torch.Generator, numbers: Sequence[int] = ()
) -> Metrics:
    """`num_ppo_epochs` passes over the rollout, each in `num_mini_batches` optimizer steps; fewer beyond `target_kl`.

    `scored`: the rollout of all ranks with its credit, the same on every rank (`sharing.of_all_ranks`). Minibatches are
    drawn from it, and each is dealt out to the ranks. `numbers`: those of its prompts in the data, for messages.
    Returns metrics averaged over the steps that were applied, how many steps there were, and `first_approx_kl`: that of
    the first minibatch, on which the policy is still the one that sampled, so it must be 0.
    Raises: NonFiniteError.
    """
    actor, critic, algorithm, ptx = learners.actor, learners.critic, learners.algorithm, learners.ptx

    def actor_loss(part: Part | Sequences) -> losses.Loss:
        assert actor is not None
        if isinstance(part, Sequences):
            assert ptx is not None
            return ptx.loss(actor, part)
        rollout, credit = part
        entropy_is = "trained" if config.entropy_coef else "watched"
        logprobs, entropy = actor(rollout.sequences, config.temperature, entropy=entropy_is)
        prompt = rollout.prompt_ids.shape[1]
        loss, metrics = algorithm.policy_loss(logprobs[:, prompt:], rollout, credit, count)
        spread = ops.masked_mean(entropy[:, prompt:], rollout.mask, count)
        return loss - config.entropy_coef * spread, {**metrics, "entropy": spread.detach()}

    def value_loss(part: Part) -> losses.Loss:
        rollout, credit = part
        assert critic is not None and algorithm.value_loss is not None
        values = critic_values(critic)(rollout.sequences, rollout.prompt_ids.shape[1])
        return algorithm.value_loss(values, rollout, credit, count)

    seen: dict[str, list[float]] = defaultdict(list)
    steps = skipped = 0
    lengths = scored[0].sequences.lengths.cpu()
    for drawn in _minibatches(len(scored[0]), config, generator):
        count = scored[0].mask[drawn].sum().double()
        rows = dealt(drawn, lengths)
        minibatch = (scored[0][rows], scored[1][rows])
        groups = length_groups(lengths[rows], config.micro_batch_size)
        micros = [_part(minibatch, group) for group in groups]
        named = [[numbers[row] for row in rows[group].tolist()] for group in groups] if numbers else []
        metrics: Metrics = {}
        if actor is not None:
            mixed = ptx.micro_batches() if ptx is not None else []
            whose = [*named, *([] for _ in mixed)] if named else []
            metrics |= _named("policy", actor.step([*micros, *mixed], actor_loss, whose))
            if learners.ema is not None and not metrics["policy_skipped"]:
                learners.ema.update()
        # What the actor cannot learn from (in fp16: an overflow) is left out for the critic too.
        if critic is not None and not metrics.get("policy_skipped"):
            metrics |= _named("value", critic.step(micros, value_loss, named))
        steps += 1
        skipped += any([metrics.pop("policy_skipped", 0.0), metrics.pop("value_skipped", 0.0)])
        for name, value in metrics.items():
            seen[name].append(value)
        if config.target_kl is not None and metrics.get("approx_kl", 0.0) > config.target_kl:
            break
    return _means(seen) | {"optimizer_steps": float(steps), "skipped_steps": float(skipped)}


def _means(seen: dict[str, list[float]]) -> Metrics:
    if "ratio_square" in seen:
        squares = zip(seen.pop("ratio_square"), seen["ratio_mean"], strict=True)
        seen["ratio_std"] = [math.sqrt(max(0.0, square - (mean - 1) ** 2)) for square, mean in squares]
    means = {name: sum(values) / len(values) for name, values in seen.items()}
    first = {f"first_{name}": seen[name][0] for name in ("approx_kl", "ratio_std") if name in seen}
    return {**means, **first}


def _named(who: str, metrics: Metrics) -> Metrics:
    """What every engine reports gets a prefix."""
    shared = ("loss", "grad_norm", "learning_rate", "skipped")
    return {f"{who}_{name}" if name in shared else name: value for name, value in metrics.items()}


def _minibatches(size: int, config: UpdateOptions, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each optimizer step: the whole rollout shuffled anew every epoch, alike on every rank."""
    for _ in range(config.num_ppo_epochs):
        yield from torch.randperm(size, generator=generator).tensor_split(config.num_mini_batches)


def _part(minibatch: Part, rows: Tensor) -> Part:
    rollout, credit = minibatch[0][rows].trimmed(), minibatch[1]
    width = rollout.mask.shape[1]
    return rollout, Credit(credit.advantages[rows, :width], credit.returns[rows, :width])

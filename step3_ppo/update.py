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
from rlhf.types import Metrics, Sequences, length_groups
from step3_ppo.algorithms import Algorithm
from step3_ppo.config import UpdateOptions
from step3_ppo.global_rollout import CreditedRollout, deal
from step3_ppo.ptx import Ptx
from step3_ppo.rollout import critic_values


@dataclass(frozen=True, slots=True)
class Learners:
    """What an iteration trains.

    No actor: the critic warms up alone. No critic: the algorithm has none. With `ptx` each step of the actor also
    learns a batch of demonstrations; `ema` averages the actor's weights.
    """

    actor: Engine | None
    critic: Engine | None
    algorithm: Algorithm
    ptx: Ptx | None = None
    ema: EMA | None = None


def update(
    learners: Learners,
    credited: CreditedRollout,
    config: UpdateOptions,
    generator: torch.Generator,
    indices: Sequence[int] = (),
) -> Metrics:
    """`num_ppo_epochs` passes over the rollout, each in `num_mini_batches` optimizer steps; fewer beyond `target_kl`.

    `credited`: the rollout of all ranks, the same on every rank (`global_rollout.gather`). Minibatches are drawn from
    it, and each is dealt to the ranks. `indices`: of its prompts in the data, for messages.
    Returns metrics averaged over the steps that were applied, the number of steps, and `first_approx_kl`: of the first
    minibatch, on which the policy is still the one that sampled, so it must be 0.
    Raises: NonFiniteError.
    """
    actor, critic, algorithm, ptx = learners.actor, learners.critic, learners.algorithm, learners.ptx

    def actor_loss(micro: CreditedRollout | Sequences) -> losses.Loss:
        assert actor is not None
        if isinstance(micro, Sequences):
            assert ptx is not None
            return ptx.loss(actor, micro)
        rollout, credit = micro.rollout, micro.credit
        mode = "trained" if config.entropy_coef else "watched"
        logprobs, entropies = actor(rollout.sequences, config.temperature, entropy=mode)
        prompt = rollout.prompt_ids.shape[1]
        loss, metrics = algorithm.policy_loss(logprobs[:, prompt:], rollout, credit, count)
        entropy = ops.masked_mean(entropies[:, prompt:], rollout.mask, count)
        return loss - config.entropy_coef * entropy, {**metrics, "entropy": entropy.detach()}

    def value_loss(micro: CreditedRollout) -> losses.Loss:
        rollout, credit = micro.rollout, micro.credit
        assert critic is not None and algorithm.value_loss is not None
        values = critic_values(critic)(rollout.sequences, rollout.prompt_ids.shape[1])
        return algorithm.value_loss(values, rollout, credit, count)

    history: dict[str, list[float]] = defaultdict(list)
    steps = skipped = 0
    lengths = credited.rollout.sequences.lengths.cpu()
    for minibatch in _minibatches(len(credited), config, generator):
        count = credited.rollout.mask[minibatch].sum().double()
        rows = deal(minibatch, lengths)
        groups = [rows[group] for group in length_groups(lengths[rows], config.micro_batch_size)]
        micros = [credited[group].trimmed() for group in groups]
        micro_indices = [[indices[row] for row in group.tolist()] for group in groups] if indices else []
        metrics: Metrics = {}
        if actor is not None:
            mixed = ptx.micro_batches() if ptx is not None else []
            all_indices = [*micro_indices, *([] for _ in mixed)] if indices else []
            metrics |= _prefixed("policy", actor.step([*micros, *mixed], actor_loss, all_indices))
            if learners.ema is not None and not metrics["policy_skipped"]:
                learners.ema.update()
        # A step that the actor skips (in fp16: an overflow) is skipped for the critic too.
        if critic is not None and not metrics.get("policy_skipped"):
            metrics |= _prefixed("value", critic.step(micros, value_loss, micro_indices))
        steps += 1
        skipped += any([metrics.pop("policy_skipped", 0.0), metrics.pop("value_skipped", 0.0)])
        for name, value in metrics.items():
            history[name].append(value)
        if config.target_kl is not None and metrics.get("approx_kl", 0.0) > config.target_kl:
            break
    return _means(history) | {"optimizer_steps": float(steps), "skipped_steps": float(skipped)}


def _means(history: dict[str, list[float]]) -> Metrics:
    if "ratio_square" in history:
        squares = zip(history.pop("ratio_square"), history["ratio_mean"], strict=True)
        history["ratio_std"] = [math.sqrt(max(0.0, square - (mean - 1) ** 2)) for square, mean in squares]
    means = {name: sum(values) / len(values) for name, values in history.items()}
    first = {f"first_{name}": history[name][0] for name in ("approx_kl", "ratio_std") if name in history}
    return {**means, **first}


def _prefixed(model: str, metrics: Metrics) -> Metrics:
    """The metrics that both engines report get the model's name as a prefix."""
    shared = ("loss", "grad_norm", "learning_rate", "skipped")
    return {f"{model}_{name}" if name in shared else name: value for name, value in metrics.items()}


def _minibatches(size: int, config: UpdateOptions, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each optimizer step: the whole rollout is shuffled anew in every epoch, alike on every rank."""
    for _ in range(config.num_ppo_epochs):
        yield from torch.randperm(size, generator=generator).tensor_split(config.num_mini_batches)

"""The second half of an iteration: epochs of minibatches on actor and critic.

Each rank samples and scores its own prompts. What an optimizer step learns from must not depend on how many ranks there
are, so the minibatches are drawn from the rollout of all ranks, and each is then dealt to the ranks.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.engine.ema import EMA
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths import losses, ops
from rlhf.models.policy import ActorCritic, Learns, TokenOutput
from rlhf.models.scalar import state_values
from rlhf.types import Credit, Metrics, ScoredRollout, TensorRecord, WeightedSequences, length_groups
from step3_ppo.algorithms import Algorithm, Iteration
from step3_ppo.config import UpdateOptions
from step3_ppo.ptx import Ptx


@dataclass(frozen=True, slots=True)
class CreditedRollout(TensorRecord):
    """A rollout, or some rows of it, with the credit of its tokens."""

    rollout: ScoredRollout
    credit: Credit

    def trimmed(self) -> "CreditedRollout":
        """Without the columns that are padding in every row."""
        rollout = self.rollout.trimmed()
        return CreditedRollout(rollout, self.credit.cut(rollout.mask.shape[1]))

    def widened(self, prompt: int, response: int) -> "CreditedRollout":
        """With padding up to P = `prompt` on the left and T = `response` on the right."""
        return CreditedRollout(self.rollout.widened(prompt, response), self.credit.widened(response))


def gather(
    credited: CreditedRollout, indices: list[int], group: int, minibatches: int
) -> tuple[CreditedRollout, list[int]]:
    """The rollout of all ranks with its credit, and the indices of its prompts, in the order of one process.

    Prompts are dealt to the ranks one by one (`data.batches.Batches`); `group` neighbouring rows are the responses to
    one prompt. All ranks call this together.
    Raises: UserError, on every rank, if an algorithm has not selected equally many rows on each, or not enough for the
    `minibatches`, or on several ranks a number that they do not divide.
    """
    by_rank, indices_of_ranks = zip(*collectives.gather_replicas((credited, indices)), strict=True)
    counts = [len(part) for part in by_rank]
    if len({*counts}) > 1 or counts[0] < minibatches or (len(counts) > 1 and counts[0] % minibatches):
        raise UserError(
            f"select: the algorithm chose {', '.join(map(str, counts))} responses on ranks 0 to {len(counts) - 1}; "
            f"expected as many on every rank and at least --num-mini-batches {minibatches}, on several ranks a multiple"
        )
    if len(by_rank) == 1:
        return credited, indices
    prompt = max(part.rollout.prompt_ids.shape[1] for part in by_rank)
    response = max(part.rollout.response_ids.shape[1] for part in by_rank)
    order = torch.arange(len(by_rank) * len(credited)).view(len(by_rank), -1, group).transpose(0, 1).flatten()
    joined = CreditedRollout.concatenated([part.widened(prompt, response) for part in by_rank])
    joined_indices = [index for indices in indices_of_ranks for index in indices]
    return joined[order], [joined_indices[i] for i in order.tolist()]


def deal(rows: Tensor, lengths: Tensor) -> Tensor:
    """This rank's rows of a minibatch: every rank gets equally many rows, and about as many tokens.

    rows [b] row numbers in the whole rollout, lengths [B] tokens of its rows.
    """
    return rows[lengths[rows].argsort(descending=True, stable=True)][collectives.dp_rank() :: collectives.dp_size()]


@dataclass(frozen=True, slots=True)
class Trained:
    """What an iteration trains.

    No actor: the critic warms up alone. No critic: the algorithm has none. If both are one engine, each of its steps
    minimises policy loss + vf_coef * value loss. With `ptx` each step of the actor also learns a batch of
    demonstrations; `ema` averages the actor's weights.
    """

    actor: Engine | None
    critic: Engine | None
    algorithm: Algorithm
    iteration: Iteration
    ptx: Ptx | None = None
    ema: EMA | None = None


@dataclass(frozen=True, slots=True)
class StepLosses:
    """The losses of one optimizer step; each method gives the share of a micro-batch."""

    trained: Trained
    config: UpdateOptions
    count: Tensor
    """[] response tokens of the step, over all ranks, on the CPU"""

    def actor_loss(self, micro: CreditedRollout | WeightedSequences) -> losses.Loss:
        """policy loss - entropy_coef * entropy [+ vf_coef * value loss, if the critic is the actor's engine]; of
        demonstrations, the loss of `Ptx`."""
        actor, config, algorithm = self.trained.actor, self.config, self.trained.algorithm
        assert actor is not None
        if isinstance(micro, WeightedSequences):
            assert self.trained.ptx is not None
            return self.trained.ptx.loss(actor, micro)
        mode, prompt = "trained" if config.entropy_coef else "watched", micro.rollout.prompt_ids.shape[1]
        output: TokenOutput = actor(micro.rollout.sequences, config.temperature, entropy=mode)
        assert output.entropies is not None
        micro = micro.to(output.logprobs.device)
        rollout, logprobs = micro.rollout, output.logprobs[:, prompt:]
        if not config.rescore:  # this is the first step since the policy sampled
            rollout = replace(rollout, logprobs=logprobs.detach())
        loss, metrics = algorithm.policy_loss(logprobs, rollout, micro.credit, self.count, self.trained.iteration)
        if not config.rescore:
            mismatch = (rollout.logprobs - rollout.sampled_logprobs).abs()
            metrics["sampling_mismatch"] = ops.masked_mean(mismatch, rollout.mask, self.count)
        entropy = ops.masked_mean(output.entropies[:, prompt:], rollout.mask, self.count)
        loss, metrics = loss - config.entropy_coef * entropy, {**metrics, "entropy": entropy.detach()}
        if self.trained.critic is not actor:
            return loss, metrics
        error, error_metrics = self._value_loss(output.values, micro)
        return loss + config.vf_coef * error, {**metrics, **error_metrics, "value_loss": error.detach()}

    def critic_loss(self, micro: CreditedRollout) -> losses.Loss:
        """The value loss; of a value head on the actor, whose policy must not move yet, for the head alone."""
        critic, sequences = self.trained.critic, micro.rollout.sequences
        assert critic is not None
        shared = isinstance(critic.module, ActorCritic)
        values = critic(sequences, learns="head").values if shared else critic(sequences)
        return self._value_loss(values, micro.to(values.device))

    def _value_loss(self, scalars: Tensor | None, micro: CreditedRollout) -> losses.Loss:
        value_loss = self.trained.algorithm.value_loss
        assert value_loss is not None and scalars is not None
        values = state_values(scalars, micro.rollout.prompt_ids.shape[1])
        return value_loss(values, micro.rollout, micro.credit, self.count, self.trained.iteration)


def update(
    trained: Trained,
    credited: CreditedRollout,
    config: UpdateOptions,
    generator: torch.Generator,
    indices: Sequence[int],
) -> Metrics:
    """`num_ppo_epochs` passes over the rollout, each in `num_mini_batches` optimizer steps; fewer beyond `target_kl`.

    The learning rate after it is the same whether steps were left out or not.
    `credited`: the rollout of all ranks, the same on every rank (`gather`), on the CPU. Minibatches are
    drawn from it, and each is dealt to the ranks. `indices`: of its prompts in the data, for messages.
    Returns metrics averaged over the steps that were applied, the number of steps, and `first_approx_kl`: of the first
    minibatch, on which the policy is still the one that sampled, so it must be 0.
    Raises: NonFiniteError.
    """
    actor, critic, ptx = trained.actor, trained.critic, trained.ptx
    joint = actor is not None and critic is actor
    history: dict[str, list[float]] = defaultdict(list)
    steps = skipped = 0
    lengths = credited.rollout.sequences.lengths
    for minibatch in _minibatches(len(credited), config, generator):
        step = replace(trained, iteration=replace(trained.iteration, step_responses=len(minibatch)))
        step_losses = StepLosses(step, config, credited.rollout.mask[minibatch].sum().double())
        rows = deal(minibatch, lengths)
        groups = [rows[group] for group in length_groups(lengths[rows], config.micro_batch_size)]
        micros = [credited[group].trimmed() for group in groups]
        micro_indices = [[indices[row] for row in group.tolist()] for group in groups]
        metrics: Metrics = {}
        if actor is not None:
            mixed = ptx.micro_batches() if ptx is not None else []
            both: list[CreditedRollout | WeightedSequences] = [*micros, *mixed]
            metrics |= actor.step(both, step_losses.actor_loss, [*micro_indices, *([] for _ in mixed)])
            if "value_loss" in metrics:
                metrics["loss"] -= config.vf_coef * metrics["value_loss"]
            metrics = _prefixed("policy", metrics)
            if trained.ema is not None and not metrics["policy_skipped"]:
                trained.ema.update()
        # A step that the actor skips (in fp16: an overflow) is skipped for the critic too.
        if critic is not None and not joint and not metrics.get("policy_skipped"):
            learns: Learns = "head" if isinstance(critic.module, ActorCritic) else "all"
            metrics |= _prefixed("value", critic.step(micros, step_losses.critic_loss, micro_indices, learns))
        steps += 1
        skipped += any([metrics.pop("policy_skipped", 0.0), metrics.pop("value_skipped", 0.0)])
        for name, value in metrics.items():
            history[name].append(value)
        if config.target_kl is not None and metrics.get("approx_kl", 0.0) > config.target_kl:
            for engine in [actor] if joint else [actor, critic]:
                if engine is not None:
                    engine.leave_out(config.num_ppo_epochs * config.num_mini_batches - steps)
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
    """The metrics that both engines report get the model's name as a prefix. The head is that of the values."""
    names = {name: f"{model}_{name}" for name in ("loss", "grad_norm", "learning_rate", "skipped")}
    names["learning_rate_of_head"] = "value_learning_rate"
    return {names.get(name, name): value for name, value in metrics.items()}


def _minibatches(size: int, config: UpdateOptions, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each optimizer step: the whole rollout is shuffled anew in every epoch, alike on every rank."""
    for _ in range(config.num_ppo_epochs):
        yield from torch.randperm(size, generator=generator).tensor_split(config.num_mini_batches)

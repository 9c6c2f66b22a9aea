"""Pretraining of the critic: before the first iteration it learns what the reward model says of whole responses.

A reward model learns from whole responses only, so its number at an earlier token is a bad value, and PPO's first
iterations are spent on a critic that misleads. The pairs of the reward model are there, and cost no sampling: the
critic, which starts as the reward model, makes passes over their responses and learns, at each state, the score of the
whole:

    loss = mean over states of 0.5 (V(s_t) - r(x, y))^2

r(x, y) is the score that the critic gives the whole response before its first step. The learning rate has a schedule of
its own, which ends at 0; that of the iterations then begins.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, pair_batch
from data.dataset import PhaseData, PromptDataset, Recipe, fingerprints, open_datasets
from data.prepare.encode import Preference
from rlhf import console
from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths import losses, ops
from rlhf.models.scalar import ScalarModel, score_separately
from rlhf.roles import Role, role_of
from rlhf.types import Metrics, Sequences, length_groups, to_device
from step3_ppo.config import STAGE, Step3Config
from step3_ppo.roles import ACTOR, CRITIC


@dataclass(frozen=True, slots=True)
class ScoredSequences(Sequences):
    """Responses with their prompts, and how the reward model scores them."""

    score: Tensor
    """[B] of the whole response"""

    @property
    def states(self) -> Tensor:
        """Where values are read, bool [B, S]: one position before each token of a response."""
        return pad(self.loss_mask[:, 1:], (0, 1))

    def target(self) -> Tensor:
        """The score at each position, [B, S]."""
        return self.score[:, None].expand(self.states.shape)


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Pairs, with the scores of their sides before pretraining."""

    pairs: PromptDataset[Preference]
    scores: Tensor
    """[N, 2], of the chosen and the rejected responses"""
    pad_id: int

    def sides(self, rows: Sequence[int]) -> ScoredSequences:
        """Both sides of the pairs with these numbers, the chosen ones first."""
        batch = pair_batch([self.pairs[i] for i in rows], self.pad_id).stacked()
        return ScoredSequences(*batch.tensors(), score=self.scores[list(rows)].T.flatten())

    def of_rank(self, size: int) -> Iterator[ScoredSequences]:
        """The sides of this rank's pairs, `size` pairs at a time."""
        rows = collectives.rows_of_rank(len(self.pairs))
        for start in range(0, len(rows), size):
            yield self.sides(rows[start : start + size])


def check_pretraining(config: Step3Config, table: Sequence[Role]) -> None:
    """Raises: UserError for pretraining of a critic that does not start from a model that scores."""
    option, critic = f"--critic-pretraining-epochs {config.critic_pretraining_epochs}", role_of(table, CRITIC)
    if not config.critic_pretraining_epochs:
        return
    if critic is None:
        raise UserError(f"{option}: expected 0, as '{config.algorithm}' has no critic")
    if critic.start is ACTOR:
        raise UserError(
            f"{option}: got a critic with a new head on the policy ({critic.reason}), which scores nothing yet; "
            "expected one that starts from a reward model: name it with --critic-model, or remove the option"
        )


def open_pairs(config: Step3Config, tokenizer: PreTrainedTokenizerBase) -> PhaseData[Preference] | None:
    """The pairs of the reward model, for the critic; None without pretraining. Raises: UserError."""
    return open_datasets(config, Recipe("reward"), tokenizer) if config.critic_pretraining_epochs else None


def pairs_content(config: Step3Config) -> dict[str, str]:
    """A digest of each local path that `open_pairs` reads."""
    if not config.critic_pretraining_epochs:
        return {}
    return {f"{path} (critic)": digest for path, digest in fingerprints(config, "reward").items()}


def pretrain(critic: Engine[ScalarModel], data: PhaseData[Preference], config: Step3Config, pad_id: int) -> Metrics:
    """Train the critic on the pairs. Returns how much of the variance of the scores of held-out responses its values
    explain, before and after. Raises: NonFiniteError."""
    train, held_out = (
        ScoredPairs(pairs, score_pairs(critic, pairs, config, pad_id), pad_id)
        for pairs in (data.train, data.evaluation)
    )
    before = explained_variance(critic, held_out, config)
    batches = Batches(len(data.train), config.batch_size, config.seed, (collectives.dp_rank(), collectives.dp_size()))
    total = batches.steps(config.critic_pretraining_epochs)
    with critic.own_schedule(total), console.bar(f"{STAGE.name}: pretraining the critic", total) as bar:
        for rows in batches.until_epoch(config.critic_pretraining_epochs):
            metrics = take_step(critic, train.sides(rows), rows, config)
            bar.advance(1, {name: metrics[name] for name in ("loss",) if name in metrics})
    after = explained_variance(critic, held_out, config)
    console.say(
        f"{STAGE.name}: the critic learned from {len(data.train)} pairs in {total} steps; it explains {after:.2f} of "
        f"the variance of the scores of held-out responses, before {before:.2f}"
    )
    return {"eval_critic_explained_before": before, "eval_critic_explained": after}


def take_step(critic: Engine[ScalarModel], sides: ScoredSequences, rows: Sequence[int], config: Step3Config) -> Metrics:
    """One optimizer step on both sides of this rank's pairs. rows: their numbers in the data, for messages"""
    count = collectives.sum_over_ranks(sides.states.sum())
    groups = length_groups(sides.lengths, config.micro_batch_size)

    def loss(micro: ScoredSequences) -> losses.Loss:
        values = critic(micro)
        states, target = to_device(micro.states, values.device), to_device(micro.target(), values.device)
        error, _ = losses.clipped_value(values, values.detach(), target, states, math.inf, count)
        return error, {}

    return critic.step(
        [sides[group].trimmed() for group in groups], loss, [[rows[i % len(rows)] for i in group] for group in groups]
    )


def score_pairs(
    critic: Engine[ScalarModel], pairs: PromptDataset[Preference], config: Step3Config, pad_id: int
) -> Tensor:
    """The scores of both sides of all pairs, [N, 2]; each rank scores its share."""
    rows, size = collectives.rows_of_rank(len(pairs)), config.eval_rows
    scored: list[list[float]] = []
    with critic.inference() as model:
        for start in range(0, len(rows), size):
            batch = pair_batch([pairs[i] for i in rows[start : start + size]], pad_id)
            scored += score_separately(model, batch).scores.tolist()
    return torch.tensor(collectives.of_all_ranks(scored))


def explained_variance(critic: Engine[ScalarModel], pairs: ScoredPairs, config: Step3Config) -> float:
    """1 - var(r - V) / var(r) over the states of both sides of all pairs; NaN if the scores do not vary."""
    moments = torch.zeros(2, 3, dtype=torch.float64)
    with critic.inference() as model:
        for sides in pairs.of_rank(config.eval_rows):
            target, states = sides.target().double(), sides.states
            error = target - model(sides).cpu()
            moments += torch.stack([ops.moments(error, states), ops.moments(target, states)])
    (_, missed), (_, all_of_it) = map(ops.mean_var, collectives.sum_over_ranks(moments))
    return float(1 - missed / all_of_it) if all_of_it > 0 else math.nan

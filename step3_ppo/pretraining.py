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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, sft_batch
from data.dataset import PhaseData, PromptDataset, Recipe, fingerprints, open_datasets
from data.prepare.encode import Demonstration, Preference
from rlhf import console
from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths import losses, ops
from rlhf.models.scalar import ScalarModel, scores
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
class Responses:
    """Both responses of each pair: number 2 i is the chosen one of pair i, 2 i + 1 the rejected one."""

    pairs: PromptDataset[Preference]
    pad_id: int

    @property
    def count(self) -> int:
        return 2 * len(self.pairs)

    def batch(self, numbers: Sequence[int]) -> Sequences:
        """The responses of these numbers with their prompts, padded on the right."""
        return sft_batch([self._response(self.pairs[number // 2], number % 2) for number in numbers], self.pad_id)

    @staticmethod
    def _response(pair: Preference, rejected: int) -> Demonstration:
        ids = pair.rejected if rejected else pair.chosen
        return Demonstration(ids, ((pair.prompt_length, len(ids)),))


def check_pretraining(config: Step3Config, table: Sequence[Role]) -> None:
    """Raises: UserError for pretraining of a critic that does not start from a model that scores."""
    option, critic = f"--critic-pretraining-epochs {config.critic_pretraining_epochs:g}", role_of(table, CRITIC)
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
    train, held_out = (Responses(pairs, pad_id) for pairs in (data.train, data.evaluation))
    epochs, order = config.critic_pretraining_epochs, Batches(train.count, config.batch_size, config.seed)
    steps = math.ceil(epochs * order.steps(1))
    batches = list(islice(order.until_epoch(math.ceil(epochs)), steps))
    target = score_responses(critic, train, sorted({*chain(*batches)}), config.eval_rows)
    of_held_out = score_responses(critic, held_out, range(held_out.count), config.eval_rows)
    before = explained_variance(critic, held_out, of_held_out, config.eval_rows)
    with critic.own_schedule(steps), console.bar(f"{STAGE.name}: pretraining the critic", steps) as bar:
        for batch in batches:
            numbers = [batch[i] for i in collectives.rows_of_rank(len(batch))]
            metrics = take_step(critic, with_scores(train, numbers, target), numbers, config.micro_batch_size)
            bar.advance(1, {name: metrics[name] for name in ("loss",) if name in metrics})
    after = explained_variance(critic, held_out, of_held_out, config.eval_rows)
    console.say(
        f"{STAGE.name}: the critic learned from {len(target)} responses of {len(data.train)} pairs in {steps} steps; "
        f"it explains {after:.2f} of the variance of the scores of held-out responses, before {before:.2f}"
    )
    return {"eval_critic_explained_before": before, "eval_critic_explained": after}


def take_step(
    critic: Engine[ScalarModel], batch: ScoredSequences, numbers: Sequence[int], micro_batch_size: int
) -> Metrics:
    """One optimizer step on this rank's responses. numbers: of them in the data, for messages"""
    count = collectives.sum_over_ranks(batch.states.sum())
    groups = length_groups(batch.lengths, micro_batch_size)

    def loss(micro: ScoredSequences) -> losses.Loss:
        values = critic(micro)
        states, target = to_device(micro.states, values.device), to_device(micro.target(), values.device)
        error, _ = losses.clipped_value(values, values.detach(), target, states, math.inf, count)
        return error, {}

    return critic.step([batch[group].trimmed() for group in groups], loss, [[numbers[i] for i in g] for g in groups])


def with_scores(responses: Responses, numbers: Sequence[int], scores: Mapping[int, float]) -> ScoredSequences:
    """The responses of these numbers, with `scores` by number."""
    return ScoredSequences(
        *responses.batch(numbers).tensors(), score=torch.tensor([scores[number] for number in numbers])
    )


def score_responses(
    critic: Engine[ScalarModel], responses: Responses, numbers: Sequence[int], size: int
) -> dict[int, float]:
    """The score of each of these responses; each rank scores its part, `size` at a time."""
    of_rank = [numbers[i] for i in collectives.rows_of_rank(len(numbers))]
    scored: list[float] = []
    with critic.inference() as model:
        for start in range(0, len(of_rank), size):
            rows = responses.batch(of_rank[start : start + size])
            scored += scores(model(rows), rows.mask).tolist()
    return dict(zip(numbers, collectives.of_all_ranks(scored), strict=True))


def explained_variance(
    critic: Engine[ScalarModel], responses: Responses, target: Mapping[int, float], size: int
) -> float:
    """1 - var(r - V) / var(r) over the states of all responses; NaN if the scores do not vary."""
    moments, of_rank = torch.zeros(2, 3, dtype=torch.float64), collectives.rows_of_rank(responses.count)
    with critic.inference() as model:
        for start in range(0, len(of_rank), size):
            batch = with_scores(responses, of_rank[start : start + size], target)
            error = batch.target().double() - model(batch).cpu()
            moments += torch.stack([ops.moments(x, batch.states) for x in (error, batch.target().double())])
    (_, missed), (_, all_of_it) = map(ops.mean_var, collectives.sum_over_ranks(moments))
    return float(1 - missed / all_of_it) if all_of_it > 0 else math.nan

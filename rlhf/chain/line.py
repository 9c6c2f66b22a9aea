"""The straight line between the weights of a reference and of the policy that was tuned from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.prepare.encode import Demonstration
from data.read.choices import Question
from rlhf import console
from rlhf.config.options import FrozenOptions
from rlhf.engine.export import save_policy
from rlhf.engine.frozen import FrozenEngine
from rlhf.errors import UserError
from rlhf.hub.untrusted import is_adapter
from rlhf.maths.intervals import ratio_interval
from rlhf.models.load import load_causal_lm, load_config
from rlhf.models.policy import Policy
from rlhf.storage import disk, manifests
from rlhf.supervised.choices import right_answers
from rlhf.supervised.demonstrations import held_out, logprob_sums
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from step3_ppo.cost import open_questions, paired_half_width

POINTS = tuple(tenth / 10 for tenth in range(10, 0, -1))
"""that `best` tries, the farthest first: what it finds is that, also if a cost does not grow evenly along the line"""
HEAD = (f"{'perplexity':>14}{'nats a token':>20}", f"{'right answers':>14}{'change':>20}")
"""of the columns of demonstrations and of questions"""
ROWS = 16
"""in one pass"""


def between(reference: str, policy: str, at: float, out: Path) -> float:
    """Write the policy at a point of the line. Returns: the point.

    On the line the reward for a nat of KL stays about what it is at its end, so that one run gives a whole frontier
    (docs/results/efficiency.md; arXiv 2109.01903 has the line for fine-tuning).
    Raises: UserError for adapters, models of other shapes, or if `out` is not empty.
    """
    _require_line(reference, policy, f"{at:g}", out)
    tokenizer = load_tokenizer(policy)
    write_policy(_point(reference, policy, at, id_count(tokenizer)), tokenizer, out)
    return at


@dataclass(frozen=True, slots=True)
class Change:
    """A cost at a point of the line, as the cells of a table."""

    of: str
    value: str
    change: str
    is_loss: bool


@dataclass(frozen=True, slots=True)
class Holdout:
    """Rows that no reward has seen, by which a policy's costs are measured."""

    tokenizer: PreTrainedTokenizerBase
    demonstrations: Sequence[Demonstration]
    questions: Sequence[Question]

    def measure(self, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        """The log-probability of each demonstration [N], and whether each answer is right [M]."""
        policy = _frozen(model)
        logprobs = right = torch.empty(0)
        if self.demonstrations:
            logprobs = logprob_sums(policy, self.demonstrations, ROWS, self.tokenizer.pad_token_id)
        if self.questions:
            right = right_answers(policy, self.questions, self.tokenizer, ROWS)
        return logprobs, right

    def changes(self, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Iterator[Change]:
        """How each cost has changed, with half the 95 % interval, paired by row. A loss is shown if the whole interval
        is one, or no number."""
        if self.demonstrations:
            tokens = torch.tensor([sum(end - start for start, end in row.spans) for row in self.demonstrations])
            change, perplexity = ratio_interval(after[0] - before[0], tokens), (-after[0].sum() / tokens.sum()).exp()
            text = f"{change.mean:+.4f} ± {change.half_width:.4f}"
            yield Change("demonstrations", f"{perplexity:.4g}", text, not change.high >= 0)
        if self.questions:
            gain, half = float((after[1] - before[1]).mean()), paired_half_width(before[1], after[1])
            text = f"{gain:+.1%} ± {half:.1%}"
            yield Change("questions", f"{after[1].mean():.1%}", text, gain + half < 0)


def best(reference: str, policy: str, keep: str | None, out: Path) -> float:
    """Write the policy at the farthest of POINTS points of the line at which no cost shows a loss. Returns: the point.

    The costs are those of step 3: the held-out demonstrations of the stage that has made the reference, and the
    questions of multiple choice in `keep`.
    Raises: UserError if every point shows a loss, or as `between`.
    """
    _require_line(reference, policy, "best", out)
    tokenizer, rows = load_tokenizer(policy), _open(reference, policy, keep)
    ids = id_count(tokenizer)
    before = rows.measure(_point(reference, policy, 0.0, ids))
    console.say(f"{'at':>4}{HEAD[0] * bool(rows.demonstrations)}{HEAD[1] * bool(rows.questions)}  loss shown")
    console.say(_line(0.0, [*rows.changes(before, before)]))
    for at in POINTS:
        model = _point(reference, policy, at, ids)
        changes = [*rows.changes(before, rows.measure(model))]
        console.say(_line(at, changes))
        if not any(change.is_loss for change in changes):
            write_policy(model, tokenizer, out)
            return at
    raise UserError(
        f"--at best: expected a point of the line without a loss, got one at each, down to {POINTS[-1]:g}; nothing is "
        "written; --at NUMBER writes a point of your choice"
    )


def _open(reference: str, policy: str, keep: str | None) -> Holdout:
    tokenizer, stage = prepare_tokenizer(load_tokenizer(policy), "auto"), manifests.stage_of(reference)
    questions = open_questions("--keep", keep, policy, tokenizer)
    demonstrations: Sequence[Demonstration] = (stage and held_out(stage, tokenizer)) or ()
    if len(demonstrations) < 2:  # one has no interval
        demonstrations = ()
    if not demonstrations and not questions:
        raise UserError(
            f"--at best: got fewer than 2 held-out demonstrations of {reference}, and no questions; name some with "
            "--keep FILE"
        )
    return Holdout(tokenizer, demonstrations, questions)


def _line(at: float, changes: Sequence[Change]) -> str:
    cells = "".join(f"{change.value:>14}{change.change:>20}" for change in changes)
    return f"{at:>4g}{cells}  {' and '.join(change.of for change in changes if change.is_loss) or 'no'}"


def _require_line(reference: str, policy: str, at: str, out: Path) -> None:
    for path in (reference, policy):
        if is_adapter(Path(path)):
            raise UserError(f"--at {at}: {path} is an adapter, expected whole models; merge it first (--merge DIR)")
    require_new(out)


def _point(reference: str, policy: str, at: float, ids: int) -> PreTrainedModel:
    """The model of weights reference + at * (policy - reference). ids: of the tokenizer

    Raises: UserError for models of other shapes.
    """
    dtype: Any = load_config(policy).dtype
    first, model = (load_causal_lm(path, dtype, ids) for path in (reference, policy))
    reference_weights = first.state_dict()
    for name, weight in model.named_parameters():  # a tied weight once
        from_weight = reference_weights.get(name)
        if from_weight is None or from_weight.shape != weight.shape:
            raise UserError(f"--at {at:g}: {name} of {policy} is not as in {reference}; expected models of one shape")
        weight.data.copy_(from_weight.float().lerp(weight.data.float(), at))
    return model


def require_new(out: Path) -> None:
    """Raises: UserError unless the directory is to be made, or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--merge {out}: it exists, expected a new directory; remove it, or name another")


def write_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write a language model as a stage writes its policy."""
    engine: Any = _frozen(model)
    with disk.atomic_directory(out) as staging:
        save_policy(engine, None, tokenizer, staging)


def _frozen(model: PreTrainedModel) -> FrozenEngine[Policy]:
    return FrozenEngine(Policy(model), FrozenOptions(zero_stage=0), model.dtype)

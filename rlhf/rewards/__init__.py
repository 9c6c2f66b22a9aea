"""Score sources: one number for each whole response. One file per source; several combine into one score.

The scores of a penalty are 0 or below, so that its weight is positive like that of any other source.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import console, plugins
from rlhf.config import Tree
from rlhf.config.options import FrozenOptions
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.maths.credit import EPSILON
from rlhf.models.load import load_config
from rlhf.models.scalar import ScalarModel, read_head
from rlhf.storage import disk
from rlhf.storage.manifests import resolve_model_path
from rlhf.text.dialogues import Template
from rlhf.types import Metrics, Row, SampledRollout, Samples

Combine = Literal["sum", "min", "uncertain", "normalized"]

UNCERTAINTY_COEF = 0.1
"""weight of the variance over the members of an ensemble"""

NO_SCORE = -math.inf
"""of a response to which a source does not apply; a score that is not finite is NaN or above 0"""

ANSWERS = "answers"
"""the folder of answers that a run has paid for"""
REQUESTS, TOKENS, CACHED, UNREAD = "requests", "request_tokens", "cached_answers", "unread_answers"
"""counts of a source: requests that were answered, tokens of these and their answers, answers that the folder had, and
those that could not be read"""

REFERENCE = "reference"
"""The column of the response in the data, for reward functions."""


Compare = Callable[[Sequence[Row], Sequence[str], Sequence[str]], Tensor]
"""Verdicts [B, 2] on the rows' first responses and their second ones: 1 if the second is better, 0 if the first is, 0.5
for a tie, `NO_SCORE` where there is none; with the first response before the second, and in the other order."""


Check = Callable[[Tensor, Samples, str], None]
"""Raises: UserError for scores [B] of samples, by the source of that name, that a caller cannot use."""


class Source(Protocol):
    """A score source, as `build(config, context)` of a file in this folder must return it."""

    def __call__(self, samples: Samples, /) -> Tensor:
        """One score for each of the B responses, [B]; higher is better; `NO_SCORE` where the source does not apply.
        `columns_of(samples)`: columns of the data.

        A source that costs requests has a method `counts`, a judge of pairs `compare`: see `Opened`."""


class Function(Protocol):
    """A score source as a plain function of the user, whose name follows its file: `file.py:function`."""

    def __call__(self, prompts: list[str], responses: list[str], /, **columns: list[Any]) -> Iterable[float | None]:
        """One finite number for each of the B responses; None where the function does not apply.

        columns: those of the rows that the function has a parameter for, each a list of B; `**columns` takes all. A
        parameter `answers` gets the responses without their thoughts, unless the data has a column of that name.
        """
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """Properties of the run that a score source may need."""

    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    reward_model: str
    """path or hub id of the run's reward model"""
    micro_batch_size: int
    model_options: FrozenOptions = field(default_factory=FrozenOptions)
    """sharding and offloading of learned reward models"""
    loaded: Mapping[str, ScalarModel] = field(default_factory=dict)
    """reward models by path that are in memory already: adapters on the actor's base model"""
    answers: Path | None = None
    """folder for answers that are paid for; None: nothing stays"""


@dataclass(frozen=True, slots=True)
class WeightedSource:
    """One of several sources, with its weight and the name under which it is logged."""

    name: str
    weight: float
    source: Source
    offset: float = 0.0
    """of a member of an ensemble: its mean score, which means nothing in a Bradley-Terry model"""


@dataclass(frozen=True, slots=True)
class Sources:
    """Several sources combined into one score: the weighted sum, the minimum of the weighted scores, or less where they
    disagree.

    With the minimum, a helpful but unsafe response has the score of an unsafe one. Uncertain (Coste et al. 2023, arXiv
    2310.02743, equation 4): the sources are the K members of an ensemble, and

        score = mean_k(m_k) - uncertainty_coef * 1/K * sum_k (m_k - mean)^2,  m_k = w_k (s_k - offset_k)

    with the mean of the held-out scores of a reward model as its offset: pairs teach it differences only, so that two
    members which always agree may still be a constant apart.

    Normalized scores are summed too, and the algorithm gets others, `normalized`.

    A source of weight 0 is logged, but does not change the score. A source without a score for a response, `NO_SCORE`,
    does not count in its sum or minimum; a response without any score has `NO_SCORE`.
    """

    sources: tuple[WeightedSource, ...]
    combine: Combine = "sum"
    uncertainty_coef: float = UNCERTAINTY_COEF

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.sources)

    def __call__(self, samples: Samples) -> tuple[Tensor, dict[str, Tensor]]:
        """(scores [B], scores [B] of each source by its name, before its weight), on the CPU; perhaps not finite."""
        by_name = {each.name: each.source(samples).cpu() for each in self.sources}
        counting = [each for each in self.sources if each.weight != 0]
        weighted_scores = torch.stack([each.weight * (by_name[each.name] - each.offset) for each in counting])
        if self.combine == "uncertain":
            variance = weighted_scores.var(0, correction=0)
            return weighted_scores.mean(0) - self.uncertainty_coef * variance, by_name
        without = torch.stack([by_name[each.name] == NO_SCORE for each in counting])
        neutral, combine = (math.inf, Tensor.amin) if self.combine == "min" else (0.0, Tensor.sum)
        scores = combine(weighted_scores.masked_fill(without, neutral), 0)
        return scores.masked_fill(without.all(0), NO_SCORE), by_name

    def counts(self) -> Metrics:
        """What the sources have done since the last call, over all ranks: requests, tokens."""
        return counts_of([each.source for each in self.sources])

    def normalized(self, source_scores: Tensor, group: int) -> Tensor:
        """The sum over the sources of their scores relative to the group's, [B]: a source whose scores differ more
        counts no more than the others.

            score_i = sum_k w_k (s_ik - mean of the group) / (deviation of the group + 1e-4)

        GDPO (arXiv 2601.05242, eq. 4); a response to which a source does not apply has 0 of it.
        source_scores [B, N]: of each source, before its weight, in groups of neighbours to one prompt
        """
        groups = source_scores.double().view(-1, group, source_scores.shape[1])
        missing = groups == NO_SCORE
        counts = (~missing).sum(1, keepdim=True)
        centred = groups - groups.masked_fill(missing, 0.0).sum(1, keepdim=True) / counts
        centred = centred.masked_fill(missing, 0.0)
        deviations = (centred.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()
        weights = torch.tensor([source.weight for source in self.sources], dtype=torch.float64)
        relative = weights * centred / (deviations + EPSILON)
        return relative.sum(2).view(-1).to(source_scores.dtype)

    def disagreement(self, source_scores: Tensor) -> Tensor | None:
        """The standard deviation of the weighted scores over the members of an ensemble, [B]; None without `uncertain`.

        source_scores [B, N]: of each source, before its weight
        """
        if self.combine != "uncertain":
            return None
        weights, offsets = (torch.tensor(x) for x in zip(*((s.weight, s.offset) for s in self.sources), strict=True))
        return (weights * (source_scores - offsets))[:, weights != 0].std(1, correction=0)


class Opened:
    """A score source under the name that the user wrote, with a check of what it returns."""

    def __init__(self, spec: str, source: Source, has_gaps: bool, check: Check) -> None:
        """has_gaps: whether -inf of it is `NO_SCORE`; of a model it is an overflow"""
        self.spec, self._source, self._has_gaps, self._check = spec, source, has_gaps, check
        self.compare: Compare | None = getattr(source, "compare", None)
        """of a judge of pairs, which scores no response alone"""
        self.counts: Callable[[], Metrics] | None = getattr(source, "counts", None)
        """what it has done since the last call, on this rank: requests, tokens"""

    def __call__(self, samples: Samples) -> Tensor:
        in_file, source = self.spec.split(",")[0].endswith(".py"), self._source
        scores = plugins.call(self.spec, "score", source, samples) if in_file else source(samples)
        if not isinstance(scores, Tensor):
            raise UserError(f"reward '{self.spec}': got {type(scores).__name__}, expected a tensor of scores, [B]")
        if scores.shape != (len(samples.responses),):
            raise UserError(
                f"reward '{self.spec}': got {list(scores.shape)} scores, expected [{len(samples.responses)}]"
            )
        if not self._has_gaps:
            scores = scores.masked_fill(scores == NO_SCORE, math.nan)
        self._check(scores, samples, self.spec)
        return scores

    def scoring(self) -> Self:
        """The source itself. Raises: UserError for a judge of pairs."""
        if self.compare is not None:
            raise UserError(
                f"reward '{self.spec}': it compares two responses, expected a score of one; remove task=compare, or "
                "name it as --judge or for rlhf pairs"
            )
        return self


def open_source(spec: str, context: Context) -> Opened:
    """A score source by name, `name,option=value`, the user's `file.py,option=value` with `Config` and `build`, or the
    Python function `file.py:function` / `module:function`.

    Its scores are checked: a score that is not finite is a UserError that names the response.
    """
    return _open(spec, context, require_finite).scoring()


def open_judge(spec: str, context: Context) -> Opened:
    """A score source as of `open_source` that may have no score for a response, or a judge of pairs."""
    return _open(spec, context, lambda scores, *of: require_finite(scores.masked_fill(scores == NO_SCORE, 0.0), *of))


def open_unchecked(spec: str, context: Context) -> Opened:
    """A score source as of `open_source`, whose scores may be non-finite, or a judge of pairs."""
    return _open(spec, context, lambda *_: None)


def answer_rows(folder: Path) -> Iterator[Tree]:
    """The answers of all ranks in a folder; one that a kill has cut is left out."""
    return (row for path in sorted(folder.glob("*.jsonl")) for row in disk.json_lines(path))


def cost(folder: Path) -> tuple[int, int]:
    """(requests, tokens of these and their answers) of all answers in a folder."""
    tokens = [int(row["tokens"]) for row in answer_rows(folder)]
    return len(tokens), sum(tokens)


def counts_of(sources: Sequence[Source]) -> Metrics:
    """What the sources have done since the last call, over all ranks, which have the same sources."""
    counters = [source.counts for source in sources if isinstance(source, Opened) and source.counts is not None]
    total = Counter[str]()
    of_ranks = collectives.gather_replicas([count() for count in counters]) if counters else []
    for counts in itertools.chain.from_iterable(of_ranks):
        total.update(counts)
    return dict(total)


def say_counts(sources: Sequence[Source]) -> None:
    """Print them, if there are any."""
    if counts := counts_of(sources):
        console.say(f"asked of a judge: {console.metrics_line(counts)}")


def _open(spec: str, context: Context, check: Check) -> Opened:
    plugin = _plugin(spec)
    name = spec.split(",")[0]
    if "/" in name and plugin is spec and not name.endswith(".py"):
        raise UserError(
            f"reward '{name}': got a path, expected a score source: learned,model={name} for a reward model of step 2, "
            f"classifier,model={name} for another classifier"
        )
    built: Source = plugins.build("rlhf.rewards", plugin, context)
    has_gaps = plugins.parse_spec(plugin)[0].endswith((".py", "python", "openai"))
    return Opened(spec, plugins.conforming(built, Source, spec), has_gaps, check)


def check_source(spec: str, context: Context, scores: bool = True) -> None:
    """Raises: UserError for a source that cannot be opened, or that `scores` no single response and must. Of a reward
    model only the head is read."""
    name, options = plugins.parse_spec(spec)
    if name != "learned":
        source = open_unchecked(spec, context)
        if scores:
            source.scoring()
        return
    plugins.options("rlhf.rewards", spec)
    if options.get("model"):
        read_head(resolve(resolve_model_path(options["model"], "model", "critic")))


def check_rows(spec: str, rows: Iterable[Row]) -> None:
    """The source's `check_rows(config, rows)`, if its file has one beside `build`. Raises: UserError for a row that it
    cannot score, which a run may meet after hours."""
    plugin = _plugin(spec)
    check = getattr(plugins.find("rlhf.rewards", plugins.parse_spec(plugin)[0]), "check_rows", None)
    if check is not None:
        plugins.call(spec, "check_rows", check, plugins.options("rlhf.rewards", plugin), [*rows])


def _plugin(spec: str) -> str:
    """The spec; of `python` if it names a function: `file.py:function`, `module:function`, a file without `build`."""
    name, *options = spec.split(",", 1)
    if ":" in name or (name.endswith(".py") and "build" not in vars(plugins.load_file(name))):
        return ",".join([plugins.spec("python", function=name), *options])
    return spec


def open_sources(
    specs: Sequence[str],
    context: Context,
    combine: Combine = "sum",
    uncertainty_coef: float = UNCERTAINTY_COEF,
) -> Sources:
    """Sources by their specs, each with an optional weight: `learned`, `0.5*length,target=40`.

    Raises: UserError for a weight that is not a number, an unknown source, or a number of sources with a weight other
    than 0 that cannot be combined.
    """
    check_weights(specs, combine)
    specs_with_weights = [plugins.split_weight(spec) for spec in specs]
    names = _numbered([_source_name(spec) for _, spec in specs_with_weights])
    sources = [
        WeightedSource(name, weight, open_unchecked(spec, context).scoring(), _offset(spec, context, combine))
        for name, (weight, spec) in zip(names, specs_with_weights, strict=True)
    ]
    return Sources(tuple(sources), combine, uncertainty_coef)


def _offset(spec: str, context: Context, combine: Combine) -> float:
    """The mean of a reward model's held-out scores, if it is a member of an ensemble and knows it; else 0."""
    name, _ = plugins.parse_spec(spec)
    if combine != "uncertain" or name != "learned":
        return 0.0
    options = plugins.options("rlhf.rewards", spec)
    path = resolve_model_path(options.model or context.reward_model, "model", "critic")
    return 0.0 if options.normalize else float(getattr(load_config(path), "score_mean", None) or 0.0)


def check_weights(specs: Sequence[str], combine: Combine) -> None:
    """Raises: UserError for no source with a weight other than 0, or only one as an ensemble."""
    count = sum(plugins.split_weight(spec)[0] != 0 for spec in specs)
    if not count:
        raise UserError(f"reward: got {list(specs)}, expected at least one source whose weight is not 0")
    if combine == "uncertain" and count < 2:
        raise UserError(
            f"reward_combine uncertain: got {count} source, expected the members of an ensemble, as in "
            "learned,model=FIRST learned,model=SECOND"
        )


def _source_name(spec: str) -> str:
    """The name under which a source is logged: its own, or file and function without the folders."""
    name, options = plugins.parse_spec(spec)
    return PurePath(str(options.get("function", name)) if name == "python" else name).name


def _numbered(names: list[str]) -> list[str]:
    """The names; repeated ones get a number: learned#1, learned#2."""
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name}#{names[: i + 1].count(name)}" if name in repeated else name for i, name in enumerate(names)]


def as_samples(rollout: SampledRollout, tokenizer: PreTrainedTokenizerBase) -> Samples:
    """Prompts and responses of a rollout as text."""
    template = Template(tokenizer)
    tokens = rollout.tokens_before_end()
    prompts = tuple(template.prompt_text(row.prompt, row.variables) for row in rollout.rows)
    answers = tuple(template.answer(ids, prompt).content for ids, prompt in zip(tokens, prompts, strict=True))
    return Samples(prompts, tuple(map(template.response_text, tokens)), rollout, answers)


def columns_of(samples: Samples) -> dict[str, list[Any]]:
    """The columns of the rows beside the prompt, by name: each a list of B, None for a row without that column.

    The response in the data (a demonstration, the chosen side of a pair) is the column `reference`, and has the name
    that the file gives it, such as `answer`, unless the data has another column of that name.
    """
    return columns_of_rows(samples.rollout.rows)


def columns_of_rows(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The same of rows that need no responses yet."""
    names = sorted({name for row in rows for name in row.columns})
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    answered = {row.response_column or REFERENCE for row in rows if row.response is not None}
    for name in ({REFERENCE} if answered else set()) | answered:
        columns.setdefault(name, [row.response for row in rows])
    return columns


def require_finite(scores: Tensor, samples: Samples, source: str) -> None:
    """Raises: UserError that names the response whose score [B] is not finite."""
    for score, prompt, response in zip(scores.tolist(), samples.prompts, samples.responses, strict=True):
        if not math.isfinite(score):
            response_text = f"prompt {prompt[-60:]!r}, response {response[:60]!r}"
            value = None if score == NO_SCORE else score
            raise UserError(f"reward '{source}': got {value} for {response_text}; expected a finite number")

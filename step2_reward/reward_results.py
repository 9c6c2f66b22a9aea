"""The results of reward models on pairs: numbers, tables, and files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf import console
from rlhf.config import Tree
from rlhf.evaluation.batch_generation import RESULTS
from rlhf.evaluation.results_table import Table, markdown
from rlhf.hub.short_names import resolve
from rlhf.maths import preferences
from rlhf.maths.intervals import Interval
from rlhf.maths.preferences import CalibrationBin, Ensemble
from rlhf.storage import disk, manifests
from step2_reward.evaluation_options import EvaluateRewardConfig
from step2_reward.pair_scores import SourceScores

ALL = "all"
"""the name of all sources together"""
NOTE = (
    "Accuracy: the share of pairs whose chosen response has the higher score; a tie is one half, and the pairs of "
    "one list of responses count as one pair. Intervals are 95 %. Longer: the accuracy of preferring the longer "
    "response; length rule: of the better of 'longer' and 'shorter'. Correlation: of the gaps in score and in "
    "length (tokens). Lists: the share of the lists whose pairs are all in the right order; of one chosen and "
    "several rejected responses, the best-of-n accuracy. Loss: -log sigmoid(gap). ECE: expected calibration error "
    "of sigmoid(gap)."
)


@dataclass(frozen=True, slots=True)
class Group:
    """A part of the pairs."""

    pairs: int
    accuracy: Interval
    lists: Interval | None
    """lists of which all pairs are in the right order; None if there are no lists"""


@dataclass(frozen=True, slots=True)
class PairResults:
    """The results of one model on one source, or on all."""

    model: str
    source: str
    whole: Group
    loss: float
    """mean of -log sigmoid(gap), nats per pair"""
    longer: float
    """accuracy of preferring the longer response"""
    length_rule: float
    """accuracy of the better of "the longer" and "the shorter" response"""
    length_correlation: float | None
    calibration_error: float
    calibration: list[CalibrationBin]
    subsets: dict[str, Group]


@dataclass(frozen=True, slots=True)
class Members:
    """Several models on all pairs, as an ensemble."""

    agreement: list[list[float]]
    """share of pairs that two models order alike, [M, M]"""
    ensemble: Ensemble


def pair_results(scored: SourceScores) -> PairResults:
    """All numbers of one model on the pairs of one source."""
    gaps, length_gaps = (values[:, 0] - values[:, 1] for values in (scored.scores, scored.lengths))
    rule = preferences.length_rule(gaps, length_gaps, scored.elements)
    bins = preferences.calibration(gaps)
    rows_by_subset: dict[str, list[int]] = {}
    for row, subset in enumerate(scored.subsets):
        rows_by_subset.setdefault(subset, []).append(row)
    return PairResults(
        model=scored.model,
        source=scored.data_path,
        whole=_group(gaps, scored.elements),
        loss=-preferences.by_element(logsigmoid(gaps), scored.elements).mean().item(),
        longer=rule.longer,
        length_rule=rule.best,
        length_correlation=rule.correlation,
        calibration_error=preferences.calibration_error(bins),
        calibration=bins,
        subsets={name: _group(gaps[rows], scored.elements[rows]) for name, rows in sorted(rows_by_subset.items())},
    )


def _group(gaps: Tensor, elements: Tensor) -> Group:
    accuracy, lists = preferences.accuracy(gaps, elements), preferences.list_accuracy(gaps, elements)
    return Group(len(gaps), accuracy, lists)


def together(sources: Sequence[SourceScores]) -> SourceScores:
    """One model's scores on the pairs of all sources."""
    first, *others = sources
    if not others:
        return first
    counts = [int(source.elements.max()) + 1 for source in sources]
    first_elements = torch.tensor([0, *counts]).cumsum(0).tolist()
    has_subsets = any(source.subsets for source in sources)
    subsets = [name for source in sources for name in source.subsets or [source.data_path] * len(source.elements)]
    return SourceScores(
        model=first.model,
        data_path=ALL,
        scores=torch.cat([source.scores for source in sources]),
        lengths=torch.cat([source.lengths for source in sources]),
        elements=torch.cat([s.elements + number for s, number in zip(sources, first_elements, strict=False)]),
        subsets=tuple(subsets) if has_subsets else (),
        dropped={},
    )


def members(whole: Sequence[SourceScores]) -> Members | None:
    """Several models compared on all pairs; None for one model. whole: of each model, as of `together`"""
    if len(whole) < 2:
        return None
    gaps = torch.stack([scored.scores[:, 0] - scored.scores[:, 1] for scored in whole])
    deviations = torch.stack([scored.scores.std(correction=0) for scored in whole])
    ensemble = preferences.ensemble(gaps, deviations, whole[0].elements)
    return Members(preferences.agreement(gaps).tolist(), ensemble)


def tables(results: Sequence[PairResults], whole: Sequence[PairResults], group: Members | None) -> list[Table]:
    """results: of each model on each source. whole: of each model on all sources"""
    if len(results) > len(whole):
        by_model = ((*(r for r in results if r.model == total.model), total) for total in whole)
        results = [row for rows in by_model for row in rows]
    result = [
        _main_table(results),
        _table(
            "accuracy by subset",
            ("model", "subset", "pairs", "accuracy", "lists"),
            ((r.model, name, *_group_cells(part)) for r in whole for name, part in r.subsets.items()),
        ),
        _table(
            "calibration: sigmoid(|gap|) against the share in the right order",
            ("model", "predicted", "observed", "pairs"),
            ((r.model, f"{b.predicted:.3f}", _share(b.observed), str(b.pairs)) for r in whole for b in r.calibration),
        ),
        *([] if group is None else _member_tables([r.model for r in whole], group)),
    ]
    return [table for table in result if table[2]]


def _table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    return title, tuple(columns), list(rows)


def _main_table(results: Sequence[PairResults]) -> Table:
    columns = (
        "model", "source", "pairs", "accuracy", "lists", "longer", "length rule", "correlation", "loss", "ECE",
    )  # fmt: skip
    rows = (
        (
            r.model, r.source, *_group_cells(r.whole), f"{r.longer:.3f}", f"{r.length_rule:.3f}",
            _number(r.length_correlation), f"{r.loss:.4f}", f"{r.calibration_error:.3f}",
        )
        for r in results
    )  # fmt: skip
    return _table("pairs in the right order, beside length alone", columns, rows)


def _member_tables(models: Sequence[str], group: Members) -> list[Table]:
    agreement = zip(models, group.agreement, strict=True)
    rows = ((model, *(f"{value:.3f}" for value in values)) for model, values in agreement)
    e = group.ensemble
    parts = ("-" if interval is None else _share(interval) for interval in (e.accuracy_unanimous, e.accuracy_divided))
    columns = ("accuracy of the mean", "unanimous pairs", "accuracy on them", "accuracy on the others")
    return [
        _table("pairs that two models order alike", ("", *models), rows),
        _table("the models as an ensemble", columns, [(_share(e.accuracy), f"{e.unanimous:.3f}", *parts)]),
    ]


def _group_cells(group: Group) -> tuple[str, str, str]:
    return str(group.pairs), _share(group.accuracy), "-" if group.lists is None else _share(group.lists)


def _share(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def report_results(options: EvaluateRewardConfig, scored: Sequence[SourceScores]) -> None:
    """Print the tables; write all results if there is an output directory."""
    by_model = {name: [*sources] for name, sources in groupby(scored, lambda source: source.model)}
    whole_scores = [together(sources) for sources in by_model.values()]
    results, whole = list(map(pair_results, scored)), list(map(pair_results, whole_scores))
    group = members(whole_scores)
    result_tables = tables(results, whole, group)
    for title, columns, rows in result_tables:
        console.show_table(title, columns, rows)
    console.say(NOTE)
    for source in next(iter(by_model.values())):
        if source.dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in source.dropped.items())
            console.say(f"{source.data_path}: left out {reasons}")
    if options.output is not None:
        content = {
            "models": [_provenance(model) for model in options.models],
            "sources": list(map(asdict, results)),
            ALL: list(map(asdict, whole)),
            "members": None if group is None else asdict(group),
            "options": options.model_dump(mode="json", exclude={"overwrite"}),
            "versions": manifests.versions(),
        }
        _write(Path(options.output), content, markdown(result_tables, NOTE))


def _provenance(model: str) -> Tree:
    path = resolve(manifests.resolve_model_path(model, "model", "critic"))
    return {"model": model, "path": path, "manifest_sha256": manifests.manifest_digest(path)}


def _write(output: Path, content: Mapping[str, object], page: str) -> None:
    """Write results.json last: if it exists, results.md is complete."""
    disk.write_text(output / "results.md", page)
    disk.write_json(output / RESULTS, disk.json_value(dict(content)))
    console.say(f"wrote {RESULTS} and results.md into {output}")

"""The results of reward models on pairs: one row for each model and part of the pairs, and files."""

from collections.abc import Iterator, Mapping, Sequence
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
from rlhf.storage import disk, manifests
from step2_reward.evaluation_options import EvaluateRewardConfig
from step2_reward.pair_scores import SourceScores

ALL = "all"
"""the name of all sources, or subsets, together"""
NOTE = (
    "Accuracy: the share of pairs whose chosen response has the higher score; a tie is one half, and the pairs of "
    "one list of responses count as one pair. Intervals are 95 %. Lists: the share of the lists whose pairs are all in "
    "the right order; of one chosen and several rejected responses, the best-of-n accuracy. Length rule: the accuracy "
    "of preferring the longer response. Loss: -log sigmoid(gap). ECE: expected calibration error of sigmoid(gap)."
)


@dataclass(frozen=True, slots=True)
class PairResult:
    """The results of one model on a part of the pairs."""

    model: str
    source: str
    subset: str
    pairs: int
    accuracy: Interval
    lists: Interval | None
    """lists of which all pairs are in the right order; None if there are no lists"""
    length_rule: float
    """accuracy of preferring the longer response"""
    loss: float
    """mean of -log sigmoid(gap), nats per pair"""
    calibration_error: float


def pair_results(sources: Sequence[SourceScores]) -> Iterator[PairResult]:
    """One model's results on each source, on all sources, and on each subset of all."""
    for source in sources:
        yield _pair_result(source, source.data_path, ALL, torch.arange(len(source.scores)))
    whole = sources[0] if len(sources) == 1 else together(sources)
    if whole.data_path == ALL:
        yield _pair_result(whole, ALL, ALL, torch.arange(len(whole.scores)))
    for subset in sorted({*whole.subsets}):
        rows = torch.tensor([row for row, name in enumerate(whole.subsets) if name == subset])
        yield _pair_result(whole, whole.data_path, subset, rows)


def _pair_result(scored: SourceScores, source: str, subset: str, rows: Tensor) -> PairResult:
    gaps, length_gaps = (values[rows, 0] - values[rows, 1] for values in (scored.scores, scored.lengths))
    elements = scored.elements[rows]
    return PairResult(
        model=scored.model,
        source=source,
        subset=subset,
        pairs=len(rows),
        accuracy=preferences.accuracy(gaps, elements),
        lists=preferences.list_accuracy(gaps, elements),
        length_rule=preferences.accuracy(length_gaps, elements).mean,
        loss=-preferences.by_element(logsigmoid(gaps), elements).mean().item(),
        calibration_error=preferences.calibration_error(gaps),
    )


def together(sources: Sequence[SourceScores]) -> SourceScores:
    """One model's scores on the pairs of all sources. A source without subsets is one of its own beside others."""
    counts = [int(source.elements.max()) + 1 for source in sources]
    first_elements = torch.tensor([0, *counts]).cumsum(0).tolist()
    has_subsets = any(source.subsets for source in sources)
    subsets = [name for source in sources for name in source.subsets or [source.data_path] * len(source.elements)]
    return SourceScores(
        model=sources[0].model,
        data_path=ALL,
        scores=torch.cat([source.scores for source in sources]),
        lengths=torch.cat([source.lengths for source in sources]),
        elements=torch.cat([s.elements + number for s, number in zip(sources, first_elements, strict=False)]),
        subsets=tuple(subsets) if has_subsets else (),
        dropped={},
    )


def agreement(by_model: Mapping[str, Sequence[SourceScores]]) -> list[list[float]]:
    """The share of all pairs that two models order alike, [M, M]."""
    scores = [torch.cat([source.scores for source in sources]) for sources in by_model.values()]
    return preferences.agreement(torch.stack([both[:, 0] - both[:, 1] for both in scores])).tolist()


def tables(results: Sequence[PairResult], alike: Sequence[Sequence[float]]) -> list[Table]:
    """All results, and of several models how often two order a pair alike."""
    columns = ("model", "source", "subset", "pairs", "accuracy", "lists", "length rule", "loss", "ECE")
    rows: list[tuple[str, ...]] = [
        (
            r.model, r.source, r.subset, str(r.pairs), _share(r.accuracy), "-" if r.lists is None else _share(r.lists),
            f"{r.length_rule:.3f}", f"{r.loss:.4f}", f"{r.calibration_error:.3f}",
        )
        for r in results
    ]  # fmt: skip
    models = [*dict.fromkeys(r.model for r in results)]
    same: list[tuple[str, ...]] = [
        (model, *(f"{x:.3f}" for x in shares)) for model, shares in zip(models, alike, strict=True)
    ]
    result: list[Table] = [("pairs in the right order, beside length alone", columns, rows)]
    return result + ([("pairs that two models order alike", ("", *models), same)] if len(models) > 1 else [])


def _share(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def report_results(options: EvaluateRewardConfig, scored: Sequence[SourceScores]) -> None:
    """Print the tables; write all results if there is an output directory."""
    by_model = {name: [*sources] for name, sources in groupby(scored, lambda source: source.model)}
    results = [result for sources in by_model.values() for result in pair_results(sources)]
    alike = agreement(by_model)
    result_tables = tables(results, alike)
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
            "results": list(map(asdict, results)),
            "agreement": alike,
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

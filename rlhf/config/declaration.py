"""What a stage declares, so that nothing below the chain knows a stage by its name. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlhf.config.record import Tree
from rlhf.config.short_help import Groups


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of which something is true: those whose `option` names one of `plugins`, whatever their own options."""

    option: str = ""
    """empty: every run"""
    plugins: tuple[str, ...] = ()

    def include(self, options: Tree) -> bool:
        """Whether the run with these options is one of them. A plug-in is written as `name,option=value`."""
        return not self.option or str(options.get(self.option)).partition(",")[0].strip() in self.plugins


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure of the report: metrics by step. docs/metrics.md explains each metric."""

    title: str
    metrics: tuple[str, ...]
    level: tuple[float, str] | None = None
    """a value to compare with, and its name: what guessing gives, for example"""
    level_in: Runs = Runs()
    lowest: float | None = None
    """values below it are drawn there: a few of them would hide the rest"""


@dataclass(frozen=True, slots=True)
class Result:
    """A held-out number of the result, in the report's first table. `METRIC_before` is its value before training."""

    metric: str
    label: str
    sample: str = ""
    """the column of the samples file with this number of each response (SAMPLE_before: before training); the mean gain
    then has an interval, and the verdict follows the first such result"""
    option: str = ""
    """the option that names the source of the number"""
    independent: bool = False
    """no stage trained on it"""
    share: bool = False
    """a share, shown in per cent"""
    cost: bool = False
    """what the training was not for, and may have made worse"""
    baselines: tuple[tuple[str, str], ...] = ()
    """(metric, name) of simple rules, without which the number says little"""


@dataclass(frozen=True, slots=True)
class Invariant:
    """A metric that lies in [low, high] in all `runs`, whatever they have learned, if the method is what it says."""

    title: str
    metric: str
    low: float
    high: float
    coarse: float | None = None
    """`high` where the dtype may have fewer bits than fp32, if it is another then"""
    kind: str = "train"
    """of the rows of metrics.jsonl: train or eval"""
    at_end: bool = False
    """read in the last such row of a finished stage, not in the first"""
    runs: Runs = Runs()


@dataclass(frozen=True, slots=True)
class Frontier:
    """A figure of reward against the distance from the reference: (distance, reward, name) of each line."""

    title: str
    lines: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class ReportParts:
    """What the report shows of a stage."""

    section: str = ""
    """the heading of docs/metrics.md above its metrics"""
    curves: tuple[Curve, ...] = ()
    results: tuple[Result, ...] = ()
    frontiers: tuple[Frontier, ...] = ()
    samples: str = ""
    """the file with held-out responses before and after: prompt, question, before, after, and columns of `results`"""
    distance: str = ""
    """the column of the samples file, `eval_DISTANCE` in metrics.jsonl, with the KL from reference to policy"""
    alarms: tuple[str, ...] = ()
    """warnings that a higher reward may not be a better model; the verdict names them"""
    invariants: tuple[Invariant, ...] = ()
    pair_scores: str = ""
    """the file with the scores of held-out pairs: lists `chosen`, `rejected`, `weight`"""

    def first(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The first three results, before and after, for the last line of a stage; all metrics if there are none."""
        names = [name for each in self.results[:3] for name in (f"{each.metric}_before", each.metric)]
        return {name: metrics[name] for name in names if name in metrics} or metrics


@dataclass(frozen=True, slots=True)
class ModelWords:
    """What the model card says of one of a stage's models."""

    title: str
    about: str
    """Markdown: how it was made, and what it is for"""
    task: Literal["text-generation", "text-classification"]
    """the hub's name of what the model does"""
    bases: tuple[str, ...] = ("model",)
    """inputs of the stage of which the first that there is became this model"""
    tags: tuple[str, ...] = ()
    more: tuple[Runs, str] = (Runs(), "")
    """what follows `about` in the cards of some runs"""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A stage: its name, its files, and the parts of its work. Its options declare for themselves which are free."""

    name: str
    """its package, as in `python -m NAME`, and its folder in the output directory"""
    title: str
    """one sentence for `--help`"""
    help_groups: Groups
    """what `--help` lists beside the options that every stage has"""
    models: tuple[str, ...]
    """folders of models that it may write; the results of `report` are those of the first"""
    policies: tuple[str, ...] = ()
    """those of `models` that respond to prompts, the main one first"""
    scorer: str = ""
    """the one of `models` that scores responses"""
    reference: str = ""
    """the input from which the policies' KL is measured"""
    logs: tuple[str, ...] = ()
    """patterns of the files beside metrics.jsonl that grow line by line"""
    losses: tuple[str, ...] = ("loss",)
    """metrics that the stage minimises"""
    report: ReportParts = ReportParts()
    """what the report shows of it"""
    cards: Mapping[str, ModelWords] = field(default_factory=dict)
    """by folder of `models`"""

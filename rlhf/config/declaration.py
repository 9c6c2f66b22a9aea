"""What a stage declares, so that nothing below the chain knows a stage by its name. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.config.short_help import Groups


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a stage's work, for the advice when memory runs out in it."""

    name: str
    rows: str = "micro_batch_size"
    """the option that bounds the rows of one pass"""


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
    """folders of models that it may write"""
    logs: tuple[str, ...] = ()
    """patterns of the files beside metrics.jsonl that grow line by line"""
    losses: tuple[str, ...] = ("loss",)
    """metrics in which a spike is worth a warning"""
    phases: Mapping[tuple[str, str], Phase] = field(default_factory=dict)
    """by module and function, beside those of the engine and the checkpoints"""

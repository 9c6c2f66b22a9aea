"""The record that every set of options is, and the names that its options have. Torch-free."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from rlhf.config.foreign_options import gone

Tree = dict[str, Any]
"""What a YAML or JSON file has by key: options, settings of another library, a manifest, a report, a row of JSON lines.
Its values are open, because the file decides them: who reads a key knows or checks what is there."""


class Config(BaseModel):
    """Base of every configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )
    FREE: ClassVar[frozenset[str]] = frozenset()
    """options that change memory, speed or output, but no result: a run resumes with another value"""
    TOTALS: ClassVar[frozenset[str]] = frozenset()
    """options for the length of a stage: a run resumes with another value, with a note; a finished one is extended"""
    NOTED: ClassVar[frozenset[str]] = frozenset()
    """other options: an interrupted run resumes with another value, with a note"""
    POSITIONAL: ClassVar[tuple[str, ...]] = ()
    """options that are written without their names on the command line, in this order; a list takes all words"""

    @model_validator(mode="before")
    @classmethod
    def _one_value_is_a_list(cls, values: object) -> object:
        """`data_path: pairs.jsonl` in a file means a list of one path, as on the command line."""
        if not isinstance(values, dict):
            return values
        lists = {name for name, field in cls.model_fields.items() if is_list(field.annotation)}
        return {n: [v] if n in lists and isinstance(v, str | int | float) else v for n, v in values.items()}

    @classmethod
    def adopt(cls, values: Tree, source: object) -> Tree:
        """The plain values of a file, without those that a section leaves out, and without options that are gone and
        had their default."""
        adopted = {
            name: value
            for name, value in values.items()
            if name in cls.model_fields or name not in gone() or value != gone()[name]
        }
        for name, field in cls.model_fields.items():
            section = field.annotation
            if is_record(section) and isinstance(values.get(name), dict):
                adopted[name] = section.adopt(values[name], source)
        return adopted

    @classmethod
    def declared(cls, kind: Literal["FREE", "TOTALS", "NOTED"]) -> frozenset[str]:
        """The options of that kind, of this class and its base classes."""
        return frozenset().union(*(vars(base).get(kind, ()) for base in cls.__mro__))

    @classmethod
    def of_results(cls, values: Tree) -> Tree:
        """The plain values that change results; of a model's own engine options (`critic.quantize`), that is its
        bits."""
        free = cls.declared("FREE")
        result = {name: value for name, value in values.items() if name not in free}
        nested = {name: value for name, value in values.items() if name in free and isinstance(value, dict)}
        return result | {f"{name}.quantize": value["quantize"] for name, value in nested.items() if "quantize" in value}


def is_record(annotation: object) -> TypeGuard[type[Config]]:
    """Whether an option is a section."""
    return isinstance(annotation, type) and issubclass(annotation, Config)


def options(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option with its dotted name: `ppo.kl_coef`."""
    for name, field in cls.model_fields.items():
        kind = field.annotation
        if is_record(kind):
            yield from options(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def option_names(cls: type[Config]) -> Iterator[str]:
    """Every option in the spelling of the command line: `ppo.kl-coef`."""
    return (name.replace("_", "-") for name, _ in options(cls))


def record_in(annotation: object) -> type[Config] | None:
    """The record in an annotation: `Inner` for `Inner`, `Inner | None` and `tuple[Inner, ...]`; else None."""
    if is_record(annotation):
        return annotation
    return next(filter(None, map(record_in, get_args(annotation))), None)


def is_list(annotation: object) -> bool:
    """Whether an option takes any number of values: `tuple[str, ...]`, or that or None."""
    kinds = {*get_args(annotation)} - {type(None)} if type(None) in get_args(annotation) else {annotation}
    return all(get_origin(kind) is tuple and get_args(kind)[1:] == (...,) for kind in kinds)


def choices(annotation: object) -> tuple[object, ...]:
    """The values of a Literal, also in a union or in a tuple; none for another annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in choices(part))

"""How other libraries call reward functions, so that a function written for one of them works as it is: TRL's
`reward_funcs` of GRPOTrainer, verl's `compute_score`, OpenRLHF's `reward_func`. A parameter tells the library."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.rewards import REFERENCE
from rlhf.types import Samples

Columns = Mapping[str, list[Any]]
"""a list of B values by name"""


@dataclass(frozen=True, slots=True)
class Convention:
    """A library's way: every argument by name, those of `arguments` and the columns that are parameters too."""

    arguments: Callable[[Samples, Columns], Columns]
    names: tuple[str, ...]
    """the arguments, but for the right result"""
    truth: str = ""
    """the argument with the right result: the value of the first of `truths` that is a column of the rows"""
    truths: tuple[str, ...] = ()
    scores: str = ""
    """the entry of the scores, if the function returns a mapping"""
    single: bool = False
    """the function is called for one response at a time"""

    def right_results(self, columns: Columns) -> Columns:
        """The argument with the right results; nothing if the function has none, or no column has them."""
        column = next((columns[name] for name in self.truths if name in columns), None)
        if column is None:
            return {}
        return {self.truth: [x.get("ground_truth") if isinstance(x, dict) else x for x in column]}


def _trl(samples: Samples, _: Columns) -> Columns:
    ids = samples.rollout.response_tokens()
    return {"prompts": list(samples.prompts), "completions": list(samples.responses), "completion_ids": ids}


def _trl_messages(samples: Samples, columns: Columns) -> Columns:
    dialogues = [row.prompt for row in samples.rollout.rows]
    prompts = [[{"role": turn.role, "content": turn.content, **turn.keys} for turn in turns] for turns in dialogues]
    messages = [[{"role": "assistant", "content": text}] for text in samples.responses]
    return {**_trl(samples, columns), "prompts": prompts, "completions": messages}


def _openrlhf(samples: Samples, _: Columns) -> Columns:
    texts = [prompt + response for prompt, response in zip(samples.prompts, samples.responses, strict=True)]
    return {"queries": texts, "prompts": list(samples.prompts)}


def _verl(samples: Samples, columns: Columns) -> Columns:
    count = len(samples.responses)
    return {
        "solution_str": list(samples.responses),
        "data_source": columns.get("data_source", [""] * count),
        "extra_info": columns.get("extra_info", [{}] * count),
    }


def _verl_batch(samples: Samples, columns: Columns) -> Columns:
    return {f"{name}s": values for name, values in _verl(samples, columns).items()}


TRUTHS = ("ground_truth", "reward_model", "answer", REFERENCE)
"""columns with the right result; that of verl's files is an object with `ground_truth`"""
VERL = ("solution_str", "data_source", "extra_info")
VERL_BATCH = ("solution_strs", "data_sources", "extra_infos")
TRL = Convention(_trl, ("prompts", "completions", "completion_ids"))
TRL_MESSAGES = Convention(_trl_messages, TRL.names)
BY_PARAMETER = {
    "completions": TRL,
    "queries": Convention(_openrlhf, ("queries", "prompts"), "labels", ("labels", "label", *TRUTHS), "rewards"),
    "solution_str": Convention(_verl, VERL, "ground_truth", TRUTHS, "score", single=True),
    "solution_strs": Convention(_verl_batch, VERL_BATCH, "ground_truths", TRUTHS, "score"),
}


def convention_of(
    function: Callable[..., object], parameters: Sequence[str], messages: bool | None
) -> Convention | None:
    """The convention that the names of the function's parameters tell; None for one of ours.

    messages: whether a function for TRL gets dialogues in place of texts; None: if its code has `x[0]["content"]`
    """
    convention = next((BY_PARAMETER[name] for name in parameters if name in BY_PARAMETER), None)
    if convention is not TRL:
        return convention
    return TRL_MESSAGES if (_reads_messages(function) if messages is None else messages) else TRL


def _reads_messages(function: Callable[..., object]) -> bool:
    """Whether the function's code has an expression such as `completion[0]["content"]`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # no source: a function in C, or an object
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(ast.Subscript(slice=ast.Constant(int()) | ast.UnaryOp()), ast.Constant("content")):
                return True
    return False

"""What a mutant changes: operators of mutmut, and our own for wiring.

mutmut's: numbers, strings, True and False, comparisons, arithmetic, signs, `and` and `or`, arguments (None, or left
out), conditional expressions, cases of a match. Ours: neighbouring arguments exchanged, a numeric option doubled, a
call that is a statement left out, a method without arguments left out, a condition negated, a slice one element early.

Some edits are not made. No test of numbers on a CPU sees messages, assertions, types, devices or `strict` of zip. And
`x = None`, or None as a first argument, fails in every test that runs the line: such mutants only raise the score.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import UnionType
from typing import Any, get_args

import libcst as cst
from libcst import matchers as m
from mutmut.mutation import mutators
from pydantic import BaseModel

Operator = Callable[[Any], Iterable[cst.CSTNode]]

UNSEEN_ARGUMENTS = {"strict", "device", "encoding", "non_blocking", "fused", "shown"}
"""arguments by keyword that change no number on a CPU, or only what a terminal shows"""
UNSEEN_CALLS = {"len", "isinstance", "cast", "say", "status", "show_table", "Field"}
"""calls whose arguments are words or types, or that tests of the option tables own"""
UNSEEN_METHODS = {"cpu", "contiguous", "item", "items", "keys", "tolist", "values"}
"""methods without which the same numbers stand elsewhere, or in another kind of container"""
SYMMETRIC = {"max", "min", "maximum", "minimum", "zip", "isinstance", "equal", "_distance"}
"""functions whose first arguments may be exchanged, or whose result is exchanged with them"""


def one_string(node: cst.BaseString) -> Iterator[cst.CSTNode]:
    """The first of mutmut's changes of a string: the others test the same."""
    yield from list(mutators.operator_string(node))[:1]


def arguments(node: cst.Call) -> Iterator[cst.CSTNode]:
    """mutmut's arguments replaced by None or left out, but for the first, and those that only shift others or that
    nothing shows."""
    for mutant in mutators.operator_arg_removal(node):
        assert isinstance(mutant, cst.Call)
        changed = next(i for i, arg in enumerate(node.args) if i >= len(mutant.args) or mutant.args[i] is not arg)
        arg = node.args[changed]
        if arg.keyword.value in UNSEEN_ARGUMENTS if arg.keyword is not None else changed == 0:
            continue
        shifts = any(after.keyword is None for after in node.args[changed + 1 :])
        if len(mutant.args) == len(node.args) or not shifts:
            yield mutant


def exchanged(node: cst.Call) -> Iterator[cst.CSTNode]:
    """f(a, b) -> f(b, a), for each two neighbours without a keyword."""
    if name_of(node.func) in SYMMETRIC:
        return
    for i in range(len(node.args) - 1):
        one, other = node.args[i : i + 2]
        plain = all(arg.keyword is None and not arg.star for arg in (one, other))
        if plain and not one.value.deep_equals(other.value):
            swapped = [one.with_changes(value=other.value), other.with_changes(value=one.value)]
            yield node.with_changes(args=[*node.args[:i], *swapped, *node.args[i + 2 :]])


def doubled(node: cst.Attribute) -> Iterator[cst.CSTNode]:
    """options.x -> (2 * options.x), where x is an option that is a number."""
    if node.attr.value in numeric_options() and name_of(node.value) in OPTIONS:
        yield cst.parse_expression(f"(2 * {cst.Module([]).code_for_node(node)})")


OPTIONS = {"c", "o", "config", "_config", "options", "_options", "optimizer", "sampling", "_sampling"}
"""what options are called"""


def left_out(node: cst.Expr) -> Iterator[cst.CSTNode]:
    """A call that is a statement -> pass."""
    if isinstance(node.value, cst.Call) and name_of(node.value.func) not in UNSEEN_CALLS:
        yield cst.Pass()


def without_method(node: cst.Call) -> Iterator[cst.CSTNode]:
    """x.f() -> x"""
    if isinstance(node.func, cst.Attribute) and not node.args and node.func.attr.value not in UNSEEN_METHODS:
        yield node.func.value


def negated(condition: cst.BaseExpression) -> Iterator[cst.CSTNode]:
    """x -> not (x), of an `if`; not of comparisons that have an opposite, which mutmut takes."""
    opposites = m.Comparison(
        comparisons=[m.ComparisonTarget(m.Is() | m.IsNot() | m.In() | m.NotIn() | m.Equal() | m.NotEqual())]
    )
    if not m.matches(condition, opposites | m.UnaryOperation(m.Not())):
        inner = condition.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield cst.UnaryOperation(cst.Not(), inner)


def early(node: cst.SubscriptElement) -> Iterator[cst.CSTNode]:
    """x[a:] -> x[a - 1 : -1]"""
    if m.matches(node, m.SubscriptElement(m.Slice(upper=None, step=None, lower=~m.Integer("0")))):
        lower = cst.ensure_type(node.slice, cst.Slice).lower
        if lower is not None:
            written = cst.Module([]).code_for_node(lower)
            code = cst.parse_expression(f"x[{written} - 1 : -1]")
            yield cst.ensure_type(code, cst.Subscript).slice[0].with_changes(comma=node.comma)


OPERATORS: tuple[tuple[type[cst.CSTNode], Operator], ...] = (
    (cst.BaseNumber, mutators.operator_number),
    (cst.BaseString, one_string),
    (cst.Name, mutators.operator_name),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.Call, mutators.operator_dict_arguments),
    (cst.Call, arguments),
    (cst.Call, mutators.operator_symmetric_string_methods_swap),
    (cst.Call, mutators.operator_unsymmetrical_string_methods_swap),
    (cst.Lambda, mutators.operator_lambda),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.Match, mutators.operator_match),
    (cst.IfExp, mutators.operator_if_exp),
    (cst.Call, exchanged),
    (cst.Attribute, doubled),
    (cst.Expr, left_out),
    (cst.Call, without_method),
    (cst.SubscriptElement, early),
)


def elsewhere(node: cst.If | cst.IfExp) -> cst.CSTNode | None:
    """What of a condition on the kind of a device does not run on a CPU."""
    for kind, branch in (("cpu", node.orelse), ("cuda", node.body)):
        device = m.Attribute(attr=m.Name("type"))
        is_kind = m.ComparisonTarget(m.Equal(), m.SimpleString(f'"{kind}"'))
        if m.matches(node.test, m.Comparison(device, [is_kind])):
            return branch
    return None


def name_of(node: cst.CSTNode) -> str:
    """The last name of `a.b.c`."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


@cache
def numeric_options() -> frozenset[str]:
    """Names of the options of every stage and algorithm that are numbers."""
    from rlhf import plugins
    from step1_sft.config import SFTConfig
    from step2_reward.config import RewardConfig

    names = plugins.names("step3_ppo.algorithms")
    configs: list[type[BaseModel]] = [plugins.find("step3_ppo.algorithms", name).Config for name in names]
    configs += [SFTConfig, RewardConfig]
    fields = [item for config in configs for item in config.model_fields.items()]
    return frozenset(name for name, field in fields if {int, float} & _kinds(field.annotation))


def _kinds(annotation: Any) -> set[Any]:
    return set(get_args(annotation)) if isinstance(annotation, UnionType) else {annotation}

"""How `match` reads a result and compares it with the right one."""

import re
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf.errors import UserError
from rlhf.rewards._numbers import number

CHOICE = re.compile(
    r"(?:\\boxed\{|\\text\{|\()\s*([A-J])\s*[)}]"  # (B), \boxed{B}
    r"|(?i:\b(?:answer|option|choice)\b)\W*(?:(?i:is)\b)?[\s:*(\"']*([A-J])\b(?!['\u2019])"  # the answer is B
    r"|^[\s*(\"']*([A-J])[\s*.):\"']*$"  # B alone on its line
    r"|^[\s*(]*([A-J])[.):]",  # B) Paris
    re.MULTILINE,
)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
TAGGED = re.compile(r"(?s).*<answer>(.*?)</answer>")


@dataclass(frozen=True, slots=True)
class Comparison:
    """`read` gives the result in a text, None if there is none; `credit` is the share of a right result, 0 to 1."""

    read: Callable[[str], Any]
    credit: Callable[[Any, Any], float] = lambda result, right: float(result == right)


def normalized_text(text: str) -> str | None:
    """`text` in lower case with single spaces; None if it is empty."""
    return " ".join(text.split()).casefold() or None


def choice(text: str) -> str | None:
    """The last letter of a choice, A to J, in `text`."""
    letters = ["".join(groups) for groups in CHOICE.findall(text)]
    return letters[-1] if letters else None


def words(text: str) -> tuple[str, ...] | None:
    """The words of `text`, or of the last <answer> in it, as SQuAD compares them (arXiv 1606.05250, section 6.1): in
    lower case, without punctuation and articles."""
    tagged = TAGGED.match(text)
    plain = (tagged[1] if tagged else text).lower().translate(str.maketrans("", "", string.punctuation))
    return tuple(ARTICLES.sub(" ", plain).split()) or None


def f1(result: tuple[str, ...], right: tuple[str, ...]) -> float:
    """2 P R / (P + R) of the words that both have, P of those of the result, R of those of the right one."""
    common = (Counter(result) & Counter(right)).total()
    return 2 * common / (len(result) + len(right))


def _expression(text: str) -> Any:
    """What math-verify reads, by which 1/sqrt(2) equals sqrt(2)/2. Raises: UserError without math-verify."""
    try:
        from math_verify import parse
    except ImportError:
        raise UserError("reward 'match', compare=math: expected math-verify; install the extra 'math'") from None
    # A formula by itself, as in a column of the data, has no dollar signs.
    return parse(text) or parse(f"${text}$") or None


def _equal_expressions(result: Any, right: Any) -> float:
    from math_verify import verify

    return float(verify(right, result))


COMPARISONS = {
    "number": Comparison(number),
    "text": Comparison(normalized_text),
    "choice": Comparison(choice),
    "words": Comparison(words),
    "f1": Comparison(words, f1),
    "math": Comparison(_expression, _equal_expressions),
}

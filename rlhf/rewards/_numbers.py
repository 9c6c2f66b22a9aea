"""The number that a text gives as its result: the last one in it, unless that is a part of an expression.

The 2 of `\\sqrt{2}`, of `(3, 2)` or of `x^2` is no result, nor is the last of several. What stands on both sides of the
number, up to a word, a sign of equality or the end of a formula, must be decoration.
"""

import re
from collections import deque
from decimal import Decimal

# A space, a comma, or one of LaTeX's forms separates thousands if three digits follow.
DIGITS = (
    r"(?:(?:\d{1,3}(?:(?:,|\{,\}|[ \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}]|, )\d{3})+(?!\d)|\d+)"
    r"(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?"
)
# Sign, whole part of 2 1/2, numerator, denominator; the last two in LaTeX's form, with braces or one digit each, or in
# plain digits. A hyphen between words or digits (3-4) is no sign; after Chinese or Japanese, which have no spaces, it
# is, but for the second of two years, months, days or yuan.
NUMBER = re.compile(
    r"((?<![)}\]])(?<!\d[\u5e74\u6708\u65e5\u5143])(?<![^\W\u3040-\u30ff\u3400-\u9fff])[-\N{MINUS SIGN}])?"
    r"\\?[$€£¥]?(?:(\d+)(?= ?\\frac| [1-9]\d?/[1-9]) ?)?"
    rf"(?:\\frac(?:\{{(-?{DIGITS})\}}|(\d))(?:\{{({DIGITS})\}}|(\d))|({DIGITS})(?: ?/ ?({DIGITS}))?)"
)
FULL_WIDTH = {0xFF0D: "-", 0xFF0E: ".", 0xFF08: "(", 0xFF09: ")", 0xFFE5: "¥"}
PLAINER = (
    (r"(?<=[\uff10-\uff19])\uff0c(?=[\uff10-\uff19])", ","),  # elsewhere it is the comma of a Chinese sentence
    (r"\\(?:text|mbox|mathrm|textbf|mathbf|textit|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<![\\A-Za-z])([A-Za-z]{2,}|(?<=\d )m)\s*\^\s*(?:\{[23]\}|[23])", r"\1"),  # cm^2
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", ""),
    (r"\\(?:q?quad(?![A-Za-z])|[,;: ])", " "),
    (r"\\[cdt]?frac(?![A-Za-z])\s*", r"\\frac"),
    (r"(?<=\\frac)(\d|\{[^{}]*\})\s+(?=[\d{])", r"\1"),
)
"""(pattern, replacement): forms of LaTeX that do not change a number"""
PLAINER_PATTERNS = tuple((re.compile(pattern), replacement) for pattern, replacement in PLAINER)
BOUNDARY = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]['\u2019]?[A-Za-z]|[A-Za-z]&[A-Za-z]|[ap]\.m\.)[A-Za-z'\u2019&]*"  # words
    r"|(?<![\\A-Za-z])(?:[aAI]\s|[A-Za-z][.)]\s|[A-Za-z](?=\d))"  # labels, too
    r"|[^\W\d_a-zA-Z]|[\uff0c\u3002\uff1b\uff1a\u3001\uff01\uff1f\uff08\uff09]"
    r"|[\n=≈→⇒;?]|(?<!\d):|:(?!\d)|[.!](?=\s|$)|,(?=\s)|>>|<<|(?<!\\)\$|\\[()\[\]]|\\(?:boxed|fbox)\s*\{"
    r"|\\(?:approx|implies|Rightarrow|rightarrow|to|therefore|leq?|geq?)(?![A-Za-z])"
)
"""what ends an expression"""
BEFORE = re.compile(r"""[\s"'“”\u2018\u2019(\[{*_#>~<≤≥|`%$€£¥-]*""")
AFTER = re.compile(
    r"""\s*(?:\\?%|°|[mgshlLCFKNVWJMBTd](?:/[msh])?(?![A-Za-z^_]))?[\s"'“”\u2018\u2019)\]}*_.,!?%|`~><$€£¥/\\-]*"""
)
"""decoration; a letter may be a unit"""
LISTED = re.compile(r"(?:\d|(?<![A-Za-z])[A-Za-z]|\\[A-Za-z]+|[)}\]])\s*,\Z")
SPACED_SIGN = re.compile(r"\s*\$?\s*[-\N{MINUS SIGN}]\s+")


def number(text: str) -> Decimal | None:
    """The last number of `text` if it is a result; a fraction is its value, and currency, percent sign, units and
    separators of thousands go."""
    text = text.translate(FULL_WIDTH)
    for pattern, replacement in PLAINER_PATTERNS:
        text = pattern.sub(replacement, text)
    last = deque(NUMBER.finditer(text), maxlen=1)
    if not last or not _is_whole(text, *last[0].span()):
        return None
    sign, whole, *parts = last[0].groups()
    value, *denominator = (Decimal(re.sub(r"[^\d.eE+-]", "", part)) for part in parts if part)
    if not all(denominator):
        return None
    if denominator:
        value = Decimal(whole or 0) + value / denominator[0]
    return value.copy_negate() if sign or SPACED_SIGN.fullmatch(text[: last[0].start()]) else value


def _is_whole(text: str, start: int, end: int) -> bool:
    """Whether the number at text[start:end] is no part of an expression and not one of several."""
    first, stop, comma, says_what = 0, len(text), False, False
    for boundary in BOUNDARY.finditer(text):
        if boundary.end() <= start:
            first, comma = boundary.end(), boundary[0] == ","
        elif boundary.start() >= end:
            stop, says_what = boundary.start(), boundary[0][:2].isalpha()
            break
    decorated = BEFORE.fullmatch(text, first, start) and AFTER.fullmatch(text, end, stop)
    listed = comma and LISTED.search(text[max(0, first - 40) : first])
    return bool(decorated) and (says_what or not listed)

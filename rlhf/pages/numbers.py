"""Numbers as text, for tables and for people."""

import math

UNKNOWN = "\u2013"
"""in place of a number that is not known"""


def cell(value: float | None) -> str:
    """A number with six significant digits, as metrics.jsonl has it."""
    return "" if value is None else f"{value:.6g}"


def short(value: float) -> str:
    """A number for a person: three digits, a true minus sign."""
    if value != value or math.isinf(value):
        return UNKNOWN
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    elif size >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{2 if size >= 0.995 or not size else 3}f}" if size < 100 else f"{value:.0f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return ("0" if text in ("-0", "0") else text).replace("-", "\u2212")


def with_half_width(value: float, half: float) -> tuple[str, str]:
    """A number and half its interval, both with the decimals of two digits of the half width: `0.89`, `0.04`."""
    if not half or not math.isfinite(half):
        return short(value), short(half)
    decimals = max(0, 1 - math.floor(math.log10(half)))
    value = 0.0 if abs(value) < 0.5 * 10.0**-decimals else value
    return f"{value:.{decimals}f}".replace("-", "\u2212"), f"{half:.{decimals}f}"

"""Numbers as text, for tables and for people."""

import itertools
import math

UNKNOWN = "\u2013"
"""in place of a number that is not known"""
MINUS = "\u2212"


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
    return _trimmed(text) if "e" not in text else text.replace("-", MINUS)


def with_half_width(value: float, half: float) -> tuple[str, str]:
    """A number and half its interval, both with the decimals of two digits of the half width: `0.89`, `0.04`."""
    if not half or not math.isfinite(half):
        return short(value), short(half)
    decimals = max(0, 1 - math.floor(math.log10(half)))
    value = 0.0 if abs(value) < 0.5 * 10.0**-decimals else value
    return f"{value:.{decimals}f}".replace("-", MINUS), f"{half:.{decimals}f}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, decimals = math.ceil(low / step - 1e-9), 1 - math.floor(math.log10(step))
    return [round(i * step, decimals) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_labels(values: list[float]) -> list[tuple[float, str]]:
    """Each value with its text: all with as many decimals as tell neighbours apart, or all as powers of ten."""
    most = max(map(abs, values), default=0.0)
    if most and (most < 1e-3 or most >= 1e6):
        return [(value, short(value) if value else "0") for value in values]
    step = min((b - a for a, b in itertools.pairwise(values)), default=most or 1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(value, _trimmed(f"{value:,.{decimals}f}")) for value in values]


def _trimmed(text: str) -> str:
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return ("0" if text == "-0" else text).replace("-", MINUS)

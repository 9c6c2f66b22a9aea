"""What contenders did, as ratios pair by pair and shares of the machine's limits: JSON file, table, check."""

import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import MACHINE, OURS, ROOT, WARM_UP, Contender, Options, Row, Rows

RESULTS = ROOT / "benchmarks" / "results"
FALLEN = 0.15
"""share by which a ratio may be lower than it was"""
LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate", "datasets")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and greatest, and all in their order."""
    rounded = [float(f"{value:.5g}") for value in values]
    middle = float(f"{statistics.median(values):.5g}")
    return {"median": middle, "min": min(rounded), "max": max(rounded), "each": rounded}


def rate(row: Row, unit: str) -> float:
    """`unit`s a second."""
    return float(row[unit] / row["seconds"])


def ratios(rows: Rows, unit: str, targets: Mapping[tuple[str, str], tuple[float, float]]) -> dict[str, Any]:
    """Ours over each peer, pair by pair, in `unit`s a second. targets: (at least, aim) by (peer, work)."""
    found = {}
    for peer in rows:
        if peer in (OURS, MACHINE) or OURS not in rows:
            continue
        for work in (work for work in rows[peer] if work != WARM_UP):
            pairs = zip(rows[OURS][work], rows[peer][work], strict=True)
            least, aim = targets[(peer, work)]
            name = f"{unit} a second, ours / {peer}" + ("" if work == "all" else f", {work}")
            found[name] = {
                **spread([rate(a, unit) / rate(b, unit) for a, b in pairs]), "at_least": least, "aim": aim,
            }  # fmt: skip
    return found


def share(values: Sequence[float], least: float, aim: float) -> dict[str, Any]:
    """A share of the machine's limit, as ratios are written."""
    return {**spread(values), "at_least": least, "aim": aim}


def summary(contender: Contender, rows: Mapping[str, list[Row]], unit: str) -> dict[str, Any]:
    """Rates, start-up, memory and all rows of one contender."""
    every = [row for found in rows.values() for row in found]
    before, peak = contender.start["before_bytes"], max(row["peak_bytes"] for row in every)
    works = {work: found for work, found in rows.items() if work != WARM_UP}
    made: dict[str, Any] = {"start_up_s": round(contender.start["start_up_s"], 2)}
    if unit in every[-1]:
        made |= {f"{unit}_per_s": {work: spread([rate(row, unit) for row in found]) for work, found in works.items()}}
    made |= {"warm_up_s": round(rows[WARM_UP][0]["seconds"], 3), "peak_mb": round(peak / 1e6)}
    return made | {"peak_over_imports_mb": round((peak - before) / 1e6), "rows": rows}


def results(
    name: str, options: Options, contenders: Mapping[str, Contender], rows: Rows, unit: str, **found: Any
) -> dict[str, Any]:
    """All that goes into the JSON file."""
    each = {who: summary(contender, rows[who], unit) for who, contender in contenders.items()}
    memory = {
        who: round(each[OURS]["peak_over_imports_mb"] / made["peak_over_imports_mb"], 3)
        for who, made in each.items()
        if who not in (OURS, MACHINE) and OURS in each
    }
    about_all = {"name": name, **about(), "options": shown(options)}
    return {**about_all, **found, "peak_memory_ours_over": memory, "contenders": each}


def about() -> dict[str, Any]:
    """When, how and on what this is measured."""
    return {
        "date": date.today().isoformat(),
        "command": command_line(),
        "hardware": hardware(),
        "versions": {library: version(library) for library in LIBRARIES} | {"python": platform.python_version()},
    }


def shown(options: Options) -> dict[str, Any]:
    """The options, of paths the last name only."""
    values = options.model_dump(mode="json", exclude={"output"})
    return {key: Path(value).name if isinstance(value, str) else value for key, value in values.items()}


def command_line() -> str:
    """This process's, of paths the last name only."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return " ".join(["python", "-m", spec.name if spec else Path(sys.argv[0]).stem, *words])


def hardware() -> dict[str, Any]:
    """The processor, its instruction sets for products, and the memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    about = dict(_pair(line) for line in lines if ":" in line)
    flags = [flag for flag in about.get("flags", "").split() if re.match(r"avx|amx|fma|f16c", flag)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": about.get("model name", platform.machine()),
        "family_model_stepping": [about.get(key) for key in ("cpu family", "model", "stepping")],
        "cores": len(os.sched_getaffinity(0)),
        "flags": sorted(flags),
        "memory_gib": round(memory),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }


def _pair(line: str) -> tuple[str, str]:
    key, value = line.split(":", 1)
    return key.strip(), value.strip()


def table(found: Mapping[str, Any]) -> str:
    """Contenders, then ratios and shares against what they are to be, as Markdown."""
    lines = ["| contender | a second | start-up, s | warm-up, s | peak, GB | over imports, GB |"]
    lines.append("|---|---|---|---|---|---|")
    for name, made in found["contenders"].items():
        if name == MACHINE:
            continue
        unit = next((key for key in made if key.endswith("_per_s")), None)
        rates = [] if unit is None else [
            f"{_numbers(s)} {unit.removesuffix('_per_s')}" + ("" if work == "all" else f" ({work})")
            for work, s in made[unit].items()
        ]  # fmt: skip
        gb = f"{made['peak_mb'] / 1000:.2f} | {made['peak_over_imports_mb'] / 1000:.2f}"
        lines.append(f"| {name} | {'; '.join(rates)} | {made['start_up_s']} | {made['warm_up_s']} | {gb} |")
    lines += ["", "| | median (least to greatest) | at least | aim | |", "|---|---|---|---|---|"]
    for name, value in {**found.get("ratios", {}), **found.get("shares", {})}.items():
        said = "" if value["at_least"] is None else ("met" if value["median"] >= value["at_least"] else "not met")
        goals = " | ".join("" if value[key] is None else str(value[key]) for key in ("at_least", "aim"))
        lines.append(f"| {name} | {_numbers(value)} | {goals} | {said} |")
    for name, value in found.get("limits", {}).items():
        lines.append(f"| limit: {name} | {_numbers(value)} | | | |")
    for name, value in found["peak_memory_ours_over"].items():
        said = "met" if value <= 1 else "not met"
        lines.append(f"| peak memory over imports, ours / {name} | {value} | at most 1 | | {said} |")
    return "\n".join(lines)


def _numbers(s: Mapping[str, Any]) -> str:
    return f"{s['median']:.3g} ({s['min']:.3g} to {s['max']:.3g})"


def limits(rows: Rows) -> dict[str, Any]:
    """What the machine did between the contenders."""
    names = ("fp32_gflops", "bf16_gflops", "read_gb_per_s")
    measured = [row for work, found in rows[MACHINE].items() if work != WARM_UP for row in found]
    return {name: spread([row[name] for row in measured]) for name in names}


def write(found: dict[str, Any], options: Options) -> None:
    """Print the table, and write the file: results/NAME.json only if every contender ran."""
    print(table(found))
    default = None if options.only else RESULTS / f"{found['name']}.json"
    save(found, Path(options.output) if options.output else default)


def save(found: dict[str, Any], output: Path | None) -> None:
    """Write the file, if there is to be one."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"written: {output.name}")


def fallen(old: Mapping[str, Any], new: Mapping[str, Any], share: float = FALLEN) -> list[str]:
    """What is lower by more than `share` than in an older result, or missing: ratios and shares, never seconds."""
    said = []
    for kind in ("ratios", "shares"):
        for name, value in old.get(kind, {}).items():
            now = new.get(kind, {}).get(name)
            if now is None:
                said.append(f"{name}: missing, it was {value['median']:.3g}")
            elif now["median"] < (1 - share) * value["median"]:
                said.append(f"{name}: {now['median']:.3g}, it was {value['median']:.3g}")
    return said

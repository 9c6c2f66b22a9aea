"""Results of contenders: ratios of paired turns, and shares of the machine's limits. JSON file and table."""

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
from rlhf.storage import disk

RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, minimum, maximum, and all values in order."""
    rounded = [float(f"{value:.5g}") for value in values]
    middle = float(f"{statistics.median(values):.5g}")
    return {"median": middle, "min": min(rounded), "max": max(rounded), "each": rounded}


def rate(row: Row, unit: str) -> float:
    """`unit`s per second."""
    return float(row[unit] / row["seconds"])


def ratios(rows: Rows, unit: str, targets: Mapping[tuple[str, str], tuple[float, float]]) -> dict[str, Any]:
    """Our rate over each peer's, for paired turns, in `unit`s per second. targets: (peer, work) -> (at least, aim)."""
    entries = {}
    for peer in rows:
        if peer in (OURS, MACHINE) or OURS not in rows:
            continue
        for work in (work for work in rows[peer] if work != WARM_UP):
            pairs = zip(rows[OURS][work], rows[peer][work], strict=True)
            least, aim = targets[(peer, work)]
            name = f"{unit} a second, ours / {peer}" + ("" if work == "all" else f", {work}")
            entries[name] = {
                **spread([rate(a, unit) / rate(b, unit) for a, b in pairs]), "at_least": least, "aim": aim,
            }  # fmt: skip
    return entries


def share(values: Sequence[float], least: float | None, aim: float | None) -> dict[str, Any]:
    """A share of the machine's limit, in the form of a ratio."""
    return {**spread(values), "at_least": least, "aim": aim}


def summary(contender: Contender, rows: Mapping[str, list[Row]], unit: str) -> dict[str, Any]:
    """Rates, start-up, memory and all rows of one contender."""
    all_rows = [row for work_rows in rows.values() for row in work_rows]
    before, peak = contender.start["before_bytes"], max(row["peak_bytes"] for row in all_rows)
    works = {work: work_rows for work, work_rows in rows.items() if work != WARM_UP}
    entry: dict[str, Any] = {"start_up_s": round(contender.start["start_up_s"], 2)}
    if unit in all_rows[-1]:
        entry |= {
            f"{unit}_per_s": {work: spread([rate(row, unit) for row in work_rows]) for work, work_rows in works.items()}
        }
    entry |= {"warm_up_s": round(rows[WARM_UP][0]["seconds"], 3), "peak_mb": round(peak / 1e6)}
    return entry | {"peak_over_imports_mb": round((peak - before) / 1e6), "rows": rows}


def results(
    name: str, options: Options, contenders: Mapping[str, Contender], rows: Rows, unit: str, **measurements: Any
) -> dict[str, Any]:
    """The content of the JSON file."""
    summaries = {
        contender_name: summary(contender, rows[contender_name], unit)
        for contender_name, contender in contenders.items()
    }
    memory = {
        contender_name: round(summaries[OURS]["peak_over_imports_mb"] / entry["peak_over_imports_mb"], 3)
        for contender_name, entry in summaries.items()
        if contender_name not in (OURS, MACHINE) and OURS in summaries
    }
    header = {"name": name, **environment_info(), "options": option_values(options)}
    return {**header, **measurements, "peak_memory_ours_over": memory, "contenders": summaries}


def environment_info() -> dict[str, Any]:
    """Date, command, hardware and versions of a measurement."""
    return {
        "date": date.today().isoformat(),
        "command": command_line(),
        "hardware": hardware(),
        "versions": {library: version(library) for library in LIBRARIES}
        | {"python": platform.python_version(), "libc": " ".join(platform.libc_ver())},
    }


def option_values(options: Options) -> dict[str, Any]:
    """The options; of paths only the last name."""
    values = options.model_dump(mode="json", exclude={"output"})
    return {key: Path(value).name if isinstance(value, str) else value for key, value in values.items()}


def command_line() -> str:
    """The command line of this process; of paths only the last name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return " ".join(["python", "-m", spec.name if spec else Path(sys.argv[0]).stem, *words])


def hardware() -> dict[str, Any]:
    """The processor, its instruction sets for products and their limit, and the memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in processor.get("flags", "").split() if re.match(r"avx|amx|fma|f16c", flag)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": processor.get("model name", platform.machine()),
        "family_model_stepping": [processor.get(key) for key in ("cpu family", "model", "stepping")],
        "cores": len(os.sched_getaffinity(0)),
        "flags": sorted(flags),
        "memory_gib": round(memory),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
    }


def table(result: Mapping[str, Any]) -> str:
    """A Markdown table of the contenders, and one of ratios and shares beside their targets."""
    lines = ["| contender | a second | start-up, s | warm-up, s | peak, GB | over imports, GB |"]
    lines.append("|---|---|---|---|---|---|")
    for name, entry in result["contenders"].items():
        if name == MACHINE:
            continue
        unit = next((key for key in entry if key.endswith("_per_s")), None)
        rates = [] if unit is None else [
            f"{_numbers(s)} {unit.removesuffix('_per_s')}" + ("" if work == "all" else f" ({work})")
            for work, s in entry[unit].items()
        ]  # fmt: skip
        gb = f"{entry['peak_mb'] / 1000:.2f} | {entry['peak_over_imports_mb'] / 1000:.2f}"
        lines.append(f"| {name} | {'; '.join(rates)} | {entry['start_up_s']} | {entry['warm_up_s']} | {gb} |")
    lines += ["", "| | median (least to greatest) | at least | aim | |", "|---|---|---|---|---|"]
    for name, value in {**result.get("ratios", {}), **result.get("shares", {})}.items():
        verdict = "" if value["at_least"] is None else ("met" if value["median"] >= value["at_least"] else "not met")
        goals = " | ".join("" if value[key] is None else str(value[key]) for key in ("at_least", "aim"))
        lines.append(f"| {name} | {_numbers(value)} | {goals} | {verdict} |")
    for name, value in result.get("limits", {}).items():
        lines.append(f"| limit: {name} | {_numbers(value)} | | | |")
    for name, value in result["peak_memory_ours_over"].items():
        verdict = "met" if value <= 1 else "not met"
        lines.append(f"| peak memory over imports, ours / {name} | {value} | at most 1 | | {verdict} |")
    return "\n".join(lines)


def _numbers(s: Mapping[str, Any]) -> str:
    return f"{s['median']:.3g} ({s['min']:.3g} to {s['max']:.3g})"


def limits(rows: Rows) -> dict[str, Any]:
    """The machine's limits, measured between the contenders."""
    names = ("fp32_gflops", "bf16_gflops", "read_gb_per_s")
    measured = [row for work, work_rows in rows[MACHINE].items() if work != WARM_UP for row in work_rows]
    return {name: spread([row[name] for row in measured]) for name in names}


def write(result: dict[str, Any], options: Options) -> None:
    """Print the table, and write the file."""
    print(table(result))
    save(result, options)


def save(result: dict[str, Any], options: Any) -> None:
    """Write `--output`; without it results/NAME.json, but only for the default options, except `--data`: the file in
    the repository must not become that of other options."""
    defaults = {name: field.default for name, field in type(options).model_fields.items()}
    changed = [name for name, value in options if name not in ("data", "output") and value != defaults[name]]
    if changed and not options.output:
        print(f"not written: {', '.join(changed)} differ from the defaults; name a file with --output")
        return
    path = Path(options.output or RESULTS / f"{result['name']}.json")
    write_json(path, result)
    print(f"written: {path.name}")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a file of results, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_text(path, json.dumps(result, indent=1) + "\n")

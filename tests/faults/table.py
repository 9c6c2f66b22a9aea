"""The table of docs/reliability.md: each fault, its tests, and the seconds they took.

    RLHF_FAULTS_REPORT=$PWD/report.jsonl make test test-faults
    python -m tests.faults.table report.jsonl

puts it in its place.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.docs.test_fault_table import ROWS_A, ROWS_B, ROWS_C

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
HEAD = "| # | fault | tests in `tests/`, seconds |\n|---|---|---|\n"
FAULTS = {
    1: "kill -9 of one rank in a step",
    2: "kill -9 of one or all ranks while they save",
    3: "kill -9 between a checkpoint's data and its name",
    4: "SIGTERM to the launcher, in every stage and while it saves",
    5: "SIGTERM to one rank",
    6: "SIGTERM while generating",
    7: "a step or a save slower than the grace",
    8: "SIGUSR1 before a scheduler's time limit",
    9: "a rank stopped or hung",
    10: "an exception on one rank",
    11: "a slow rank",
    12: "a port in use",
    13: "two jobs in one directory",
    14: "more processes than devices",
    15: "no launcher",
    16: "a clean end, every time",
    17: "a host that is missing",
    18: "hosts with other code, options or versions",
    19: "out of memory",
    20: "a stage of the chain crashes",
    21: "the disk is full while saving",
    22: "too little room, foreseeable",
    23: "an output directory that cannot be written",
    24: "a file of a checkpoint is cut off",
    25: "one bit of it has flipped",
    26: "one is missing, or one too many",
    27: "which checkpoint is the newest",
    28: "a pickle put in its place",
    29: "another number of processes",
    30: "another ZeRO stage",
    31: "other options",
    32: "data that changed",
    33: "other versions of libraries",
    34: "the same command after the end",
    35: "a chain killed anywhere, and the same command",
    36: "step 3 without the stages before it",
    37: "a stage that did not finish, as an input",
    38: "the old checkpoint goes before the new one is whole",
    39: "what an earlier crash left behind",
    40: "a network file system that shows files late",
    41: "a clock that jumps",
    42: "Ctrl-C, once and twice",
    96: "a power cut, at the end and at any moment before",
    97: "a changed or damaged manifest of a finished stage",
    98: "a finished stage whose input was made again",
    99: "files and directories that may not be read or written, that the disk no longer gives, or that are no files",
    102: "Ctrl-C, SIGTERM and SIGKILL while several processes tokenise; one of them killed; no /dev/shm",
    103: "the disk is full at the start, in metrics.jsonl, while a model is written",
    104: "who may read a model",
    105: "one bit of the cache of tokenised rows has flipped",
    106: "a row with a number beyond floating point, or nested 900 deep",
    107: "brackets or aliases without end in a YAML file",
    108: "a tokenizer whose normalizer or regular expression explodes; ids beyond the embedding",
    109: "a chat template that takes all time or memory",
    110: "stdout closed, its reader gone, or the disk behind it full",
    111: "SIGHUP: the terminal is gone",
    112: "16 open files; a path that is no UTF-8",
    113: "a kill, a full disk or a mistake while a checkpoint is written beside training",
    114: "a seed of 2^70, an update of rank 0; an output directory that is empty, in the cloud, too long, or in `~`",
    115: "a model whose loss is not finite from the start",
    116: "a config.json with an activation that there is not, or a billion layers or labels",
    117: "a data file of zero bytes; a column whose name is misspelt",
    118: "an object store or a web server that fails while data is read from it, or has no package here",
    119: "a user's own reward or dataset file that cannot be imported",
    120: "sys.exit(0) or os._exit(0) in a user's own code",
    121: "a compilation of layers that was killed",
    101: "Python files in the current directory",
    100: "symbolic links in place of checkpoints or models",
}


def table(seconds: Mapping[str, float]) -> str:
    """Markdown. `seconds`: by test, without its parameters."""
    rows = {**ROWS_A, **ROWS_B, **ROWS_C}
    lines = []
    for number, fault in FAULTS.items():
        tests = [f"`{test}` {_shown(seconds.get(test))}".strip() for test in rows.get(number, ())]
        lines.append(f"| {number} | {fault} | {'<br>'.join(tests)} |")
    return HEAD + "\n".join(lines) + "\n"


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s" if seconds >= 1 else "<1 s"


def seconds_in(report: Path) -> dict[str, float]:
    """Of each test, over all its parameters; of a test that was run several times the last."""
    each = {(row := json.loads(line))["test"]: row["seconds"] for line in report.read_text().splitlines()}
    total: dict[str, float] = defaultdict(float)
    for test, seconds in each.items():
        total[re.sub(r"\[.*", "", test.removeprefix("tests/"))] += seconds
    return dict(total)


def put(page: str, text: str) -> str:
    """The page with this table in the place of its own."""
    start = page.index(HEAD)
    end = start + len(re.match(r"(\|.*\n)+", page[start:]).group())  # type: ignore[union-attr]
    return page[:start] + text + page[end:]


if __name__ == "__main__":
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), table(seconds_in(Path(sys.argv[1])))), encoding="utf-8")

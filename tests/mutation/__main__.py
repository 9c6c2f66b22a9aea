"""Mutation testing: does a test fail when one operator, number or argument of the product is wrong?

    make mutants ARGS="--seed 0 --sample 300"

Owners (owners.toml) are the test files that answer for a product file. A sample of all mutants is drawn, each is put
into a copy of the tree, and its owners run until the first failure. Results stay in build/mutants.jsonl: a run that was
stopped goes on, and what has not changed, product file and owners, is not run again.
"""

import argparse
import hashlib
import queue
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.running import Results, Worker

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
ROOMS = ("data", "rlhf", "step1_sft", "step2_reward", "step3_ppo")
RESULTS = ROOT / "build" / "mutants.jsonl"
LEAST = 0.95
"""share of the mutants that are not equivalent, of which fewer killed is a failure"""
BASELINE_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Equivalent:
    """Mutants that change nothing a test could see. Without `becomes`: every mutant of the line; without `line`: of
    the function."""

    file: str
    function: str
    reason: str
    line: str | None = None
    becomes: str | None = None

    def is_of(self, mutant: Mutant) -> bool:
        """Whether `mutant` is one of these."""
        same_function = (self.file, self.function) == (mutant.file, mutant.function)
        return same_function and self.line in (None, mutant.line) and self.becomes in (None, mutant.becomes)


def owners() -> dict[str, list[str]]:
    """Test files by the product file that they own, fast ones first. A file without a line there has the test of its
    mirrored path, if there is one: tests/data/read/test_shapes.py for data/read/shapes.py."""
    table: dict[str, list[str]] = tomllib.loads((FOLDER / "owners.toml").read_text(encoding="utf-8"))
    files = (file.relative_to(ROOT) for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")))
    mirrored = {str(file): f"tests/{file.with_name(f'test_{file.name}')}" for file in files}
    return {file: [test] for file, test in mirrored.items() if (ROOT / test).is_file()} | table


def equivalents() -> list[Equivalent]:
    """Mutants that are named as equivalent."""
    table = tomllib.loads((FOLDER / "equivalent.toml").read_text(encoding="utf-8"))
    return [Equivalent(**entry) for entry in table["mutant"]]


def drawn(files: Sequence[str], seed: int, sample: int) -> list[Mutant]:
    """The first `sample` (0: all) of the mutants that are not equivalent, in an order that the seed makes of names: a
    mutant keeps its rank whatever else changes."""
    known = equivalents()
    every = [mutant for file in files for mutant in mutants(ROOT, file)]
    every = [mutant for mutant in every if not any(entry.is_of(mutant) for entry in known)]
    every.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())
    return every[: sample or None]


@dataclass(frozen=True, slots=True)
class State:
    """What a result is of: a product file and its owners, with digests of what they held."""

    tests: tuple[str, ...]
    of_file: str
    of_tests: str

    @classmethod
    def of(cls, file: str, tests: Sequence[str]) -> Self:
        """As the files are now."""
        return cls(tuple(tests), _digest([file]), _digest(tests))


def _digest(paths: Sequence[str]) -> str:
    return hashlib.sha256(b"\0".join((ROOT / path).read_bytes() for path in paths)).hexdigest()[:12]


def serve(worker: Worker, tasks: "queue.SimpleQueue[tuple[Mutant, State]]", results: Results, end: float) -> None:
    """Run mutants until there are none left or the time is over."""
    while time.monotonic() < end:
        try:
            mutant, state = tasks.get_nowait()
        except queue.Empty:
            return
        usual = baseline(worker, state, results)
        answer = worker.run(state.tests, 30 + 4 * usual, mutant)
        outcome = {"passed": "survived", "failed": "killed", "timed out": "timed out"}[answer["outcome"]]
        killer = next((line for line in answer["output"] if line.startswith(("FAILED", "ERROR"))), "")
        row = {"name": mutant.name, "outcome": outcome, "seconds": answer["seconds"], "killer": killer}
        results.add(row | {"state": state.of_file + state.of_tests})
        print(f"{outcome:9}  {answer['seconds']:6.1f} s  {mutant}", flush=True)


def baseline(worker: Worker, state: State, results: Results) -> float:
    """Seconds that the tests take without a mutant; they must pass. Each file is measured once, whatever it owns."""
    total = 0.0
    for test in state.tests:
        digest = _digest([test])
        row = results.known(test, digest)
        if row is None:
            answer = worker.run([test], BASELINE_LIMIT_S)
            if answer["outcome"] != "passed":
                raise SystemExit("\n".join([*answer["output"], f"{test}: {answer['outcome']} without a mutant"]))
            row = {"name": test, "state": digest, "seconds": answer["seconds"]}
            results.add(row)
        total += float(row["seconds"])
    return total


def run(todo: Sequence[tuple[Mutant, State]], results: Results, workers: int, end: float) -> None:
    """Run these mutants, each in the tree as it is now."""
    tasks: queue.SimpleQueue[tuple[Mutant, State]] = queue.SimpleQueue()
    for task in todo:
        tasks.put(task)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        crew = [Worker(ROOT, Path(folder) / str(i)) for i in range(min(workers, len(todo)))]
        with ThreadPoolExecutor(len(crew) or 1) as pool:
            try:
                for done in [pool.submit(serve, worker, tasks, results, end) for worker in crew]:
                    done.result()
            finally:
                for worker in crew:
                    worker.close()


def summary(rows: Mapping[str, list[str]]) -> Iterator[str]:
    """A line for each file, and one for all: outcomes counted, and the share killed."""
    yield f"{'file':36} {'mutants':>8} {'killed':>7} {'timed out':>10} {'survived':>9} {'score':>6}"
    everything = [outcome for outcomes in rows.values() for outcome in outcomes]
    for file, outcomes in [*sorted(rows.items()), ("all", everything)]:
        killed, late, alive = (outcomes.count(kind) for kind in ("killed", "timed out", "survived"))
        yield f"{file:36} {len(outcomes):8} {killed:7} {late:10} {alive:9} {1 - alive / max(1, len(outcomes)):6.1%}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutants", description="Mutation testing of the product files in owners.toml"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--sample", type=int, default=300, help="mutants at most; 0: all")
    parser.add_argument(
        "--minutes", type=float, default=60, help="after which no new mutant begins; call again to go on"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    parser.add_argument(
        "--files", nargs="*", default=list(owners()), help="product files; default: all that have owners"
    )
    parser.add_argument("--survivors", action="store_true", help="run again what survived last time, and nothing else")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen, results, table = options(), Results(RESULTS), owners()
    sample = drawn(chosen.files, chosen.seed, chosen.sample)
    if chosen.list:
        print(*sample, sep="\n")
        return 0
    states = {file: State.of(file, table[file]) for file in chosen.files}
    if chosen.survivors:
        sample = [m for m in sample if results.by_name.get(m.name, {}).get("outcome") == "survived"]

    def is_known(mutant: Mutant) -> bool:
        state = states[mutant.file]
        return results.known(mutant.name, state.of_file + state.of_tests) is not None

    todo = [(mutant, states[mutant.file]) for mutant in sample if not is_known(mutant)]
    print(f"{len(sample)} mutants, {len(sample) - len(todo)} of them measured before")
    run(todo, results, chosen.workers, time.monotonic() + 60 * chosen.minutes)
    measured = [mutant for mutant in sample if is_known(mutant)]
    outcomes: dict[str, list[str]] = {}
    for mutant in measured:
        outcomes.setdefault(mutant.file, []).append(results.by_name[mutant.name]["outcome"])
    alive = [m for m in measured if results.by_name[m.name]["outcome"] == "survived"]
    print("", *(f"survived  {mutant}" for mutant in alive), "", *summary(outcomes), sep="\n")
    if len(measured) < len(sample):
        print(f"{len(sample) - len(measured)} mutants are left; the same command goes on with them")
        return 2
    return int(len(alive) > (1 - LEAST) * len(measured))


if __name__ == "__main__":
    raise SystemExit(main())

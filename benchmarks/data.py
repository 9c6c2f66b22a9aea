"""`python -m benchmarks.data`: the cost of tokenised data: disk, time and memory. For Linux.

Each part runs in its own process, so that memory and start-up are measured separately. Rows are generated
(benchmarks.corpus) and have 129 tokens on average, including prompt, template and EOS.
"""

import json
import multiprocessing
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from benchmarks import harness, outcome
from rlhf import errors
from rlhf.config import Config, parser

TOKENS, VOCABULARY = 129, 32_768
"""of a row on average, and of the byte-level BPE that is trained for this"""
TARGETS = {
    "bytes_a_row": 600,
    "rows_a_second": 8000,
    "main_growth_mb": 200,
    "second_start_s": 5,
    "padding": 0.10,
}
"""upper limits; for rows_a_second a lower limit. The memory is for a million rows."""
DEEPSPEED_CHAT = {"bytes_a_row": 22_600, "rows_a_second": 2048}
"""DeepSpeed-Chat's cache of padded tensors on 2 cores, for texts of 129 tokens: quoted, not measured."""


class Options(Config):
    """What to measure, and where to write it."""

    rows: int = Field(100_000, ge=1000)
    """generated rows"""
    workers: int = Field(2, ge=1)
    """processes that tokenise"""
    repeat: int = Field(3, ge=1)
    """number of first calls; the fastest counts"""
    hh: str | None = None
    """a file of HH-RLHF pairs, such as harmless-base.jsonl.gz, to measure padding on; else lengths are drawn"""
    output: str = str(outcome.RESULTS / "data.json")
    """JSON file to write"""


def first_call(path: str, tokenizer: str, workers: int, cache: str) -> dict[str, float]:
    """The first call, which reads, divides and tokenises the rows: time, and processor time."""
    data, seconds = _open(path, tokenizer, workers, cache)
    rows = len(data.train)
    files = [file for file in Path(cache).rglob("*") if file.is_file()]
    return {
        "rows": rows,
        "mean_tokens": round(float(data.train.lengths.mean()), 1),
        "bytes_a_row": round(sum(file.stat().st_size for file in files) / rows, 1),
        "seconds": round(seconds["wall"], 2),
        "rows_a_second": round(rows / seconds["wall"]),
        "cpu_us_a_row_main": round(seconds["main"] / rows * 1e6, 1),
        "cpu_us_a_row_workers": round(seconds["workers"] / rows * 1e6, 1),
    }


def first_memory(path: str, tokenizer: str, workers: int, cache: str) -> dict[str, float]:
    """Peaks of memory in the same call. Time is not measured, because measuring memory takes time."""
    with _MemoryPeaks() as memory:
        _open(path, tokenizer, workers, cache, memory.begin)
    return memory.peaks()


def second_start(path: str, tokenizer: str, workers: int, cache: str) -> dict[str, float]:
    """The same call with a warm cache, reading all lengths; and the cost of an epoch's order and of an item."""
    data, seconds = _open(path, tokenizer, workers, cache)
    from data.batches import Batches

    train = data.train
    picks = np.random.default_rng(0).integers(len(train), size=2000).tolist()
    order = harness.seconds_of(lambda: next(iter(Batches(train.sides, 16))))
    return {
        "seconds": round(seconds["wall"], 2),
        "seconds_imports_and_tokenizer": round(seconds["before"], 2),
        "epoch_order_s": round(order, 3),
        "random_item_us": round(harness.seconds_of(lambda: [train[i] for i in picks]) / len(picks) * 1e6, 1),
    }


def padding_share(tokens: np.ndarray, batches: Iterable[Sequence[int]], pass_rows: int) -> float:
    """The share of padding if a batch is computed in passes of `pass_rows` rows of similar length. tokens: [N, k]

    The k sides of the rows go into k passes, the longest ones into the first.
    """
    real = computed = 0
    for batch in batches:
        rows = tokens[batch]
        rows = rows[np.argsort(-rows.max(1), kind="stable")]
        real += int(rows.sum())
        for pass_tokens in np.split(rows, range(pass_rows, len(rows), pass_rows)):
            passes = np.array_split(np.sort(pass_tokens, axis=None)[::-1], pass_tokens.shape[1])
            computed += sum(int(sides.max()) * sides.size for sides in passes)
    return 1 - real / computed


def padding_shares(tokens: np.ndarray) -> dict[str, float]:
    """The share of padding at batch 16 in micro-batches of 8, by length and in random order. tokens [N, k]"""
    from data.batches import Batches

    return {
        "rows": len(tokens),
        "by_length": round(padding_share(tokens, Batches(tokens, 16), 8), 4),
        "random_order": round(padding_share(tokens, Batches(len(tokens), 16), 8), 4),
    }


def hh_lengths(path: str, tokenizer: str, phase: Any) -> np.ndarray:
    """Tokens of the chosen dialogues (sft), or of both sides of the pairs (reward), in a file of HH-RLHF. [N, k]"""
    from data.config import DataOptions
    from data.dataset import Recipe, open_datasets

    with tempfile.TemporaryDirectory() as cache:
        options = DataOptions(data_path=(f"hh_rlhf:{path}",), data_split=(1, 1, 0), eval_fraction=0, data_cache=cache)
        return open_datasets(options, Recipe(phase), _tokenizer(tokenizer)).train.sides


def drawn_lengths() -> np.ndarray:
    """Random lengths as in instruction data: lognormal, median 100, 8 to 512 tokens. [N, 1]"""
    return np.random.default_rng(0).lognormal(np.log(100), 0.6, 20_000).clip(8, 512).astype(int)[:, None]


def prepare(folder: str, rows: int) -> dict[str, Any]:
    """Train the tokenizer, and write the rows. Returns their sizes."""
    from benchmarks import corpus
    from rlhf.text.dialogues import Template

    corpus.train_tokenizer(Path(folder, "tokenizer"), VOCABULARY)
    tokenizer = _tokenizer(f"{folder}/tokenizer")
    empty = len(Template(tokenizer).prompt_ids(())) + len(Template(tokenizer).response_ids(""))
    words = corpus.words_for(tokenizer, TOKENS, empty)
    corpus.write_rows(Path(folder, "rows.jsonl"), rows, words)
    return {"tokens": len(tokenizer), "words_a_row": round(words, 1)}


def _tokenizer(path: str) -> Any:
    from rlhf.console import quiet_libraries
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

    quiet_libraries()
    return prepare_tokenizer(load_tokenizer(path), "human_assistant")


def _open(
    path: str, tokenizer: str, workers: int, cache: str, begin: Callable[[], object] = int
) -> tuple[Any, dict[str, float]]:
    """(data, seconds) of `open_datasets` for sft, with all rows for training. `begin` is called just before it."""
    call_start = time.perf_counter()
    from data.config import DataOptions
    from data.dataset import Recipe, open_datasets

    prepared = _tokenizer(tokenizer)
    options = DataOptions(
        data_path=(path,), data_split=(1, 0, 0), eval_fraction=0, data_workers=workers, data_cache=cache
    )
    begin()
    before, start, cpu = time.perf_counter() - call_start, time.perf_counter(), time.process_time()
    data = open_datasets(options, Recipe("sft"), prepared)
    data.train.lengths.sum()
    wall, main = time.perf_counter() - start, time.process_time() - cpu
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return data, {"before": before, "wall": wall, "main": main, "workers": children.ru_utime + children.ru_stime}


class _MemoryPeaks:
    """Peaks of memory since `begin`, measured every 20 ms, in MB.

    Of this process: growth of resident memory, with and without the pages of mapped files, which the kernel may drop.
    Of a child process: its unique memory (USS).
    """

    def __enter__(self) -> "_MemoryPeaks":
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        self.begin()
        return self

    def begin(self) -> None:
        self._start = self._peak = self._read_memory()
        self._child = 0.0

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peaks(self) -> dict[str, float]:
        growth = self._peak - self._start
        return {
            "main_growth_mb": round(growth[0]),
            "main_growth_without_files_mb": round(growth[1]),
            "worker_peak_mb": round(self._child),
        }

    def _poll(self) -> None:
        import psutil

        me = psutil.Process()
        while not self._ended.wait(0.02):
            self._peak = np.maximum(self._peak, self._read_memory())
            for child in me.children(recursive=True):
                try:
                    self._child = max(self._child, child.memory_full_info().uss / 1e6)
                except (psutil.Error, OSError):
                    continue  # the process has ended

    @staticmethod
    def _read_memory() -> np.ndarray:
        return np.array([harness.memory_bytes(name) / 1e6 for name in ("VmRSS", "RssAnon")])


def _run_in_process(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


def measure(options: Options) -> dict[str, Any]:
    """All measurements, as written to the JSON file."""
    with tempfile.TemporaryDirectory() as folder:
        prepared, tokenizer = _run_in_process(prepare, folder, options.rows), f"{folder}/tokenizer"
        arguments = (f"{folder}/rows.jsonl", tokenizer, options.workers)
        memory = _run_in_process(first_memory, *arguments, f"{folder}/cache")
        second = _run_in_process(second_start, *arguments, f"{folder}/cache")
        calls = []
        for number in range(options.repeat):
            shutil.rmtree(f"{folder}/cache")
            calls.append(_run_in_process(first_call, *arguments, f"{folder}/cache"))
            print(f"first call {number + 1} of {options.repeat}: {json.dumps(calls[-1])}", flush=True)
        paddings = {"drawn": _run_in_process(padding_shares, drawn_lengths())}
        if options.hh is not None:
            for name, phase in (("hh_pairs", "reward"), ("hh_chosen", "sft")):
                paddings[name] = _run_in_process(
                    padding_shares, _run_in_process(hh_lengths, options.hh, tokenizer, phase)
                )
    return {
        **outcome.environment_info(),
        "data": {**prepared, "rows": options.rows, "workers": options.workers, "best_of": options.repeat},
        "first_call": {**max(calls, key=lambda call: call["rows_a_second"]), **memory},
        "second_start": second,
        "padding": paddings,
        "targets": TARGETS,
        "deepspeed_chat_quoted": DEEPSPEED_CHAT,
    }


def main() -> int:
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.data", "What tokenised data costs.")
    results = measure(options)
    outcome.write_json(Path(options.output), results)
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

"""Faults of the data on the command line: what is said, that nothing is written, what a run goes on without."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import console, errors
from rlhf.chain import command as train
from rlhf.launch import launcher
from step1_sft import __main__ as sft
from step1_sft import stage as sft_stage
from step2_reward import stage as reward_stage
from tests.support.programs import without_status

ROOT = Path(train.__file__).parents[2]
LIMIT_S = 15
SMALL = ["--model", "demo-llama", "--batch-size", "2", "--max-length", "48", "--max-prompt-length", "24"]
ONE_SHARE = ["--data-split", "1,0,0", "--eval-fraction", "0.2"]
"""The split is by content: of rows 0 to 19, 4 are held out."""


def lines(count: int, **columns: Any) -> str:
    rows = ({"prompt": f"the fox {i}", "chosen": "kind", "rejected": "rude", **columns} for i in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "quiet_libraries", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> Callable[..., str]:
    """Run a program that must refuse before it loads or writes anything; what it says, `error: ` left out."""

    def too_late(*_: Any) -> None:
        raise AssertionError("a model was loaded, or a stage started")

    def run(main: Callable[[], Any], *argv: str) -> str:
        monkeypatch.setattr(sft_stage, "load_causal_lm", too_late)
        monkeypatch.setattr(reward_stage, "new_scalar_model", too_late)
        monkeypatch.setattr(launcher, "run", too_late)
        monkeypatch.setattr(sys, "argv", ["program", *argv, "--output-dir", "out"])
        before, start = sorted(home.rglob("*")), time.process_time()
        try:
            code = errors.run_as_user(main)
        except SystemExit as leaving:
            code = int(str(leaving.code))
        message = capsys.readouterr()
        assert (code, message.out) == (2, ""), message
        assert sorted(home.rglob("*")) == before, "something was left behind"
        assert time.process_time() - start < LIMIT_S
        return without_status(message.err).removeprefix("error: ").removesuffix("\n")

    return run


# --- rows and files that cannot be read, on the command line

LINE = "fix or remove the line; --skip-bad-rows 1 continues without it"


def test_a_bad_row_stops_the_run(refused: Callable[..., str]) -> None:
    Path("x.jsonl").write_text(lines(20) + '{"prompt": "a" "chosen": "b"}\n' + lines(3))
    message = f"not valid JSON: Expecting ',' delimiter at column 16; {LINE}"
    assert refused(sft.main, *SMALL, *ONE_SHARE, "--data-path", "x.jsonl") == f"x.jsonl:21: {message}"


def many(every: int = 40) -> str:
    """A thousand rows, 25 of them cut off."""
    return "".join(line[: None if i % every else -2] + "\n" for i, line in enumerate(lines(1000).splitlines(), 1))


# --- data that leaves nothing, or too little, to train on

TOO_LITTLE: dict[str, tuple[str, list[str], str]] = {
    "too many empty responses": (
        lines(30).replace("kind", " ", 10),
        ["--max-dropped", "0.3"],
        "33% of the training rows of sft cannot be used (10 empty response, first in x.jsonl:1); expected at most 30% "
        "(--max-dropped); fix the data",
    ),
    "fewer rows than a batch": (
        lines(20),
        ["--batch-size", "32"],
        "sft got 16 rows with a response to train on and 4 held out, of 20 rows (16 train, 4 evaluation); expected at "
        "least 32 (one batch) and 1; add rows, raise --max-train-rows and --max-eval-rows, or lower --batch-size",
    ),
}


@pytest.mark.parametrize("fault", TOO_LITTLE)
def test_too_little_data_stops_the_run(fault: str, refused: Callable[..., str]) -> None:
    content, argv, message = TOO_LITTLE[fault]
    Path("x.jsonl").write_bytes(content.encode())
    assert refused(sft.main, *SMALL, *ONE_SHARE, "--data-path", "x.jsonl", *argv) == f"x.jsonl: {message}"


def test_a_document_on_each_line_is_named_so(refused: Callable[..., str]) -> None:
    Path("x.txt").write_text("".join(f"word{i} and word{i + 1}\n" for i in range(40)))
    argv = [*SMALL, *ONE_SHARE, "--objective", "text", "--batch-size", "2", "--data-path"]
    assert refused(sft.main, *argv, "x.txt").endswith(
        "; x.txt is one document, because no empty line divides it: with a document on each line, name it "
        "files,lines=true:x.txt"
    )


TWO = ["--deployment-type", "single_node", "--num-processes", "2", "--actor-model", "demo-llama"]


def test_fewer_rows_to_evaluate_on_than_ranks(refused: Callable[..., str]) -> None:
    for name, count in (("one", 1), ("x", 40)):
        Path(f"{name}.jsonl").write_text(lines(count))
    argv = [*TWO, *SMALL[4:], *ONE_SHARE, "--data-path", "x.jsonl", "--eval-data-path", "one.jsonl"]
    assert refused(train.main, *argv) == (
        "step1_sft: x.jsonl, one.jsonl: sft got 39 rows with a response to train on and 1 held out, of 41 rows (39 "
        "train, 1 prompt held out for evaluation, 1 evaluation); expected at least 16 (one batch) and 2; add rows, "
        "raise --max-train-rows and --max-eval-rows, or lower --sft.batch-size"
    )


# --- what goes on without some rows


def test_a_run_goes_on_and_accounts_for_every_row(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1000 rows, 25 of them malformed, and 30 prompts, in other letters, that are in the evaluation file too."""
    limits = ["--data-split", "1,0,0", "--max-train-rows", "4", "--skip-bad-rows", "25", "--overwrite"]
    argv = ["step1_sft", *SMALL, *limits, "--eval-data-path", "held_out.jsonl", "--output-dir", "out", "--data-path"]
    Path("x.jsonl").write_text(many())
    Path("held_out.jsonl").write_text(lines(30).replace("the fox", "The FOX,"))
    monkeypatch.setattr(sys, "argv", [*argv, "x.jsonl"])
    assert sft.process() == 0
    message = "step1_sft: 4 rows to train on, 30 held out; dropped 30 prompt held out for evaluation, 25 malformed\n"
    assert message in capsys.readouterr().out
    folder = home / "out/step1_sft"
    account = json.loads((folder / "data.json").read_text())
    one, other = account["sources"]
    assert (one["data_path"], one["rows"], other["data_path"], other["rows"]) == ("x.jsonl", 1000, "held_out.jsonl", 30)
    assert one["outcomes"] == {
        "malformed": 25,
        "prompt held out for evaluation": 30,
        "beyond max_train_rows": 941,
        "train": 4,
    }
    assert other["outcomes"] == {"evaluation": 30}
    cut = "not valid JSON: Unterminated string starting at column {}; fix or remove the line"
    bad = [f"x.jsonl:{i}: {cut.format(54 + len(str(i - 1)))}\n" for i in range(40, 1001, 40)]
    assert (folder / "bad_rows.txt").read_text() == "".join(bad)
    Path("mended.jsonl").write_text(lines(40).replace("the fox", "the fox is kind and calm and brave " * 5))
    monkeypatch.setattr(sys, "argv", [*argv, "mended.jsonl", "--truncate", "tokens"])
    assert sft.process() == 0
    assert not (folder / "bad_rows.txt").exists()
    message = (
        "4 of 4 training rows are cut to length: 4 lost part of the prompt (--max-length 48, --max-prompt-length 24)"
    )
    assert f"step1_sft: {message}\n" in capsys.readouterr().out

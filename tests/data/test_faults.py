"""Faults of the data on the command line: what is said, that nothing is loaded or written, what a run goes on without.

The parts are tested where they are:

    each bad row and file               data/read/test_bad_rows.py::test_a_bad_line_is_one_row
    BOM, CRLF, U+2028, NUL              data/read/test_formats.py::test_every_kind_reads_the_same_rows
    a line of 10 MB                     data/read/test_formats.py::test_a_line_of_ten_megabytes
    equal sides                         data/test_dataset.py::test_what_is_dropped_is_counted
    turns and tokens that give way      data/build/test_encode.py::test_turns_that_are_left_are_learned
    no room for PPO's response          rlhf/chain/test_errors.py::test_the_chain_refuses_before_anything_starts
    equally many steps on every rank    data/test_batches.py::test_ranks_share_the_batches_of_one_rank
    texts too long, empty or odd        data/read/test_odd_texts.py::test_special_tokens_that_texts_spell
    special tokens that texts spell     rlhf/text/test_text.py::test_special_tokens_in_a_message_are_text
    a script is not run                 data/read/test_paths.py::test_a_loading_script_is_refused_and_not_run
    a hub that is dead or silent        rlhf/chain/test_errors.py::test_the_hub_does_not_answer
    prompts of an evaluation file       data/build/test_mixing.py::test_no_prompt_of_an_evaluation_path_is_trained_on
    a tokenizer of the same size        contracts/test_rewards.py::test_a_swapped_pair_of_ids_makes_another_tokenizer
    a source of the user's own          data/read/test_contract.py::test_a_value_that_is_not_a_row_is_refused
    padding that is EOS, or none        rlhf/text/test_text.py::test_padding_is_neither_eos_nor_in_use
    one BOS                             rlhf/text/test_text.py::test_one_bos_and_at_the_start
    no chat template                    rlhf/text/test_templates.py::test_templates_by_name_and_by_file
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batches import Batches
from rlhf import console, errors
from rlhf.chain import command as train
from rlhf.launch import launcher
from step1_sft import __main__ as sft
from step1_sft import stage as sft_stage
from step2_reward import __main__ as reward
from step2_reward import stage as reward_stage
from tests.support.programs import without_status
from tests.support.texts import byte_tokenizer

ROOT = Path(train.__file__).parents[2]
LIMIT_S = 15
SMALL = ["--model", "demo-llama", "--batch-size", "2", "--max-length", "48", "--max-prompt-length", "24"]
ONE_SHARE = ["--data-split", "1,0,0", "--eval-fraction", "0.2"]
REWARD_SHARE = ["--data-split", "0,1,0", "--eval-fraction", "0.2"]
"""The split is by content: of rows 0 to 19, 4 are held out."""


def test_the_tests_named_above_exist() -> None:
    named = re.findall(r"(\S+\.py)::(\w+)", __doc__ or "")
    assert len(named) == 17
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), name


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
SKIP = "--skip-bad-rows 1 continues without it"
BAD_ROWS = {
    "malformed JSON": (
        b'{"prompt": "a" "chosen": "b"}',
        f"not valid JSON: Expecting ',' delimiter at column 16; {LINE}",
    ),
    "a byte that is no UTF-8": (
        b'{"prompt": "\xff\xfe"}',
        f"got byte 0xff at offset 12 of the line, expected UTF-8; convert the file, e.g. with iconv; {SKIP}",
    ),
    "a missing column": (
        b'{"prompt": "a", "chosen": "b"}',
        "no column 'rejected' beside 'chosen'; have prompt, chosen; if the rows are prompts only, write "
        f"files,shape=prompt:PATH; {SKIP}",
    ),
    "a null": (b'{"prompt": "a", "chosen": "b", "rejected": null}', f"rejected: got null, expected text; {SKIP}"),
    "a wrong type": (b'{"prompt": 5, "chosen": "b", "rejected": "c"}', f"prompt: got 5, expected text; {SKIP}"),
    "a margin that is no number": (
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}',
        f'margin: got "much", expected a number; {SKIP}',
    ),
    "a margin beyond floating point": (
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1' + b"0" * 400 + b"}",
        f"margin: got 1{'0' * 56}..., expected a number; {SKIP}",
    ),
    "a key that is repeated": (
        b'{"prompt": "a", "prompt": "b", "chosen": "c", "rejected": "d"}',
        f'not valid JSON: the key "prompt" is repeated; {LINE}',
    ),
    "NaN": (
        b'{"prompt": "a", "chosen": "b", "rejected": NaN}',
        f"not valid JSON: got NaN, expected a finite number or null; {LINE}",
    ),
    "half a surrogate pair": (
        b'{"prompt": "a", "chosen": "b\\ud800", "rejected": "c"}',
        f"chosen: got half a surrogate pair at character 1, expected text; {SKIP}",
    ),
    "a NUL outside of text": (b"\0", f"not valid JSON: Expecting value at column 1; {LINE}"),
}


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_a_bad_row_stops_the_run(fault: str, refused: Callable[..., str]) -> None:
    line, message = BAD_ROWS[fault]
    Path("x.jsonl").write_bytes(lines(20).encode() + line + b"\n" + lines(3).encode())
    assert refused(sft.main, *SMALL, *ONE_SHARE, "--data-path", "x.jsonl") == f"x.jsonl:21: {message}"


def many(every: int = 40) -> str:
    """A thousand rows, 25 of them cut off."""
    return "".join(line[: None if i % every else -2] + "\n" for i, line in enumerate(lines(1000).splitlines(), 1))


def test_many_malformed_rows_stop_the_run(refused: Callable[..., str]) -> None:
    Path("x.jsonl").write_text(many())
    first, *listed = refused(sft.main, *SMALL, "--data-path", "x.jsonl", "--skip-bad-rows", "24").split("\n")
    assert first == "x.jsonl: 25 malformed rows of 1000; --skip-bad-rows 25 continues without them; the first 10:"
    assert [line.split(": ")[0] for line in listed] == [f"  x.jsonl:{40 * i}" for i in range(1, 11)]


# --- data that leaves nothing, or too little, to train on

NOTHING = (
    "expected rows with a response; add some, or change --data-split (1,0,0), --eval-fraction (0.2), --max-length (48) "
    "or --max-prompt-length (24)"
)
TOO_LITTLE: dict[str, tuple[str, list[str], str]] = {
    "an empty file": ("", [], f"0 usable rows for training in sft; of 0 rows: none; {NOTHING}"),
    "blank lines only": ("\n \r\n\t\n", [], f"0 usable rows for training in sft; of 0 rows: none; {NOTHING}"),
    "no usable row": (
        lines(20, chosen=" \n"),
        [],
        f"0 usable rows for training in sft; of 20 rows: 20 empty response; {NOTHING}",
    ),
    "too many empty responses": (
        lines(30).replace("kind", " ", 10),
        ["--max-dropped", "0.3"],
        "33% of the training rows of sft cannot be used (10 empty response); expected at most 30% (--max-dropped); "
        "fix the data",
    ),
    "fewer rows than a batch": (
        lines(20),
        ["--batch-size", "32"],
        "sft got 16 rows with a response to train on and 4 held out, of 20 rows (16 train, 4 evaluation); expected at "
        "least 32 (one batch) and 1; add rows, or lower --batch-size",
    ),
}


@pytest.mark.parametrize("fault", TOO_LITTLE)
def test_too_little_data_stops_the_run(fault: str, refused: Callable[..., str]) -> None:
    content, argv, message = TOO_LITTLE[fault]
    Path("x.jsonl").write_bytes(content.encode())
    assert refused(sft.main, *SMALL, *ONE_SHARE, "--data-path", "x.jsonl", *argv) == f"x.jsonl: {message}"


def test_no_usable_text_stops_the_run(refused: Callable[..., str]) -> None:
    Path("x.jsonl").write_text("")
    message = refused(sft.main, *SMALL, *ONE_SHARE, "--data-path", "x.jsonl", "--objective", "text")
    assert message.startswith("x.jsonl: 0 usable rows for training in sft; of 0 rows: none;")


def test_a_document_on_each_line_is_named_so(refused: Callable[..., str]) -> None:
    Path("x.txt").write_text("".join(f"word{i} and word{i + 1}\n" for i in range(40)))
    argv = [*SMALL, *ONE_SHARE, "--objective", "text", "--batch-size", "2", "--data-path"]
    assert refused(sft.main, *argv, "x.txt").endswith(
        "; x.txt is one document, because no empty line divides it: with a document on each line, name it "
        "files,lines=true:x.txt"
    )


def test_too_many_pairs_that_are_equal_stop_the_run(refused: Callable[..., str]) -> None:
    Path("x.jsonl").write_text(lines(20).replace("rude", "kind", 12))
    message = refused(reward.main, *SMALL, *REWARD_SHARE, "--eval-fraction", "0", "--data-path", "x.jsonl")
    assert message == (
        "x.jsonl: 60% of the training rows of reward cannot be used (12 equal sides); expected at most 50% "
        "(--max-dropped); fix the data"
    )


TWO = ["--deployment-type", "single_node", "--num-processes", "2", "--actor-model", "demo-llama"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--data-path", "three.jsonl", "--sft.batch-size", "8"],
            "step1_sft: three.jsonl: sft got 2 rows with a response to train on and 1 held out, of 3 rows (2 train, 1 "
            "evaluation); expected at least 8 (one batch) and 2; add rows, or lower --sft.batch-size",
        ),
        (
            ["--data-path", "x.jsonl", "--eval-data-path", "one.jsonl"],
            "step1_sft: x.jsonl, one.jsonl: sft got 39 rows with a response to train on and 1 held out, of 41 rows (39 "
            "train, 1 prompt held out for evaluation, 1 evaluation); expected at least 16 (one batch) and 2; add rows, "
            "or lower --sft.batch-size",
        ),
        (
            ["--data-path", "x.jsonl", "--sft.batch-tokens", "9"],
            "step1_sft: --sft.batch-tokens 9: expected at least 16, the longest row for each of 2 ranks, and 2 rows",
        ),
    ],
    ids=["fewer rows than a batch", "fewer rows to evaluate on than ranks", "rows longer than a batch of tokens"],
)
def test_too_little_data_for_two_ranks(argv: list[str], message: str, refused: Callable[..., str]) -> None:
    for name, count in (("one", 1), ("three", 3), ("x", 40)):
        Path(f"{name}.jsonl").write_text(lines(count))
    assert refused(train.main, *TWO, *SMALL[4:], *ONE_SHARE, "--eval-fraction", "0.4", *argv) == message


def test_a_last_batch_of_prompts_that_is_not_whole_is_left_out_on_every_rank() -> None:
    for more in ({}, {"batch_tokens": 10}):
        dealt = [list(Batches(torch.full((7,), 5).numpy(), 2, ranks=(rank, 2), **more)) for rank in range(2)]
        assert [[len(batch) for batch in batches] for batches in dealt] == [[1, 1, 1]] * 2
        assert len({row for batches in dealt for batch in batches for row in batch}) == 6


# --- what cannot be started from


def test_a_context_without_room(refused: Callable[..., str]) -> None:
    Path("x.jsonl").write_text(lines(20))
    assert refused(sft.main, *SMALL, *ONE_SHARE, "--data-path", "x.jsonl", "--max-length", "129") == (
        "model 'demo-llama': its context is 128 tokens, but sequences may have 129; lower --max-length, "
        "--max-prompt-length or --response-length"
    )


@pytest.mark.parametrize("path", ["squad.py", "files:squad.py", "squad.py,rows=3:train"])
def test_a_loading_script(path: str, refused: Callable[..., str]) -> None:
    Path("squad.py").write_text("import datasets\nraise SystemExit\nclass S(datasets.GeneratorBasedBuilder): ...\n")
    assert refused(sft.main, *SMALL, "--data-path", path) == (
        "squad.py: got a loading script of `datasets`, which is code and no longer run; give the files it reads, or "
        "the hub's conversion: OWNER/NAME@refs/convert/parquet"
    )


def test_a_hub_that_may_not_be_asked(refused: Callable[..., str]) -> None:
    assert refused(sft.main, *SMALL, "--data-path", "owner/absent") == (
        "owner/absent: cannot be loaded: Couldn't reach 'owner/absent' on the Hub (OfflineModeIsEnabled); download its "
        "files and give their path"
    )


def test_a_tokenizer_without_an_end(refused: Callable[..., str]) -> None:
    tokenizer = byte_tokenizer(bos_token="<s>")
    tokenizer.save_pretrained("model")
    Path("x.jsonl").write_text(lines(20))
    assert refused(sft.main, *SMALL, "--data-path", "x.jsonl", "--model", "model") == (
        'model: the tokenizer has no EOS token, and a response must end in one; set "eos_token" in its '
        "tokenizer_config.json"
    )


# --- a source of the user's own


MINE = """
from rlhf.config import Config
from rlhf.types import Message, Row
class Mine:
    def rows(self, phase):
        yield Row((Message("user", "the fox"),), "kind")
        {}
def build(config, path): return Mine()
"""


def test_a_source_of_ones_own_that_gives_no_row(refused: Callable[..., str]) -> None:
    Path("mine.py").write_text(MINE.format('yield Row((Message("user", None),), "kind")'))
    message = refused(sft.main, *SMALL, "--data-path", "mine.py")
    assert message == "mine.py: row 2 of rows('sft'): prompt[0].content: got null, expected text"


def test_an_error_inside_a_source_of_ones_own_is_one_line(refused: Callable[..., str]) -> None:
    Path("mine.py").write_text(MINE.format("1 / 0"))
    message = refused(sft.main, *SMALL, "--data-path", "mine.py")
    location = f"{Path('mine.py').resolve()}:7: in rows: ZeroDivisionError: division by zero"
    assert message == f"mine.py: rows('sft') failed after 1 rows: {location}"


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
    assert sft.main() == 0
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
    assert sft.main() == 0
    assert not (folder / "bad_rows.txt").exists()
    message = (
        "4 of 4 training rows are cut to length: 4 lost part of the prompt (--max-length 48, --max-prompt-length 24)"
    )
    assert f"step1_sft: {message}\n" in capsys.readouterr().out

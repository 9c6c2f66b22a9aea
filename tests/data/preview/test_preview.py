"""What the preview prints is what the stages train on, and every row that was read is in its account."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.dataset import PhaseData, Recipe, open_datasets
from data.prepare.encode import Demonstration
from data.preview import command, show
from rlhf import console, errors
from rlhf.shipped import ROOT
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import Step3Config
from tests.support.texts import byte_tokenizer

EOS = "<|end|>"
OPEN = ("--eval-fraction", "0", "--chat-template", "plain")
TURNS = "{{ bos_token }}{% for m in messages %} w9 {{ m.content }}{% endfor %}{{ ' w9' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of the words w0 to w99, between <s> and </s>."""
    file = tmp_path_factory.mktemp("model") / "words.yaml"
    file.write_text("tokenizer:\n  words: [" + ", ".join(f"w{i}" for i in range(100)) + "]\n")
    return str(file)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer that makes every byte a token, so that any text can be told from any other."""
    folder = tmp_path_factory.mktemp("letters")
    byte_tokenizer(eos_token=EOS).save_pretrained(folder)
    return str(folder)


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    return prepare_tokenizer(load_tokenizer(path), "plain")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The program in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(console, "quiet_libraries", lambda: None)

    def call(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["preview", *argv])
        code = errors.run_as_user(command.main)
        message = capsys.readouterr()
        return code, message.out, message.err

    return call


def numbers(printed: str, name: str) -> list[str]:
    """What stands after `name` in the table that has it."""
    result = re.search(rf"^{re.escape(name)} +(.*?) *$", printed, re.MULTILINE)
    assert result, f"no line '{name}' in:\n{printed}"
    return result[1].split()


# --- the program


def shown(run: Any, path: str, words: str, phase: str, *more: str) -> str:
    """What is printed of a phase that gets all rows."""
    shares = ",".join(str(int(name == phase)) for name in ("sft", "reward", "ppo"))
    argv = ["--data-path", path, "--model", words, "--phases", phase, "--data-split", shares, *OPEN, *more]
    code, printed, message = run(*argv)
    assert (code, message) == (0, "")
    return str(printed)


def test_rows_as_the_model_sees_them(run: Any, tmp_path: Path, words: str) -> None:
    row = {"prompt": "w1 w2", "chosen": "w3 </s> w4", "rejected": "w5", "margin": 1.5}
    path = write(tmp_path / "x.jsonl", row)
    # the </s> that a response spells out is two unknown words, and no end
    assert "sft row 1: 8 tokens, 5 learned\n<s> w1 w2⟦ w3 <unk> <unk> w4 </s>⟧\n" in shown(run, path, words, "sft")
    printed = shown(run, path, words, "reward")
    assert "reward row 1: prompt, 3 tokens\n<s> w1 w2\n" in printed
    assert "chosen, 5 tokens, margin 1.5\n⟦ w3 <unk> <unk> w4 </s>⟧\n" in printed
    assert "rejected, 2 tokens\n⟦ w5 </s>⟧\n" in printed
    assert "ppo row 1: 3 tokens, 0 learned\n<s> w1 w2\n" in shown(run, path, words, "ppo")


def test_every_row_that_was_read_is_in_the_account(
    run: Any, tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(
        Path("x.jsonl"),
        *({"prompt": f"w{i}", "chosen": "w1 w2", "rejected": "w3"} for i in range(10)),
        *({"prompt": f"w{i}", "chosen": "w1 w2", "rejected": "w1 w2"} for i in range(20, 23)),
        {"prompt": "w31", "chosen": " ".join(["w1"] * 20), "rejected": "w2"},
        {"prompt": "w32", "chosen": None, "rejected": "w2"},
    )
    printed = shown(run, path, words, "reward", "--max-length", "16", "--skip-bad-rows", "1")
    expected = {"train": 10, "equal sides": 3, "response too long": 1, "malformed": 1}
    table = printed.partition("what became of the rows")[2].partition("read in all")[0]
    table = table.partition("\n")[2]
    counts = {name.strip(): int(count) for name, count in re.findall(r"^(\D+?) +(\d+) +[\d.]+%", table, re.MULTILINE)}
    assert counts == expected
    assert numbers(printed, "read in all") == ["15"] == [str(sum(expected.values()))]
    assert numbers(printed, "x.jsonl")[:3] == ["15", "10", "100.0%"]
    assert "\nequal sides: x.jsonl:11, x.jsonl:12, x.jsonl:13\nresponse too long: x.jsonl:14\n" in printed


def test_lengths(run: Any, tmp_path: Path, words: str) -> None:
    """100 rows whose prompts have 1 to 100 words and <s>, and whose responses have one word and </s>."""
    rows = [{"prompt": " ".join(f"w{i}" for i in range(n)), "response": "w1"} for n in range(1, 101)]
    printed = shown(run, write(tmp_path / "x.jsonl", *rows), words, "sft")
    assert numbers(printed, "prompt") == ["6", "51", "96", "101"]
    assert numbers(printed, "whole") == ["8", "53", "98", "103"]


def test_each_data_path_has_its_share(run: Any, tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = write(Path("one.jsonl"), *({"prompt": f"w{i}", "response": "w1"} for i in range(30)))
    two = write(Path("two.jsonl"), *({"prompt": f"w{i}", "response": "w1 w1"} for i in range(30, 40)))
    code, printed, _ = run("--data-path", one, two, "--model", words, "--phases", "sft", "--data-split", "1,0,0", *OPEN)
    assert code == 0
    assert numbers(printed, one) == ["30", "30", "75.0%", "120", "70.6%"]  # of 30 * 4 + 10 * 5 tokens
    assert numbers(printed, two) == ["10", "10", "25.0%", "50", "29.4%"]


def test_a_phase_without_rows_is_reported_after_the_others(run: Any, tmp_path: Path, words: str) -> None:
    path = write(tmp_path / "x.jsonl", *({"prompt": f"w{i}", "response": "w1"} for i in range(100)))
    code, printed, message = run("--data-path", path, "--model", words, "--rows", "1")
    assert code == 2
    assert [line.partition(":")[0] for line in printed.splitlines() if "to train on," in line] == ["sft", "ppo"]
    assert message.startswith(f"error: {path}: 0 usable rows for training in reward") and message.count("\n") == 1


def test_too_few_rows_to_divide_are_shown_and_refused(run: Any, tmp_path: Path, words: str) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "w1", "chosen": "w2", "rejected": "w3"})
    code, printed, message = run("--data-path", path, "--model", words)
    assert code == 2
    for phase in ("sft", "reward", "ppo"):
        assert f"{phase}: 1 rows to train on, 0 held out" in printed and f"{phase} row 1: " in printed
        assert f"the tables above show what {phase} could use\n" in message
    assert message.count(f"error: {path}: 0 usable rows for ") == 3 == message.count("\n")


def test_it_starts_without_torch_and_agrees_with_the_stages() -> None:
    program = "import sys, data.preview.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
    ours, stages = command.PreviewConfig(), (SFTConfig(), RewardConfig(), Step3Config())
    for stage in stages:
        names = (set(type(ours).model_fields) & set(type(stage).model_fields)) - {"model", "objective"}
        assert {name: getattr(ours, name) for name in names} == {name: getattr(stage, name) for name in names}
    assert (ours.model, ours.objective) == (stages[0].model, stages[0].objective)  # of fine-tuning


# --- text on a terminal


def painted(letters: str, opened: PhaseData, rows: int = 1, **terminal: Any) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200, markup=False, highlight=False, emoji=False, **terminal)
    show.Screen(console, tokenizer_of(letters)).show(opened, Recipe(opened.train.phase), rows)
    return stream.getvalue()


def opened_letters(tmp_path: Path, letters: str, prompt: str, response: str) -> PhaseData:
    path = write(tmp_path / "x.jsonl", {"prompt": prompt, "response": response})
    options = DataOptions(data_path=(path,), data_split=(1, 0, 0), eval_fraction=0)
    return open_datasets(options, Recipe("sft"), tokenizer_of(letters))


def test_text_is_neither_markup_nor_a_command(tmp_path: Path, letters: str) -> None:
    opened = opened_letters(tmp_path, letters, "[red]a[/red] :smile: b", "\x1b[31mc\nd\u202e é日 \x07")
    expected = f"{EOS}[red]a[/red] :smile: b⟦\\x1b[31mc\nd\\u202e é日 \\x07{EOS}⟧"
    assert expected in painted(letters, opened)


def test_learned_is_in_colour_where_there_is_colour(tmp_path: Path, letters: str) -> None:
    message = painted(
        letters,
        opened_letters(tmp_path, letters, "before", "after"),
        force_terminal=True,
        color_system="truecolor",
    )
    assert f"\x1b[36m{EOS}before" in message and "\x1b[32mafter" in message and f"after{EOS}" in message


def test_stretches_join_to_the_whole_text(letters: str) -> None:
    tokenizer = tokenizer_of(letters)
    end = tokenizer.eos_token_id
    ids = [end, *tokenizer.encode("é日b"), *tokenizer.encode(" c日"), end]  # of 1 + 6 + 5 + 1 tokens
    parts = show.split_segments(tokenizer, ids, ((7, 13),))
    assert [(part.text, part.learned) for part in parts] == [(f"{EOS}é日b", False), (f" c日{EOS}", True)]


# --- numbers


@pytest.mark.parametrize(("loss_on", "spans"), [("last", ((8, 10),)), ("every", ((4, 5), (8, 10)))])
def test_the_prompt_ends_where_the_response_begins(tmp_path: Path, words: str, loss_on: Any, spans: Any) -> None:
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": f"w{i}"} for i, role in enumerate(roles)]
    template = tmp_path / "turns.jinja"
    template.write_text(TURNS)
    options = DataOptions(
        data_path=(write(tmp_path / "x.jsonl", {"messages": turns}),), data_split=(1, 0, 0), eval_fraction=0
    )
    tokenizer = prepare_tokenizer(load_tokenizer(words), str(template))
    train = open_datasets(options, Recipe("sft", loss_on), tokenizer).train
    item = train[0]
    assert isinstance(item, Demonstration)
    assert item.spans == spans  # of <s> w9 w0 w9 w1 w9 w2 w9, and then w3 </s>
    assert train.prompt_lengths.tolist() == [8]

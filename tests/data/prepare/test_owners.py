"""Rows that only some phases can use belong to those, and no prompt to two."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.dataset import PromptDataset, Recipe, open_datasets
from data.prepare.encode import Preference
from data.prepare.split import PHASES, group_digest
from data.read.records import Phase
from rlhf.errors import UserError
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.types import Message, Row
from tests.support import tiny

COUNT = 80


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return prepare_tokenizer(tiny.tokenizer(), "plain")


def rows(kind: str, numbers: range) -> list[dict[str, Any]]:
    """Of the n-th prompt 'wN': what `kind` names."""
    columns = {"text": (), "prompt": (), "demonstration": ("response",), "pair": ("chosen", "rejected")}[kind]
    if kind == "text":
        return [{"text": f"w{n} w{n}"} for n in numbers]
    return [{"prompt": f"w{n}"} | {column: f"w{n + 1 + i}" for i, column in enumerate(columns)} for n in numbers]


def write(name: str, *kinds: tuple[str, range]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for kind in kinds for row in rows(*kind)))
    return name


def first_words(data: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> set[str]:
    every = [item.chosen if isinstance(item, Preference) else item.ids for item in data]
    return {tokenizer.decode(ids, skip_special_tokens=True).split()[0] for ids in every}


def trained(tokenizer: PreTrainedTokenizerBase, phase: Phase, **options: Any) -> set[str]:
    """First words of what a phase trains on; empty if that is nothing."""
    data_options = DataOptions(data_cache="cache", eval_fraction=0.0, max_dropped=1.0, **options)
    try:
        return first_words(open_datasets(data_options, Recipe(phase), tokenizer).train, tokenizer)
    except UserError as nothing:
        assert "0 usable rows" in str(nothing)
        return set()


def owner(prompt: str, shares: tuple[float, float, float]) -> str:
    """The phase into whose part of [0, 1) the prompt's second number falls."""
    point = group_digest(Row((Message("user", prompt),)), 0)[1] / 2**64 * sum(shares)
    return PHASES[sum(point >= sum(shares[: i + 1]) for i in range(2))]


@pytest.mark.parametrize(
    ("kinds", "shares"),
    [
        (("text",), (1, 0, 0)),
        (("prompt",), (0, 0, 1)),
        (("demonstration",), (2, 0, 4)),
        (("pair",), (2, 4, 4)),
        (("prompt", "demonstration"), (2, 0, 4)),
        (("demonstration", "pair"), (2, 4, 4)),  # of one prompt a demonstration and a pair: all three can use it
    ],
)
def test_a_phase_that_cannot_use_a_prompt_leaves_its_share_to_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: PreTrainedTokenizerBase,
    kinds: tuple[str, ...],
    shares: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = tuple(write(f"{kind}.jsonl", (kind, range(4, 4 + COUNT))) for kind in kinds)
    for phase in PHASES:
        expected = {f"w{n}" for n in range(4, 4 + COUNT) if owner(f"w{n}", shares) == phase}
        if kinds == ("text",):
            expected = {f"w{n}" for n in range(4, 4 + COUNT)} if phase == "sft" else set()
        assert trained(tokenizer, phase, data_path=paths) == expected, phase


SOURCE = """
from rlhf.types import Message, Row
from rlhf.config import Config
class Sentences:  # demonstrations, pairs without a prompt, prompts: of one sentence one of each
    def rows(self, phase):
        for n in range(4, 84):
            prompt = () if phase == "reward" else (Message("user", f"w{n}"),)
            sides = {"sft": ("w5", None), "reward": (f"w{n}", "w3"), "ppo": (None, None)}[phase]
            yield Row(prompt, *sides, f"w{n}")
def build(config, path): return Sentences()
"""


@pytest.mark.parametrize("only", [False, True])
def test_rows_that_differ_from_phase_to_phase_decide_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase, only: bool
) -> None:
    """Beside demonstrations of the same prompts, shared or PPO's own."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    more = write("more.jsonl", ("demonstration", range(50, 90)))
    paths: dict[str, Any] = {"data_path": ("mine.py", *(() if only else (more,)))}
    if only:
        paths["ppo_only_data_path"] = (more,)
    result = {phase: trained(tokenizer, phase, **paths) for phase in PHASES}
    expected = {n: owner(f"w{n}", (2, 4, 4)) for n in range(4, 84)}
    expected |= {n: "ppo" if only else owner(f"w{n}", (2, 0, 4)) for n in range(84, 90)}
    assert result == {phase: {f"w{n}" for n, one in expected.items() if one == phase} for phase in PHASES}


def test_a_stream_is_divided_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write("stream.jsonl", ("demonstration", range(4, 84)))
    result = trained(tokenizer, "sft", data_path=(f"files,streaming=true:{path}",), max_train_rows=80)
    assert result == {f"w{n}" for n in range(4, 84) if owner(f"w{n}", (2, 4, 4)) == "sft"}


def test_an_entry_is_rebuilt_when_rows_of_other_phases_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE.replace('f"w{n}", "w3"', 'f"w{n}", open("side.txt").read() or None'))
    owned = []
    for side, shares in (("", (2, 0, 4)), ("w3", (2, 4, 4))):
        Path("side.txt").write_text(side)
        owned.append(trained(tokenizer, "sft", data_path=("mine.py",)))
        assert owned[-1] == {f"w{n}" for n in range(4, 84) if owner(f"w{n}", shares) == "sft"}
    assert owned[0] != owned[1]


@pytest.mark.parametrize(("phase", "all_split"), [("sft", "1,0,0"), ("reward", "0,1,0"), ("ppo", "0,0,1")])
def test_a_stage_alone_says_how_to_take_all_rows(
    phase: Phase, all_split: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows that only this stage can use are never divided."""
    monkeypatch.chdir(tmp_path)
    numbers, count = range(10, 50), 40
    left_out = sum(owner(f"w{n}", (2, 4, 4)) != phase for n in numbers)
    options = DataOptions(data_path=(write("x.jsonl", ("pair", numbers)),), data_cache="cache", eval_fraction=0.0)
    opened = open_datasets(options, Recipe(phase), tokenizer)
    (note,) = opened.notes_of_run
    assert not opened.notes
    assert note.startswith(
        f"{left_out} of the {count} rows that it can use are the other stages' share (--data-split 2,4,4)"
    )
    assert note.endswith(f"a run of this stage alone takes all with --data-split {all_split}")
    shares = tuple(map(float, all_split.split(",")))
    whole = open_datasets(options.model_copy(update={"data_split": shares}), Recipe(phase), tokenizer)
    assert len(whole.train) == count and not whole.notes_of_run
    if phase != "reward":
        own = {"sft": "text", "ppo": "prompt"}[phase]
        undivided = options.model_copy(update={"data_path": (write("own.jsonl", (own, numbers)),)})
        alone = open_datasets(undivided, Recipe(phase), tokenizer)
        assert len(alone.train) == count and not alone.notes_of_run


def test_a_prompt_that_is_held_out_for_another_phase_trains_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The evaluation data have it for reward models only; and a phase with its own data alone holds out nothing of
    them, but leaves out what the shared split holds out."""
    monkeypatch.chdir(tmp_path)
    path = write("train.jsonl", ("demonstration", range(4, 84)))
    Path("mine.py").write_text(SOURCE.replace("range(4, 84)", "range(4, 44) if phase == 'reward' else range(84, 90)"))
    result = trained(tokenizer, "sft", data_path=(path,), data_split=(1, 0, 0), eval_data_path=("mine.py",))
    assert result == {f"w{n}" for n in range(44, 84)}

    paths: dict[str, Any] = {"data_path": (), "sft_only_data_path": (path,)}
    options = DataOptions(data_cache="cache", eval_fraction=0.5, max_eval_rows=0, max_dropped=1.0, **paths)
    alone = open_datasets(options, Recipe("sft", own_data_only=True), tokenizer)
    held_out = {n for n in range(4, 84) if group_digest(Row((Message("user", f"w{n}"),)), 0)[0] / 2**64 < 0.5}
    assert first_words(alone.train, tokenizer) == {f"w{n}" for n in {*range(4, 84)} - held_out}
    [source] = alone.report["sources"]
    assert source["outcomes"] == {"train": 80 - len(held_out), "prompt held out for evaluation": len(held_out)}
    assert len(alone.evaluation) == 0 and 20 < len(held_out) < 60

"""How rows are divided, and what is dropped."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.dataset import Recipe, open_datasets
from data.prepare.encode import Demonstration, Item, Preference, Prompt
from data.prepare.gather import MAX_LOCATIONS
from data.prepare.report import locations
from data.prepare.split import PHASES
from rlhf.errors import UserError
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.types import Message, Row
from tests.support.texts import share_of

BOS, EOS, FIRST = 1, 2, 4
EVERYTHING: dict[str, Any] = {"eval_fraction": 0.0, "chat_template": "plain"}
CUT: dict[str, Any] = {"truncate": "tokens"}


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def ids(*numbers: int) -> tuple[int, ...]:
    return tuple(FIRST + number for number in numbers)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    file = tmp_path_factory.mktemp("model") / "words.yaml"
    file.write_text("tokenizer:\n  words: [" + ", ".join(f"w{i}" for i in range(600)) + "]\n")
    return load_tokenizer(str(file))


@pytest.fixture
def plain(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    return prepare_tokenizer(tokenizer, "plain")


def write(path: Path, rows: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (str(path),)


def one_item(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, phase: Any, row: dict[str, Any], **more: Any) -> Item:
    shares = tuple(float(name == phase) for name in PHASES)
    options = DataOptions(data_path=write(tmp_path / "x.jsonl", [row]), data_split=shares, **EVERYTHING, **more)
    opened = open_datasets(options, Recipe(phase), tokenizer)
    assert (len(opened.train), len(opened.evaluation)) == (1, 0)
    return opened.train[0]


# --- the split


def many_rows() -> list[Row]:
    return [Row((Message("user", words(i // 3, i // 7)),), words(i), words(i + 1)) for i in range(500)]


def test_no_group_is_in_two_shares_and_shares_match_the_options() -> None:
    options = DataOptions(eval_fraction=0.2, data_split=(1, 1, 2))
    rows = [Row((Message("user", f"question {i}"),)) for i in range(8000)]
    counts = dict.fromkeys((*PHASES, "evaluation"), 0)
    for row in rows:
        counts[share_of(row, options)] += 1
    # 8000 * (.2, .2, .2, .4); four standard deviations of a binomial are about 175 rows.
    for share, expected in (("sft", 1600), ("reward", 1600), ("ppo", 3200), ("evaluation", 1600)):
        assert abs(counts[share] - expected) < 175


def test_evaluation_does_not_depend_on_how_the_phases_share_the_rest() -> None:
    rows = [Row((Message("user", str(i)),)) for i in range(300)]
    held_out = [
        {i for i, row in enumerate(rows) if share_of(row, DataOptions(data_split=split)) == "evaluation"}
        for split in [(2, 4, 4), (1, 0, 0), (0.0, 0.5, 0.1)]
    ]
    assert held_out[0] == held_out[1] == held_out[2] != set()


def test_another_seed_makes_another_split() -> None:
    rows = many_rows()
    shares = [[share_of(row, DataOptions(data_seed=seed)) for row in rows] for seed in (0, 0, 1)]
    assert shares[0] == shares[1] != shares[2]


@pytest.mark.parametrize("limit", [None, 20])
@pytest.mark.parametrize("phase", PHASES)
def test_the_order_of_the_file_changes_nothing(
    tmp_path: Path, plain: PreTrainedTokenizerBase, phase: Any, limit: int | None
) -> None:
    rows = [{"prompt": r.prompt[0].content, "chosen": r.response, "rejected": r.rejected} for r in many_rows()]
    result = []
    for order in range(2):
        random.Random(order).shuffle(rows)
        options = DataOptions(
            data_path=write(tmp_path / f"{order}.jsonl", rows), max_train_rows=limit, max_eval_rows=10
        )
        opened = open_datasets(options, Recipe(phase), plain)
        result.append((opened.train[:], opened.evaluation[:]))
    assert result[0] == result[1]
    assert len(result[0][1]) == 10
    assert limit is None or len(result[0][0]) == limit


def test_the_phases_and_evaluation_share_no_prompt(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": r.prompt[0].content, "chosen": r.response, "rejected": r.rejected} for r in many_rows()]
    options = DataOptions(data_path=write(tmp_path / "x.jsonl", rows), eval_fraction=0.3, max_eval_rows=30)

    def prompts(items: Iterable[Item]) -> set[tuple[int, ...]]:
        return {prompt(item) for item in items}

    def prompt(item: Item) -> tuple[int, ...]:
        if isinstance(item, Preference):
            return item.chosen[: item.prompt_length]
        return item.ids if isinstance(item, Prompt) else item.ids[: item.spans[0][0]]

    opened = {phase: open_datasets(options, Recipe(phase), plain) for phase in PHASES}
    train = {phase: prompts(opened[phase].train) for phase in PHASES}
    held_out = [prompts(opened[phase].evaluation) for phase in PHASES]
    assert held_out[0] == held_out[1] == held_out[2]
    assert len(held_out[0]) == 30  # the first rows are of as many prompts as can be
    for phase in PHASES:
        other_prompts = set.union(*(train[other] for other in PHASES if other != phase), held_out[0])
        assert not train[phase] & other_prompts


# --- items


@pytest.mark.parametrize("phase", PHASES)
def test_a_held_out_prompt_stays_held_out_once_old_turns_are_cut(
    phase: Any, tmp_path: Path, plain: PreTrainedTokenizerBase
) -> None:
    """Of 60 dialogues the model sees the last turn alone, one of twelve. The others are short and not cut, and five of
    them are such a last turn."""
    rows = []
    for i in range(80):
        long = [("user", words(*range(20 + i, 40 + i))), ("assistant", words(1)), ("user", words(500 + i % 12))]
        turns = long if i < 60 else [("user", words(500 + i % 12 if i < 65 else 100 + i))]
        prompt = [{"role": role, "content": content} for role, content in turns]
        rows.append({"prompt": prompt, "chosen": words(i, 3), "rejected": words(i, 4)})
    shares = tuple(float(name == phase) for name in PHASES)
    options = DataOptions(
        data_path=write(tmp_path / "x.jsonl", rows), data_split=shares, chat_template="plain", max_prompt_length=12,
        eval_fraction=0.08,
    )  # fmt: skip
    opened = open_datasets(options, Recipe(phase), plain)
    held_out, train = ([prompt_digest(item) for item in side] for side in (opened.evaluation, opened.train))
    assert held_out and train and not {*held_out} & {*train}
    parsed = [Row(tuple(Message(**turn) for turn in row["prompt"])) for row in rows]
    evaluated = [share_of(row, options) == "evaluation" for row in parsed]
    last = [row.prompt[-1].content for row in parsed]
    also = sum(text in {t for t, out in zip(last, evaluated, strict=True) if out} for text in last) - sum(evaluated)
    assert 0 < also == opened.report["sources"][0]["outcomes"]["prompt held out for evaluation, once old turns are cut"]
    assert len(train) == 80 - sum(evaluated) - also
    for limit in (1, len(train) // 2, len(train)):  # held-out rows do not count
        limited = open_datasets(options.model_copy(update={"max_train_rows": limit}), Recipe(phase), plain)
        assert [prompt_digest(item) for item in limited.train] == train[:limit]
    held_out_texts = {text for text, out in zip(last, evaluated, strict=True) if out}
    alike = sum(train.count(prompt) > 1 for prompt in train) - sum(text not in held_out_texts for text in last[60:65])
    [note] = [note for note in opened.notes if "same prompt as another dialogue" in note]
    assert note.startswith(f"{alike} of {len(train)} training rows have the same prompt") and alike > 1
    whole = options.model_copy(update={"max_prompt_length": 64})
    opened = open_datasets(whole, Recipe(phase), plain)
    assert len(opened.train) == 80 - sum(evaluated) and not any("dialogue" in note for note in opened.notes)


def prompt_digest(item: Item) -> tuple[int, ...]:
    if isinstance(item, Preference):
        return item.chosen[: item.prompt_length]
    return item.ids[: item.spans[0][0]] if isinstance(item, Demonstration) else item.ids


def test_items_by_hand(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    row = {"prompt": words(0, 1), "chosen": words(2), "rejected": words(3, 4), "margin": 2}
    assert one_item(tmp_path, plain, "sft", row) == Demonstration((BOS, *ids(0, 1, 2), EOS), ((3, 5),))
    expected = Preference((BOS, *ids(0, 1, 2), EOS), (BOS, *ids(0, 1, 3, 4), EOS), 3, 2.0)
    assert one_item(tmp_path, plain, "reward", row) == expected
    item = one_item(tmp_path, plain, "ppo", row)
    assert isinstance(item, Prompt)
    assert item.ids == (BOS, *ids(0, 1))
    assert item.row.prompt == (Message("user", words(0, 1)),)


@pytest.mark.parametrize("phase", PHASES)
def test_a_dialogue_that_the_template_refuses_is_dropped_and_counted(
    phase: Any, tmp_path: Path, plain: PreTrainedTokenizerBase
) -> None:
    """One of many: as of templates that allow no system message."""
    plain.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }} {% endfor %}"
    )
    rows = [{"prompt": words(i), "chosen": words(1), "rejected": words(2)} for i in range(3, 9)]
    path = write(tmp_path / "x.jsonl", [*rows, {**rows[0], "prompt": words(9), "system": words(4)}])
    shares = tuple(float(name == phase) for name in PHASES)
    train = open_datasets(DataOptions(data_path=path, data_split=shares, **EVERYTHING), Recipe(phase), plain).train
    assert (len(train), train.dropped) == (6, {"the chat template refuses it (no system)": 1})


def test_what_is_dropped_is_counted_and_has_a_location(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    rows = [
        {"prompt": words(0), "chosen": words(1), "rejected": words(2)},
        {"prompt": words(3), "chosen": words(4), "rejected": words(4)},
        {"prompt": words(5), "chosen": words(*range(40), 41), "rejected": words(*range(40), 42)},
        {"prompt": " ", "chosen": words(1), "rejected": words(5)},
        {"prompt": words(8), "chosen": "  ", "rejected": words(1)},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    lines = {
        "sft": {"empty response": 5},
        "reward": {"equal sides": 2, "equal sides after truncation": 3},
        "ppo": {"empty prompt": 4},
    }
    for i, phase in enumerate(PHASES):
        options = DataOptions(
            data_path=path,
            data_split=tuple(float(i == j) for j in range(3)),
            max_length=16,
            max_prompt_length=8,
            **EVERYTHING,
            **CUT,
        )
        opened, dropped = open_datasets(options, Recipe(phase), plain), lines[phase]
        assert (len(opened.train), opened.train.dropped) == (5 - len(dropped), dict.fromkeys(dropped, 1))
        assert locations(opened.report) == {reason: [f"{path[0]}:{line}"] for reason, line in dropped.items()}
        assert opened.train.phase == phase


def test_the_first_locations_of_each_path_are_kept_in_order(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    same = {"prompt": words(1), "chosen": words(2), "rejected": words(2)}
    ranked = [{"prompt": words(3), "responses": [words(4), words(5)], "scores": [1, score]} for score in (1, 0)]
    paths = [
        write(tmp_path / name, rows)[0]
        for name, rows in (("x.jsonl", [same] * (MAX_LOCATIONS + 9)), ("y.jsonl", ranked))
    ]
    options = DataOptions(data_path=paths, data_split=(0, 1, 0), max_dropped=1, **EVERYTHING)
    report = open_datasets(options, Recipe("reward"), plain).report
    first, second = (source["locations"] for source in report["sources"])
    assert first == {"equal sides": [f"{paths[0]}:{line}" for line in range(1, MAX_LOCATIONS + 1)]}
    assert second == {"tie": [f"{paths[1]}:1"]}
    with pytest.raises(UserError, match=rf"99% .*\(109 equal sides, first in {paths[0]}:1\)"):
        open_datasets(options.model_copy(update={"max_dropped": 0.5}), Recipe("reward"), plain)


def test_every_path_has_locations_of_rows_that_are_too_long(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    long, short = ({"prompt": words(*range(n)), "response": words(1)} for n in (40, 2))
    files = ("x.jsonl", [short, *[long] * (MAX_LOCATIONS + 9)]), ("y.jsonl", [long, short])
    paths = [write(tmp_path / name, rows)[0] for name, rows in files]
    options = DataOptions(data_path=paths, data_split=(1, 0, 0), max_dropped=1, max_prompt_length=8, **EVERYTHING)
    sources = open_datasets(options, Recipe("sft"), plain).report["sources"]
    first, second = (list(source["locations"].values()) for source in sources)
    assert first == [[f"{paths[0]}:{line}" for line in range(2, MAX_LOCATIONS + 2)]]
    assert second == [[f"{paths[1]}:1"]]


# --- refusals


@pytest.mark.parametrize(
    ("rows", "phase", "more", "message"),
    [
        ([{"text": "w1"}], "sft", {"data_split": (0, 1, 1)}, r"of 1 rows: 1 of another phase's share; .*0,1,1"),
        ([{"prompt": "w1"}] * 3, "sft", {"data_split": (1, 0, 0)}, "of 3 rows: 3 no response"),
        ([{"prompt": "w1"}], "reward", {"data_split": (0, 1, 0)}, "1 no rejected side"),
        ([{"prompt": "w1"}], "ppo", {"eval_fraction": 1e-9}, r"for evaluation in ppo.*--eval-fraction \(1e-09\)"),
    ],
)
def test_nothing_usable(
    tmp_path: Path, plain: PreTrainedTokenizerBase, rows: list[Any], phase: Any, more: dict[str, Any], message: str
) -> None:
    split = {"data_split": (0, 0, 1)} if "data_split" not in more else {}
    options = DataOptions(data_path=write(tmp_path / "x.jsonl", rows), **{**EVERYTHING, **split, **more})
    with pytest.raises(UserError, match=message):
        open_datasets(options, Recipe(phase), plain)


@pytest.mark.parametrize("option", ["data_path", "sft_only_data_path", "eval_data_path"])
def test_a_file_without_rows(tmp_path: Path, plain: PreTrainedTokenizerBase, option: str) -> None:
    [full] = write(tmp_path / "full.jsonl", [{"prompt": f"w{n}", "response": "w1"} for n in range(30)])
    [empty] = write(tmp_path / "empty.jsonl", [])
    paths = {"data_path": (full,)} | {option: (full, empty) if option == "data_path" else (empty,)}
    with pytest.raises(UserError, match=rf"^{empty}: has no rows; .*leave it out$"):
        open_datasets(DataOptions(**{**EVERYTHING, **paths}), Recipe("sft"), plain)


@pytest.mark.parametrize("split", [(0, 0, 0), (1, -1, 1), (1, float("inf"), 1), (1, float("nan"), 1)])
def test_impossible_shares(split: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"three shares|a finite number"):
        DataOptions(data_split=split)


# --- dialogues that begin alike


def dialogue(*turns: str) -> dict[str, Any]:
    """The template writes nothing between two contents, so each ends in a space."""
    return {"messages": [dict(zip(("role", "content"), f"{turn} ".split(": "), strict=True)) for turn in turns]}


def opened_lengths(tmp_path: Path, plain: PreTrainedTokenizerBase, rows: Iterable[dict[str, Any]]) -> tuple[int, int]:
    path = write(tmp_path / "x.jsonl", rows)
    opened = open_datasets(DataOptions(data_path=path, data_split=(1, 0, 0), eval_fraction=0.2), Recipe("sft"), plain)
    return len(opened.train), len(opened.evaluation)


def test_one_opening_of_all_rows_is_named_and_its_cure_works(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    rows = [dialogue("user: w1 w2", "assistant: w3", f"user: w{i}", f"assistant: w{i + 1}") for i in range(4, 64)]
    with pytest.raises(UserError, match=r"begin with the user message 'w1 w2 '.*system message.*split_group"):
        opened_lengths(tmp_path, plain, rows)
    numbered = [row | {"split_group": i} for i, row in enumerate(rows)]
    as_system = [{"messages": [{"role": "system", "content": "w1 w2"}, *row["messages"][2:]]} for row in rows]
    for cured in (numbered, as_system):
        train, held_out = opened_lengths(tmp_path, plain, cured)
        assert train + held_out == 60 and 4 <= held_out <= 24  # 12 expected, standard deviation 3


@pytest.mark.parametrize("phase", ["sft", "reward"])
def test_a_row_keeps_its_weight(phase: Any, tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    """Through the cache, for training and held out: each item, and the array of all."""
    rows = [{"prompt": words(n), "chosen": words(1), "rejected": words(2), "weight": n / 4} for n in range(1, 60)]
    shares = tuple(float(name == phase) for name in PHASES)
    options = DataOptions(
        data_path=write(tmp_path / "x.jsonl", rows), data_split=shares, chat_template="plain", eval_fraction=0.3
    )
    opened = open_datasets(options, Recipe(phase), plain)
    for data in (opened.train, opened.evaluation):
        prompts = [(item.chosen if isinstance(item, Preference) else item.ids)[1] - FIRST for item in data]
        assert [item.weight for item in data] == data.weights.tolist() == [n / 4 for n in prompts]
    assert len(opened.train) > 20 and len(opened.evaluation) > 5

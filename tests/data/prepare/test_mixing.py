"""Where every row goes: weights, places for one phase or for evaluation, repeated prompts, malformed rows."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.dataset import PhaseData, Recipe, fingerprints, open_datasets
from data.prepare.encode import Prompt
from data.prepare.split import PHASES
from rlhf.errors import UserError
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

ALL: dict[str, Any] = {"eval_fraction": 0.0, "data_split": (1, 0, 0), "max_dropped": 1.0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    file = tmp_path_factory.mktemp("model") / "words.yaml"
    file.write_text("tokenizer:\n  words: [" + ", ".join(f"w{i}" for i in range(2000)) + "]\n")
    return prepare_tokenizer(load_tokenizer(str(file)), "plain")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, numbers: range, **more: Any) -> None:
    """Rows whose prompt is `wN`; the response says which file they are of."""
    rows = [{"prompt": f"w{i}", "response": f"w{name and len(name)} w{i}", **more} for i in numbers]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(tokenizer: PreTrainedTokenizerBase, phase: Any = "sft", **options: Any) -> PhaseData:
    return open_datasets(DataOptions(**options), Recipe(phase), tokenizer)


def prompts(items: Any, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(tokenizer.decode(item.ids[1])) for item in items]


def accounted(data: PhaseData) -> Counter[str]:
    """The outcomes of all rows; checks that every row has one."""
    total: Counter[str] = Counter()
    for source in data.report["sources"]:
        assert sum(source["outcomes"].values()) == source["rows"], source
        total.update(source["outcomes"])
    assert total["evaluation"] == len(set(data.evaluation.positions.tolist()))
    assert total["train"] == len(set(data.train.positions.tolist()))
    return total


def test_weights_with_a_budget_repeat_what_is_too_small(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write("a.jsonl", range(100))
    write("b.jsonl", range(1000, 1006))
    data = opened(tokenizer, data_path=("a.jsonl=0.7", "b.jsonl=0.3"), max_train_rows=40, **ALL)
    result = Counter(int(prompt[1:]) for prompt in prompts(data.train, tokenizer))
    assert sum(count for number, count in result.items() if number < 1000) == 28
    assert {result[number] for number in range(1000, 1006)} == {2}
    assert data.report["train"]["rows_by_source"] == [28, 12]
    assert accounted(data) == {"train": 34, "beyond its weight": 72}


def test_a_weight_is_a_share_of_what_can_be_used(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Nine rows in ten of one path are too long."""
    rows = [{"prompt": "w1 " * (70 if i % 10 else 1) + f"w{i}", "response": "w2"} for i in range(1000, 1500)]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write("a.jsonl", range(500))
    weighted_paths = ("long.jsonl=1", "a.jsonl=1")
    data = opened(tokenizer, data_path=weighted_paths, max_length=64, max_train_rows=40, **ALL)
    assert data.report["train"]["rows_by_source"] == [20, 20]
    assert data.report["train"]["different_rows"] == accounted(data)["train"] == 40
    data = opened(tokenizer, data_path=("long.jsonl",), max_length=64, max_train_rows=30, **ALL)
    assert len(data.train) == accounted(data)["train"] == 30
    every = opened(tokenizer, data_path=("long.jsonl",), max_length=64, **ALL)
    assert data.train[:] == every.train[:30] and len(every.train) == 50
    data = opened(tokenizer, data_path=weighted_paths, max_length=64, **ALL)
    assert data.report["train"]["rows_by_source"] == [50, 50]
    assert accounted(data)["prompt too long"] == 450
    with pytest.raises(UserError, match="450 prompt too long"):
        opened(tokenizer, data_path=weighted_paths, max_length=64, **{**ALL, "max_dropped": 0.5})


def test_without_weights_every_row_is_taken(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write("a.jsonl", range(90))
    write("b.jsonl", range(1000, 1020))
    data = opened(tokenizer, data_path=("a.jsonl", "b.jsonl"), **ALL)
    assert data.report["train"]["rows_by_source"] == [90, 20]
    tokens = [90 * 5, 20 * 5]  # BOS, prompt, two words, EOS
    assert data.report["train"]["tokens_by_source"] == tokens
    assert accounted(data) == {"train": 110}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_path": ("a.jsonl=0.5", "b.jsonl")}, "b.jsonl: got no weight beside weighted paths"),
        ({"data_path": ()}, "sft: no data; name some with --data-path or --sft-only-data-path"),
        (
            {"data_path": ("a.jsonl=1", "b.jsonl=1"), "eval_data_path": ("b.jsonl",)},
            "b.jsonl=1: 0 usable rows, expected some for its weight of 1",
        ),
    ],
)
def test_mistaken_mixtures(
    home: Path, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], message: str
) -> None:
    write("a.jsonl", range(10))
    write("b.jsonl", range(10, 20))
    with pytest.raises(UserError, match=message):
        opened(tokenizer, **options, **ALL)


def test_places_for_one_phase_do_not_break_the_split(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Half of the prompts of the fine-tuning path are in the shared data, too."""
    write("shared.jsonl", range(300))
    write("only.jsonl", range(150, 450))
    options: dict[str, Any] = {
        "data_path": ("shared.jsonl",),
        "sft_only_data_path": ("only.jsonl",),
        "data_split": (1, 0, 2),
        "max_eval_rows": 999,
    }
    sft, ppo = opened(tokenizer, "sft", **options), opened(tokenizer, "ppo", **options)
    trained = {"sft": prompts(sft.train, tokenizer), "ppo": prompts(ppo.train, tokenizer)}
    held_out = set(prompts(sft.evaluation, tokenizer)) | set(prompts(ppo.evaluation, tokenizer))
    assert not set(trained["sft"]) & set(trained["ppo"])
    assert not (set(trained["sft"]) | set(trained["ppo"])) & held_out
    assert set(trained["sft"]) | set(trained["ppo"]) | held_out == {f"w{i}" for i in range(450)}
    assert accounted(sft)["prompt of another phase's share"] > 50
    assert len(ppo.report["sources"]) == 1
    accounted(ppo)


def test_no_prompt_of_an_evaluation_path_is_trained_on(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write("train.jsonl", range(100))
    write("test.jsonl", range(90, 120))
    options: dict[str, Any] = {"data_path": ("train.jsonl",), "eval_data_path": ("test.jsonl",)}
    result = {phase: opened(tokenizer, phase, **options) for phase in ("sft", "ppo")}
    for data in result.values():
        assert sorted(prompts(data.evaluation, tokenizer)) == sorted(f"w{i}" for i in range(90, 120))
    trained = [prompts(data.train, tokenizer) for data in result.values()]
    assert not set(chain := trained[0] + trained[1]) & {f"w{i}" for i in range(90, 120)}
    assert len(chain) == len(set(chain))
    outcomes = accounted(result["sft"])
    assert outcomes["prompt held out for evaluation"] + accounted(result["ppo"])["prompt held out for evaluation"] <= 10
    assert outcomes["prompt held out for evaluation"] > 0


def test_an_evaluation_path_holds_for_every_phase(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The demonstrations to evaluate fine-tuning on are no pairs; still no phase trains on their prompts."""
    rows = [{"prompt": f"w{i}", "chosen": "w1 w2", "rejected": "w3"} for i in range(100)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    write("demos.jsonl", range(50, 90))
    paths: dict[str, Any] = {"data_path": ("train.jsonl",), "eval_data_path": ("pairs.jsonl", "demos.jsonl")}
    for phase, split in (("sft", (1, 0, 0)), ("reward", (0, 1, 0)), ("ppo", (0, 0, 1))):
        data = opened(tokenizer, phase, data_split=split, **paths)
        assert len(data.train) == 50, phase
        assert accounted(data)["prompt held out for evaluation"] == 50


def test_no_prompt_is_in_the_own_paths_of_two_phases(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": f"w{i}", "chosen": "w1 w2", "rejected": "w3"} for i in range(200)]
    Path("x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("y.jsonl").write_text("".join(json.dumps({**row, "prompt": row["prompt"] + " w7"}) + "\n" for row in rows))
    paths: dict[str, Any] = {
        "data_path": (), "sft_only_data_path": ("x.jsonl",), "reward_only_data_path": ("x.jsonl", "y.jsonl"),
    }  # fmt: skip
    sft, reward = (opened(tokenizer, phase, **paths) for phase in ("sft", "reward"))
    assert accounted(sft)["train"] > 150
    assert accounted(reward)["prompt of another phase's share"] == accounted(sft)["train"]
    assert reward.report["train"]["rows_by_source"][0] == 0
    assert reward.report["train"]["rows_by_source"][1] > 150


def test_rows_of_an_earlier_phase_that_change_make_another_set(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Those of its own path, whose prompts the own path of a later phase leaves out."""
    write("shared.jsonl", range(300, 340))
    write("sft.jsonl", range(200, 250))
    rows = [{"prompt": f"w{i}", "chosen": "w1 w2", "rejected": "w3"} for i in range(100)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths: dict[str, Any] = {
        "data_path": ("shared.jsonl",), "sft_only_data_path": ("sft.jsonl",), "reward_only_data_path": ("pairs.jsonl",),
    }  # fmt: skip
    before = opened(tokenizer, "reward", **paths)
    contents = [fingerprints(DataOptions(**paths), "reward")]
    write("sft.jsonl", range(50))
    after = opened(tokenizer, "reward", **paths)
    contents.append(fingerprints(DataOptions(**paths), "reward"))
    assert len(before.train) > len(after.train) > 0
    assert accounted(after)["prompt of another phase's share"] > 30
    assert {name for name, digest in contents[0].items() if contents[1][name] != digest} == {"sft.jsonl (of sft)"}
    for data, digests in zip((before, after), contents, strict=True):
        own = {source["data_path"]: source["fingerprint"] for source in data.report["sources"]}
        assert own | data.report["read_too"] == digests


def test_ppo_gets_no_prompt_twice(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": f"w{i % 10}", "chosen": f"w{i}", "rejected": "w5", "answer": i % 10} for i in range(100)]
    for i, order in enumerate((rows, rows[::-1])):
        Path(f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in order))
    result = [
        opened(tokenizer, "ppo", data_path=(f"{i}.jsonl",), eval_fraction=0.0, data_split=(0, 0, 1)) for i in range(2)
    ]
    assert result[0].train[:] == result[1].train[:]
    assert accounted(result[0]) == {"train": 10, "repeated prompt": 90}
    for item in result[0].train:
        assert isinstance(item, Prompt)
        assert item.row.columns["answer"] == int(item.row.prompt[0].content[1:])
    pairs = opened(tokenizer, "reward", data_path=("0.jsonl",), eval_fraction=0.0, data_split=(0, 1, 0))
    assert accounted(pairs) == {"train": 99, "equal sides": 1}


def test_limits_are_counted(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write("a.jsonl", range(500))
    for phase in PHASES:
        if phase == "reward":
            continue
        data = opened(tokenizer, phase, data_path=("a.jsonl",), max_train_rows=7, max_eval_rows=5)
        outcomes = accounted(data)
        assert (len(data.train), len(data.evaluation), outcomes["train"], outcomes["evaluation"]) == (7, 5, 7, 5)
        assert outcomes["beyond max_train_rows"] > 10
        assert outcomes["beyond max_eval_rows"] > 10


def test_too_much_dropped_is_an_error(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write("a.jsonl", range(40))
    Path("long.jsonl").write_text(
        "".join(json.dumps({"prompt": "w1 " * 70, "response": f"w{i}"}) + "\n" for i in range(60))
    )
    options: dict[str, Any] = {**ALL, "data_path": ("a.jsonl", "long.jsonl"), "max_length": 64}
    with pytest.raises(
        UserError, match=r"60% of .* of sft cannot be used \(60 prompt too long, first in long\.jsonl:1\)"
    ):
        opened(tokenizer, **{**options, "max_dropped": 0.5})
    with pytest.raises(UserError, match=r"cut such rows with --truncate tokens$"):
        opened(tokenizer, **{**options, "max_dropped": 0.5})
    assert accounted(opened(tokenizer, **options)) == {"train": 40, "prompt too long": 60}
    assert len(opened(tokenizer, **options, truncate="tokens").train) == 100


# --- malformed rows


def malformed(every: int, rows: int = 1000) -> None:
    lines = [
        f'{{"prompt": "w{i}", "response": "w{i}"}}' if i % every else f'{{"prompt": "w{i}"' for i in range(1, rows + 1)
    ]
    Path("x.jsonl").write_text("\n".join(lines))


def test_many_malformed_rows_are_listed_with_their_number(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    malformed(every=40)
    with pytest.raises(UserError) as error:
        opened(tokenizer, data_path=("x.jsonl",), skip_bad_rows=24, **ALL)
    first, *listed = str(error.value).split("\n")
    assert first == "x.jsonl: 25 malformed rows of 1000; --skip-bad-rows 25 continues without them; the first 10:"
    assert len(listed) == 10
    for i, line in enumerate(listed, 1):
        assert line.startswith(f"  x.jsonl:{40 * i}: not valid JSON")


def test_another_kind_of_data_is_refused_early(home: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    Path("x.jsonl").write_text('{"picture": "w1"}\n' * 50_000)
    with pytest.raises(
        UserError, match=r"^x.jsonl:1: got the columns picture; .*none of the first 1000 rows can be read$"
    ):
        opened(tokenizer, data_path=("x.jsonl",), **ALL)


# --- sources without an end


class Endless:
    streaming = True
    read = 0

    def rows(self, phase: str) -> Iterator[Any]:
        from rlhf.types import Message, Row

        while True:
            Endless.read += 1
            yield Row((Message("user", f"w{Endless.read % 2000} w{Endless.read // 2000}"),), "w1")

    def fingerprint(self, phase: str) -> str:
        return "endless"


def test_a_stream_is_read_as_far_as_needed(
    home: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.plugins.build", lambda *_: Endless())
    options: dict[str, Any] = {
        "data_path": ("demo",),
        "data_split": (1, 0, 1),
        "max_train_rows": 50,
        "max_eval_rows": 10,
    }
    for phase in ("sft", "ppo"):
        Endless.read = 0
        data = opened(tokenizer, phase, **options)
        assert (len(data.train), len(data.evaluation)) == (50, 10)
        assert Endless.read < 400
        accounted(data)
    with pytest.raises(
        UserError, match="demo: streaming reads the first rows only; give their number: --max-train-rows N"
    ):
        opened(tokenizer, **{**options, "max_train_rows": None})

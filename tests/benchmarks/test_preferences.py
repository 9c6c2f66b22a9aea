"""benchmarks/preferences.py: the division of the data, the arithmetic of the table, and one run of a tiny model."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import preferences
from benchmarks.preferences import HERE, TRL, VARIANTS, Options, Run
from rlhf.errors import UserError
from rlhf.maths import intervals


def dialogue(first: str, response: str) -> str:
    return f"\n\nHuman: {first}\n\nAssistant: Yes.\n\nHuman: And then?\n\nAssistant: {response}"


def write_pairs(path: Path, firsts: list[str]) -> None:
    rows = [{"chosen": dialogue(first, "kind and calm ."), "rejected": dialogue(first, "rude .")} for first in firsts]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_first_message_is_on_one_side(tmp_path: Path) -> None:
    firsts = [f"question {i % 200}" for i in range(400)]
    paths = tuple(str(tmp_path / f"{name}.jsonl.gz") for name in ("harmless", "helpful"))
    for path in paths:
        write_pairs(Path(path), firsts)
    options = Options(data_path=paths, output_dir=str(tmp_path / "out"))
    held_out = preferences.divide(options)
    assert list(held_out) == ["harmless", "helpful"]

    def first_messages(path: Path) -> list[str]:
        rows = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(row)["chosen"].split("\n\nAssistant:")[0] for row in rows]

    train, test = first_messages(preferences.train_file(options)), first_messages(held_out["helpful"])
    assert not set(train) & set(test) and len(train) + 2 * len(test) == 800
    assert 0.1 < len(test) / 400 < 0.3  # 0.2 of 200 messages, 3.5 standard deviations either way


def scored(gaps: list[float], lengths: list[float]) -> dict[str, list[list[float]]]:
    return {"scores": [[gap, 0.0] for gap in gaps], "lengths": [[length, 0.0] for length in lengths]}


def test_table() -> None:
    # Of four pairs, seed 0 orders 2 and 3 of 4, seed 1 orders 4 and 3.5; TRL 3 and 3 of seed 0, nothing of seed 1.
    models = {
        (HERE, 256): {
            0: {"a": scored([1, 1, -1, -1], [1, -1, 0, 0]), "b": scored([1, 1, 1, -8], [1, 1, 1, 1])},
            1: {"a": scored([1, 1, 1, 1], [1, -1, 0, 0]), "b": scored([1, 1, 1, 0], [1, 1, 1, 1])},
        },
        (TRL, 256): {0: {"a": scored([1, 1, 1, -1], [1, -1, 0, 0]), "b": scored([1, 1, 1, -1], [1, 1, 1, 1])}},
    }
    head, _, longer, here, trl = preferences.table(models)
    assert head.startswith("| reward model | pairs | seeds | a (4) | b (4) | all (8) |")
    assert longer == "| the longer response |  |  | 0.500 | 1.000 | 0.750 |  |  |"
    t = intervals.student_t(1)  # and half the range of two numbers is s / sqrt(2)
    columns = [f"{mean:.3f} ± {t * half:.3f}" for mean, half in ((0.75, 0.25), (0.8125, 0.0625), (0.78125, 0.15625))]
    assert here.startswith(f"| here | 256 | 2 | {' | '.join(columns)} |  | ")
    assert trl == "| TRL | 256 | 1 | 0.750 | 0.750 | 0.750 | +0.125 | 0.750 |"


def test_joined_models_count_alike() -> None:
    right, wrong = scored([100.0, 100, 100, -50], [1] * 4), scored([-0.1, -0.1, -0.1, 0.3], [1] * 4)
    assert preferences.accuracy({"a": right}, "all") == 0.75 and preferences.accuracy({"a": wrong}, "all") == 0.25
    # divided by their deviations, 75 and 0.2, the gaps are 1.33 and -0.67, and -0.5 and 1.5
    assert preferences.joint_accuracy([{"a": right}, {"a": wrong}]) == 1.0
    assert preferences.joint_accuracy([{"a": right}, *[{"a": wrong}] * 3]) == 0.25


def test_grid_and_file_names(tmp_path: Path) -> None:
    options = Options(
        data_path=("a.jsonl",), pairs=(256, 512), variants=(HERE, "head"), trl_pairs=(256,), seeds=2,
        output_dir=str(tmp_path),
    )  # fmt: skip
    runs = list(preferences.grid(options))
    expected = [(HERE, 256), (HERE, 512), ("head", 512), (TRL, 256)]
    assert [(run.variant, run.pairs, run.seed) for run in runs] == [
        (*kind, seed) for seed in (0, 1) for kind in expected
    ]
    assert len({run.scores_file(options) for run in runs}) == len(runs)
    other = options.model_copy(update={"model": "gpt2"})
    assert runs[0].scores_file(other) != runs[0].scores_file(options)
    more_seeds = options.model_copy(update={"seeds": 5, "processes": 1, "pairs": (256,)})
    assert runs[0].scores_file(more_seeds) == runs[0].scores_file(options), "a finished model is not trained again"
    both = options.model_copy(update={"data_path": ("x/a.jsonl.gz", "b.jsonl")})
    assert (options.report_name, both.report_name) == ("preferences-a", "preferences"), "one does not replace the other"


@pytest.mark.parametrize("variant", [*VARIANTS, TRL])
def test_every_variant_is_one_of_step_2(variant: str, tmp_path: Path) -> None:
    options = Options(data_path=("a.jsonl",), output_dir=str(tmp_path))
    config = preferences.reward_config(options, Run(variant, 256, 3), {"a": tmp_path / "a.jsonl"}, tmp_path)
    assert (config.seed, config.data_seed, config.max_train_rows) == (3, 3, 256)
    changed = VARIANTS.get(variant, {})
    assert {name: getattr(config, name) for name in changed} == changed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "--data-path: not given"),
        ({"data_path": ("x/a.jsonl", "y/a.jsonl.gz")}, "expected files of different names"),
        ({"data_path": ("a",), "trl_pairs": (250,)}, "got 250, expected multiples of 16"),
    ],
)
def test_refusals(values: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        preferences.check(Options(**values))


def test_a_run_writes_the_scores_of_all_held_out_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tokens in (("max_prompt_length", 32), ("max_length", 64)):  # as the tiny model has them
        monkeypatch.setitem(preferences.SETTINGS, name, tokens)
    path = tmp_path / "pairs.jsonl.gz"
    write_pairs(path, [f"question {i}" for i in range(60)])
    options = Options(
        data_path=(str(path),), model="demo-llama", pairs=(16,), output_dir=str(tmp_path / "out"),
        results=str(tmp_path / "results"), seeds=2,
    )  # fmt: skip
    held_out = preferences.divide(options)
    run = Run(HERE, 16, 0)
    preferences.train(options, run, held_out)
    rows = held_out["pairs"].read_text(encoding="utf-8").splitlines()
    scores = json.loads(run.scores_file(options).read_text(encoding="utf-8"))["pairs"]
    assert len(scores["scores"]) == len(scores["lengths"]) == len(rows)
    assert list((options.folder / "scores").iterdir()) == [run.scores_file(options)], "the model is removed"
    preferences.report(options)
    assert "| here | 16 | 1 |" in (tmp_path / "results" / "preferences-pairs.md").read_text(encoding="utf-8")
    assert len((tmp_path / "results" / "preferences-pairs.csv").read_text(encoding="utf-8").splitlines()) == 3

"""`rlhf diff`: changes of one kind each, each named as the first difference; equal runs, and runs cut short."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from data.sources import demo
from rlhf.chain import diff
from rlhf.errors import UserError
from tests.support.killing import CLOCKS, dying, ppo_options, reward_options, run, sft_options

Tree = dict[str, Any]
WORDS = sorted(demo.words())[:40]
ROWS = [{"prompt": f"tell me about {word}", "response": f"the {word} is kind"} for word in WORDS]
SPLIT = {"data_split": (1, 0, 0), "eval_fraction": 0.2, "save_every": None, "max_train_rows": None}


def fine_tune(folder: Path, rows: list[Tree], **options: Any) -> Path:
    """A run of step 1 on a file of rows."""
    folder.mkdir()
    with contextlib.chdir(folder):
        Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        run(sft_options(data_path=["rows.jsonl"], **SPLIT | {"model": "../model"} | options))
    return folder / "out"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model to start from, a run of step 1 from it, and a chain."""
    folder = tmp_path_factory.mktemp("runs")
    with contextlib.chdir(folder):
        run(sft_options(save_every=None))
        run(reward_options(save_every=None))
        run(ppo_options(save_every=None))
        shutil.copytree("out/step1_sft/model", "model")
        shutil.copytree("model", "heavier")
        weights = load_file("heavier/model.safetensors")
        weights["model.norm.weight"][5] += 0.5
        save_file(weights, "heavier/model.safetensors", {"format": "pt"})
        shutil.copytree("model", "other_words")
        swap_two_words(Path("other_words/tokenizer.json"))
        Path("plain.jinja").write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}")
    fine_tune(folder / "base", ROWS)
    return folder


def swap_two_words(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["kind"], words["the"] = words["the"], words["kind"]
    file.write_text(json.dumps(tokenizer))


def difference(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, the verdict, the lines of each stage)"""
    capsys.readouterr()
    code = diff.main([str(first), str(second)])
    verdict, _, table = capsys.readouterr().out.partition("\n")
    return code, verdict, table


def changed(at: int, **values: str) -> list[Tree]:
    return [row | values if i == at else row for i, row in enumerate(ROWS)]


REAL: dict[str, tuple[list[Tree], Tree, str]] = {
    "a response": (changed(3, response="it is kind"), {}, "rows: to train on, .*: (3.) rows, .* and \\1 rows, "),
    "a row more": ([*ROWS, ROWS[0] | {"prompt": "and"}], {}, "rows: to train on, data_seed 0: 3. rows, .* and 3. rows"),
    "a row less": (ROWS[:-1], {}, "rows: to train on, data_seed 0: 3. rows, .* and 3. rows, "),
    "seed": (ROWS, {"seed": 1}, "options: seed: 0 and 1."),
    "data_seed": (ROWS, {"data_seed": 7}, "options: data_seed: 0 and 7."),
    "template": (ROWS, {"chat_template": "../plain.jinja"}, "options: chat_template: human_assistant and "),
    "weights": (ROWS, {"model": "../heavier"}, "options: model: ../model and ../heavier."),
}  # fmt: skip
"""rows and options of a run in place of the base's, and what is named"""


@pytest.mark.parametrize("name", REAL)
def test_a_change_of_a_real_run_is_the_first_difference(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, options, named = REAL[name]
    (tmp_path / "model").symlink_to(runs / "model")
    for other in ("heavier", "plain.jinja"):
        (tmp_path / other).symlink_to(runs / other)
    code, verdict, table = difference(runs / "base/out", fine_tune(tmp_path / "run", rows, **options), capsys)
    assert code == 1 and re.match(f"The first difference is in step1_sft: {named}", verdict), verdict
    assert "  weights: model/model.safetensors: " in table, table
    assert ", by more than rounding explains from step " in table


@pytest.mark.parametrize("name", ["../heavier", "../other_words"])
def test_a_model_of_the_same_name_with_another_content(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(runs / name[3:])
    _, verdict, table = difference(runs / "base/out", fine_tune(tmp_path / "run", ROWS), capsys)
    assert ("starting weights" in table) == (name == "../heavier"), "weights are not the model's other files"
    kind = {"../heavier": "starting weights: model: ", "../other_words": "tokenizer: "}[name]
    assert verdict.startswith(f"The first difference is in step1_sft: {kind}"), verdict


@pytest.mark.parametrize("name", ["the same", "order", "file", "folder", "rounding"])
def test_equal_runs_are_the_same_to_the_last_bit(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of a file is not that of a run, and a name of a file or model is not its content."""
    shutil.copytree(runs / "model", tmp_path / "model")
    (tmp_path / "again").symlink_to("model")
    options: Tree = {"folder": {"model": "../again"}, "rounding": {"micro_batch_size": 3}}.get(name, {})
    rows = ROWS[::-1] if name == "order" else ROWS
    other = fine_tune(tmp_path / "run", rows, **options)
    if name == "file":
        (tmp_path / "run/rows.jsonl").rename(tmp_path / "run/others.jsonl")
        with contextlib.chdir(tmp_path / "run"):
            run(sft_options(data_path=["others.jsonl"], **SPLIT, model="../model", overwrite=True))
    code, verdict, table = difference(runs / "base/out", other, capsys)
    if name == "rounding":
        assert code == 0 or re.match("The first difference is in step1_sft: numbers: .* by no more than round", verdict)
    else:
        assert (code, verdict, table) == (
            0,
            f"The same to the last bit: {numbers_of(other)} numbers, and the weights of all models.",
            "step1_sft, to step 5: no differences\n",
        )


def numbers_of(out: Path) -> int:
    """Counted by hand: the last row of each step and kind, without clocks."""
    rows = [json.loads(line) for line in (out / "step1_sft/metrics.jsonl").read_text().splitlines()]
    last = {(row["kind"], row["step"]): row for row in rows}
    return sum(not name.startswith(CLOCKS) for row in last.values() for name in row) - 2 * len(last)


# --- changes of what a chain has recorded


def versions(name: str) -> Callable[[Tree], None]:
    return lambda manifest: manifest["versions"].update({name: "9.9"})


def option(name: str, value: object) -> Callable[[Tree], None]:
    return lambda manifest: manifest["config"].update({name: value})


def hardware(name: str, value: object) -> Callable[[Tree], None]:
    return lambda manifest: manifest["hardware"].update({name: value})


SFT, REWARD, PPO = "step1_sft", "step2_reward", "step3_ppo"
PLANTED: list[tuple[str, Callable[[Tree], None], str]] = [
    *((stage, versions(name), f"versions: {name}: .* and 9.9") for stage, name in (
        (SFT, "torch"), (REWARD, "transformers"), (PPO, "rlhf-pipeline"), (SFT, "python"),
    )),
    (SFT, hardware("device", "NVIDIA H200"), "hardware: device: .* and NVIDIA H200"),
    (REWARD, hardware("processes", 8), "hardware: processes: 1 and 8"),
    (PPO, hardware("dtype", "bf16"), "hardware: dtype: fp32 and bf16"),
    (PPO, option("kl_coef", 0.5), "options: kl_coef: 0.05 and 0.5"),
    (PPO, option("cliprange", 0.3), "options: cliprange: 0.2 and 0.3"),
    (REWARD, option("margin", 1.5), "options: margin: null and 1.5"),
    (SFT, option("optim", "lion"), "options: optim: .* and lion"),
    (PPO, lambda m: m["config"]["critic"].update(quantize="int8"), "options: critic.quantize: null and int8"),
    (PPO, lambda m: m["config"].pop("total_episodes"), "options: total_episodes: 32 and 4096"),
    (SFT, lambda m: m["template"].update(eos_token="<end>"), "template: eos_token: </s> and <end>"),
    (REWARD, lambda m: m.update(tokenizer="f" * 64), "tokenizer: .* and ffffffffffff"),
    (PPO, lambda m: m["inputs"]["critic_model"].update(weights="e" * 64), "starting weights: critic_model: "),
    (REWARD, lambda m: m.update(random_generators="d" * 64), "random draws: .* and dddddddddddd"),
    (PPO, lambda m: m["user_files"].update({"score.py": "c" * 64}), "files: score.py: bbbbbbbbbbbb and ccc"),
]  # fmt: skip


@pytest.fixture
def two(runs: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two copies of a chain, whose third stage has read a file of the user."""
    for name in ("a", "b"):
        shutil.copytree(runs / "out", tmp_path / name)
        edit(tmp_path / name / PPO, lambda manifest: manifest["user_files"].update({"score.py": "b" * 64}))
    return tmp_path / "a", tmp_path / "b"


def edit(stage: Path, change: Callable[[Tree], object], file: str = "manifest.json") -> None:
    content = json.loads((stage / file).read_text())
    change(content)
    (stage / file).write_text(json.dumps(content))


@pytest.mark.parametrize(("stage", "change", "named"), PLANTED)
def test_a_planted_change_is_the_first_difference(
    stage: str, change: Callable[[Tree], None], named: str, two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(two[1] / stage, change)
    code, verdict, table = difference(*two, capsys)
    assert code == 1 and re.match(f"The first difference is in {stage}: {named}.*\\.$", verdict), verdict
    assert len(table.splitlines()) == 4 and f"{stage}, to step 4: 1 differences\n  " in table, "the change alone"
    code, verdict, _ = difference(two[0] / stage, two[1] / stage, capsys)
    assert code == 1 and re.match(f"The first difference is in {stage}: {named}", verdict), "a stage by itself"
    _, verdict, _ = difference(two[1], two[1], capsys)
    assert verdict.startswith("The same to the last bit")


def test_the_order_is_that_of_a_run(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """What is given before what is computed, and an earlier stage before a later one."""
    kinds = ["versions", "hardware", "options", "files", "tokenizer", "starting weights", "random draws"]
    for i in (17, 16, 15, 14, 12, 8, 6, 2):
        edit(two[1] / PPO, PLANTED[i][1])
    _, verdict, table = difference(*two, capsys)
    assert verdict.startswith(f"The first difference is in {PPO}: versions: ")
    lines = [line.strip().partition(":")[0] for line in table.splitlines() if line.startswith(" ")]
    assert list(dict.fromkeys(lines)) == kinds
    edit(two[1] / REWARD, option("seed", 3))
    edit(two[1] / SFT, option("seed", 3))
    _, verdict, table = difference(*two, capsys)
    assert verdict == f"The first difference is in {SFT}: options: seed: 0 and 3."
    assert table.count("  options: seed: 0 and 3\n") == 2


@pytest.mark.parametrize(
    ("split", "change", "named"),
    [
        ("train", {"in_order": "a" * 32}, "to train on, data_seed 0: (.*), order .{12} and \\1, order a{12}"),
        (
            "evaluation",
            {"as_a_set": "b" * 32},
            "held out, data_seed 0: (.*), content .{12}(, .*) and \\1, content b{12}\\2",
        ),
        ("evaluation", {"rows": 9}, "held out, data_seed 0: 4( rows, .*) and 9\\1"),
    ],
)
def test_rows_differ(
    split: str, change: Tree, named: str, two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads((two[1] / REWARD / "data.json").read_text())
    assert report[split]["in_order"] != report[split]["as_a_set"], "rows are not in the order of their digests"
    edit(two[1] / REWARD, lambda report: report[split].update(change), "data.json")
    code, verdict, _ = difference(*two, capsys)
    assert code == 1 and re.fullmatch(f"The first difference is in {REWARD}: rows: {named}\\.", verdict), verdict


ROW = {"kind": "train", "step": 1, "seconds": 1.0, "loss": 1.0, "kl": 1e-9, "lr": 1e-3, "tokens_per_second": 5.0}


def numbers(directory: Path, rows: list[Tree], dtype: str = "fp32") -> tuple[int, int, str]:
    """Of two runs: `rows`, and rows in which the loss of 1 and the KL of 1e-9 never change; the KL ends at 2."""
    still = [{**ROW, "step": step} for step in range(1, len(rows))] + [{**ROW, "step": len(rows), "kl": 2.0}]
    stages = []
    for name, lines in (("a", still), ("b", rows)):
        folder = directory / name / SFT
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (folder / "manifest.json").write_text(json.dumps({"hardware": {"dtype": dtype}}))
        stages.append(diff.recorded_stages(directory / name)[1])
    count, last, [line] = diff.compare_numbers(*stages)
    return count, last, line


def test_from_which_step_on_numbers_differ_by_more_than_rounding(tmp_path: Path) -> None:
    """Of a metric that reaches 2, 1e-9 and 2e-9 are equal but for rounding; clocks are no numbers."""
    rows = [{**ROW, "step": step, "seconds": 7.0 + step} for step in range(1, 6)]
    rows[1] |= {"kl": 2e-9, "tokens_per_second": 6.0}
    rows[2] |= {"loss": 1.000009}
    rows[3] |= {"loss": 1.00002}
    rows[4] |= {"kl": 2.0, "loss": 1.5}
    first, beyond = "numbers: from step 2 on (kl is 1e-09 and 2e-09), ", "by more than rounding explains from step "
    assert numbers(tmp_path / "fp32", rows) == (15, 5, f"{first}{beyond}4 on (loss)")
    assert numbers(tmp_path / "bf16", rows, "bf16")[2] == f"{first}{beyond}5 on (loss)"
    rows[4]["loss"] = 1 + 2**-8
    assert numbers(tmp_path / "half a step", rows, "bf16")[2] == f"{first}by no more than rounding explains"
    rows[3]["lr"] = 1.02e-3
    small = numbers(tmp_path / "small", rows, "bf16")[2]
    assert small == f"{first}{beyond}4 on (lr)", "of its own size"
    rows[0]["loss"] = None
    assert numbers(tmp_path / "none", rows, "bf16")[2].endswith(f"{beyond}1 on (loss)")


def test_numbers_are_named_before_weights(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    edit(two[1] / REWARD, lambda manifest: manifest["files"]["model/model.safetensors"].update(sha256="0" * 64))
    file = two[1] / REWARD / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    [row] = [row for row in rows if (row["kind"], row["step"]) == ("train", 3)]
    before, row["loss"] = row["loss"], 9.5
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, verdict, table = difference(*two, capsys)
    at = f"from step 3 on (loss is {before} and 9.5)"
    numbers = f"numbers: {at}, by more than rounding explains from step 3 on (loss)"
    assert (code, verdict) == (1, f"The first difference is in {REWARD}: {numbers}.")
    assert f"{REWARD}, to step 4: 2 differences\n  {numbers}\n  weights: model/model.safetensors: " in table


def test_only_the_last_bits_of_the_weights_differ(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    edit(two[1] / PPO, lambda manifest: manifest["files"]["critic/model.safetensors"].update(sha256="0" * 64))
    edit(two[1] / PPO, lambda manifest: manifest["files"]["actor/config.json"].update(sha256="0" * 64))
    code, verdict, table = difference(*two, capsys)
    named = f"The first difference is in {PPO}: weights: critic/model.safetensors: [0-9a-f]{{12}} and 0{{12}}."
    assert code == 1 and re.fullmatch(named, verdict), verdict
    assert "config.json" not in table


# --- runs cut short


def test_a_killed_and_a_resumed_run(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed run is compared by its newest checkpoint as far as it has come. Once resumed, it is the same."""
    (tmp_path / "model").symlink_to(runs / "model")
    options = {"save_every": 1}
    dying(monkeypatch, lambda: fine_tune(tmp_path / "run", ROWS, **options), "train", 3)
    code, verdict, table = difference(runs / "base/out", tmp_path / "run/out", capsys)
    assert code == 0 and re.match(r"The same as far as both are recorded: \d+ numbers\.$", verdict)
    assert table == "step1_sft, to step 3: no differences\n"
    with contextlib.chdir(tmp_path / "run"):
        run(sft_options(data_path=["rows.jsonl"], **SPLIT | {"model": "../model"} | options))
    code, verdict, _ = difference(runs / "base/out", tmp_path / "run/out", capsys)
    assert code == 0 and verdict.startswith("The same to the last bit")


def test_what_one_run_has_not_recorded_is_no_difference(
    two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def older(manifest: Tree) -> None:
        for name in ("tokenizer", "random_generators", "hardware"):
            del manifest[name]
        del manifest["versions"]["rlhf-pipeline"]
        for entry in manifest["inputs"].values():
            del entry["weights"]

    edit(two[1] / SFT, older)
    edit(two[1] / SFT, lambda report: report["train"].pop("as_a_set"), "data.json")
    code, verdict, _ = difference(*two, capsys)
    assert code == 0 and verdict.startswith("The same to the last bit")
    edit(two[1] / SFT, option("model", "another"))
    _, verdict, _ = difference(*two, capsys)
    assert f"in {SFT}: options: model: " in verdict, "whose weights are not known"


def test_what_cannot_be_compared(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], [str(two[0])]):
        with pytest.raises(UserError, match="expected two runs"):
            diff.main(words)
    with pytest.raises(UserError, match=f"{tmp_path}: no stage has recorded metrics there"):
        diff.main([str(two[0]), str(tmp_path)])
    with pytest.raises(UserError, match=f"got {SFT} and {PPO}, expected a stage that both have"):
        diff.main([str(two[0] / SFT), str(two[1] / PPO)])
    code, verdict, table = difference(two[0], two[1] / REWARD, capsys)
    assert code == 0 and verdict.startswith("The same to the last bit")
    assert table == f"{REWARD}, to step 4: no differences\n"

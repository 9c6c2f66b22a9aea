"""`rlhf diff`: thirty changes of one kind each, each named as the first difference; equal runs, and runs cut short."""

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
from rlhf.report import differences
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
    """(exit code, the verdict, the table)"""
    capsys.readouterr()
    code = diff.main([str(first), str(second)])
    verdict, _, table = capsys.readouterr().out.partition("\n")
    return code, verdict, table


def changed(at: int, **values: str) -> list[Tree]:
    return [row | values if i == at else row for i, row in enumerate(ROWS)]


REAL: dict[str, tuple[list[Tree], Tree, str]] = {
    "a response": (changed(3, response="it is kind"), {}, "rows of step1_sft: to train on: as many, other text: "),
    "a row more": ([*ROWS, ROWS[0] | {"prompt": "and"}], {}, "rows .*: to train on: more: 3. and 3."),
    "a row less": (ROWS[:-1], {}, "rows of step1_sft: to train on: fewer: 3. and 3."),
    "seed": (ROWS, {"seed": 1}, "options of step1_sft: seed: 0 and 1."),
    "data_seed": (ROWS, {"data_seed": 7}, "options of step1_sft: data_seed: 0 and 7."),
    "learning rate": (ROWS, {"learning_rate": 2e-3}, "options of step1_sft: learning_rate: 0.001 and 0.002."),
    "epochs": (ROWS, {"num_train_epochs": 2}, "options of step1_sft: num_train_epochs: 1 and 2."),
    "template": (ROWS, {"chat_template": "../plain.jinja"}, "options of step1_sft: chat_template: human_assistant "),
    "weights": (ROWS, {"model": "../heavier"}, "options of step1_sft: model: ../model and ../heavier."),
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
    assert code == 1 and re.match(f"The first difference is in the {named}", verdict), verdict
    assert "not recorded" not in table and "  model/model.safetensors" in table, table
    assert "more than rounding explains" in table


@pytest.mark.parametrize("name", ["../heavier", "../other_words"])
def test_a_model_of_the_same_name_with_another_content(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(runs / name[3:])
    _, verdict, table = difference(runs / "base/out", fine_tune(tmp_path / "run", ROWS), capsys)
    assert ("starting weights" in table) == (name == "../heavier"), "weights are not the model's other files"
    kind = {"../heavier": "starting weights of step1_sft: model", "../other_words": "tokenizer of step1_sft"}[name]
    assert verdict.startswith(f"The first difference is in the {kind}"), verdict


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
        assert "The first difference" not in verdict and "more than rounding" not in verdict, verdict
    else:
        assert (code, verdict) == (
            0,
            f"The same to the last bit: {numbers_of(other)} numbers, and the weights of all models.",
        )
    listed = {"order": "content of rows.jsonl", "file": "data_path", "folder": "model ", "rounding": "micro_batch_size"}
    assert (differences_listed := diff.NO_EFFECT in table) == (name != "the same")
    assert not differences_listed or f"  {listed[name]}" in table.partition(diff.NO_EFFECT)[2]


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
    *((stage, versions(name), f"versions of {stage}: {name}: .* and 9.9") for stage, name in (
        (SFT, "torch"), (REWARD, "transformers"), (PPO, "rlhf-pipeline"), (SFT, "python"),
    )),
    (SFT, hardware("device", "NVIDIA H200"), f"hardware of {SFT}: device: .* and NVIDIA H200"),
    (REWARD, hardware("processes", 8), f"hardware of {REWARD}: processes: 1 and 8"),
    (PPO, hardware("dtype", "bf16"), f"hardware of {PPO}: dtype: fp32 and bf16"),
    (PPO, option("kl_coef", 0.5), f"options of {PPO}: kl_coef: 0.05 and 0.5"),
    (PPO, option("cliprange", 0.3), f"options of {PPO}: cliprange: 0.2 and 0.3"),
    (REWARD, option("margin", 1.5), f"options of {REWARD}: margin: null and 1.5"),
    (SFT, option("optim", "lion"), f"options of {SFT}: optim: .* and lion"),
    (PPO, lambda m: m["config"]["critic"].update(quantize="int8"), f"options of {PPO}: critic.quantize: null and int8"),
    (PPO, lambda m: m["config"].pop("total_episodes"), f"options of {PPO}: total_episodes: 32 and 4096"),
    (SFT, lambda m: m["template"].update(eos_token="<end>"), f"template of {SFT}: eos_token: </s> and <end>"),
    (REWARD, lambda m: m.update(tokenizer="f" * 64), f"tokenizer of {REWARD}: .* and ffffffffffff"),
    (PPO, lambda m: m["inputs"]["critic_model"].update(weights="e" * 64), f"starting weights of {PPO}: critic_model: "),
    (REWARD, lambda m: m.update(random_generators="d" * 64), f"random draws of {REWARD}: .* and dddddddddddd"),
    (PPO, lambda m: m["user_files"].update({"score.py": "c" * 64}), f"files of {PPO}: score.py: bbbbbbbbbbbb and ccc"),
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
    assert code == 1 and re.match(f"The first difference is in the {named}.*\\.$", verdict), verdict
    assert len(table.partition("\nnumbers\n")[0].splitlines()) == 3, "the runs, the kind, the change: nothing else"
    code, verdict, _ = difference(two[0] / stage, two[1] / stage, capsys)
    assert code == 1 and re.match(f"The first difference is in the {named}", verdict), "a stage by itself"
    _, verdict, _ = difference(two[1], two[1], capsys)
    assert verdict.startswith("The same to the last bit")


def test_the_order_is_that_of_a_run(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """What is given before what is computed, and an earlier stage before a later one; a common change stands once."""
    kinds = ["versions", "hardware", "options", "files", "template", "tokenizer", "starting weights", "random draws"]
    later = [PLANTED[i] for i in (17, 16, 15, 14, 12, 8, 6, 2)]
    for _, change, _ in later:
        edit(two[1] / PPO, change)
    _, verdict, table = difference(*two, capsys)
    assert f"in the versions of {PPO}: " in verdict
    headings = [line for line in table.splitlines()[1:] if line and not line.startswith(" ")]
    assert headings == [kind for kind in kinds if kind != "template"] + ["numbers"]
    assert differences.KINDS[:4] == tuple(kinds[:4])
    edit(two[1] / SFT, option("seed", 3))
    edit(two[1] / REWARD, option("seed", 3))
    _, verdict, table = difference(*two, capsys)
    assert f"in the options of {SFT}, {REWARD}: seed: 0 and 3." in verdict
    assert len(re.findall("  seed, ", table)) == 1


@pytest.mark.parametrize(
    ("split", "change", "named"),
    [
        ("train", {"in_order": "a" * 32}, "to train on: another order: [0-9a-f]{12} and aaaaaaaaaaaa"),
        (
            "evaluation",
            {"in_order": "a" * 32, "as_a_set": "b" * 32},
            "held out: as many, other text: .* and bbbb",
        ),
        ("evaluation", {"in_order": "a" * 32, "as_a_set": "b" * 32, "rows": 9}, "held out: more: 4 and 9"),
    ],
)
def test_rows_differ(
    split: str, change: Tree, named: str, two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads((two[1] / REWARD / "data.json").read_text())
    assert report[split]["in_order"] != report[split]["as_a_set"], "rows are not in the order of their digests"
    edit(two[1] / REWARD, lambda report: report[split].update(change), "data.json")
    code, verdict, _ = difference(*two, capsys)
    assert code == 1 and re.match(f"The first difference is in the rows of {REWARD}: {named}.*$", verdict), verdict


ROW = {"kind": "train", "step": 1, "seconds": 1.0, "loss": 1.0, "kl": 1e-9, "lr": 1e-3, "tokens_per_second": 5.0}


def numbers(directory: Path, rows: list[Tree], dtype: str = "fp32") -> differences.Numbers:
    """Of two runs: `rows`, and rows in which the loss of 1 and the KL of 1e-9 never change; the KL ends at 2."""
    still = [{**ROW, "step": step} for step in range(1, len(rows))] + [{**ROW, "step": len(rows), "kl": 2.0}]
    stages = []
    for name, lines in (("a", still), ("b", rows)):
        folder = directory / name / SFT
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (folder / "manifest.json").write_text(json.dumps({"hardware": {"dtype": dtype}}))
        stages.append(diff._stages(directory / name)[1])
    return differences.compare_numbers(*stages)


def test_from_which_step_on_numbers_differ_by_more_than_rounding(tmp_path: Path) -> None:
    """Of a metric that reaches 2, 1e-9 and 2e-9 are equal but for rounding; clocks are no numbers."""
    rows = [{**ROW, "step": step, "seconds": 7.0 + step} for step in range(1, 6)]
    rows[1] |= {"kl": 2e-9, "tokens_per_second": 6.0}
    rows[2] |= {"loss": 1.000009}
    rows[3] |= {"loss": 1.00002}
    rows[4] |= {"kl": 2.0, "loss": 1.5}
    compared = numbers(tmp_path / "fp32", rows)
    assert (compared.count, compared.last) == (15, 5)
    assert compared.first == differences.Parting("kl", 2, (1e-9, 2e-9))
    assert compared.beyond_rounding == differences.Parting("loss", 4, (1.0, 1.00002))
    compared = numbers(tmp_path / "bf16", rows, "bf16")
    assert compared.beyond_rounding == differences.Parting("loss", 5, (1.0, 1.5))
    rows[4]["loss"] = 1 + 2**-8
    assert numbers(tmp_path / "half a step", rows, "bf16").beyond_rounding is None
    rows[3]["lr"] = 1.02e-3
    small = numbers(tmp_path / "small", rows, "bf16").beyond_rounding
    assert small == differences.Parting("lr", 4, (1e-3, 1.02e-3)), "of its own size"
    rows[0]["loss"] = None
    assert numbers(tmp_path / "no number", rows, "bf16").beyond_rounding == differences.Parting("loss", 1, (1.0, None))


def test_the_words_on_numbers(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    def at(step: int, loss: float) -> float:
        """The loss before."""
        file = two[1] / REWARD / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        [row] = [row for row in rows if (row["kind"], row["step"]) == ("train", step)]
        before, row["loss"] = float(row["loss"]), loss
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return before

    def verdict() -> str:
        code, verdict, table = difference(*two, capsys)
        text = verdict.removeprefix("Nothing that is recorded differs before the numbers: ").removesuffix(".")
        assert code == 1 and text != verdict and f"  {text}\n" in table, verdict
        assert table.startswith("numbers\n"), "no table"
        assert re.search(rf"\n  {SFT}: [\d,]+ numbers are equal, to step 4\n", table)
        return text

    third = at(3, 9.5)
    beyond = f"at step 3 loss is {third} and 9.5, more than rounding explains"
    assert verdict() == f"{REWARD}: equal up to step 2; {beyond}"
    second = at(2, 0.0)
    at(2, second + 1e-6)
    rounding = f"{REWARD}: equal up to step 1; at step 2 loss is {second} and {second + 1e-6}"
    assert verdict() == f"{rounding}; from step 3 on more than rounding explains (loss is {third} and 9.5)"
    at(3, third)
    assert verdict() == f"{rounding}, and no number is farther apart than rounding explains"


def test_only_the_last_bits_of_the_weights_differ(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    edit(two[1] / PPO, lambda manifest: manifest["files"]["critic/model.safetensors"].update(sha256="0" * 64))
    edit(two[1] / PPO, lambda manifest: manifest["files"]["actor/config.json"].update(sha256="0" * 64))
    code, verdict, table = difference(*two, capsys)
    assert (code, verdict) == (
        1,
        f"Every number is equal in the six digits that are recorded, and the weights differ: {PPO}.",
    )
    assert re.search(rf"weights\n  critic/model.safetensors, {PPO} +[0-9a-f]{{12}} +0{{12}}\n", table)
    assert "config.json" not in table


# --- runs cut short, and those of before


def test_a_killed_and_a_resumed_run(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed run is compared by its newest checkpoint as far as it has come. Once resumed, it is the same."""
    (tmp_path / "model").symlink_to(runs / "model")
    options = {"save_every": 1}
    dying(monkeypatch, lambda: fine_tune(tmp_path / "run", ROWS, **options), "train", 3)
    code, verdict, table = difference(runs / "base/out", tmp_path / "run/out", capsys)
    assert code == 0 and re.match(r"The same as far as both are recorded: \d+ numbers, step1_sft to step 3\.$", verdict)
    assert "not recorded" not in table
    with contextlib.chdir(tmp_path / "run"):
        run(sft_options(data_path=["rows.jsonl"], **SPLIT | {"model": "../model"} | options))
    code, verdict, _ = difference(runs / "base/out", tmp_path / "run/out", capsys)
    assert code == 0 and verdict.startswith("The same to the last bit")


def test_what_an_older_run_has_not_recorded(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, and not taken for a difference. Rows are then compared by the content of the files."""

    def older(manifest: Tree) -> None:
        for name in ("tokenizer", "random_generators", "hardware"):
            del manifest[name]
        del manifest["versions"]["rlhf-pipeline"]
        for entry in manifest["inputs"].values():
            del entry["weights"]

    def without_digests(report: Tree) -> None:
        for split in ("train", "evaluation"):
            del report[split]["in_order"], report[split]["as_a_set"]

    edit(two[1] / SFT, older)
    edit(two[1] / SFT, without_digests, "data.json")
    code, verdict, table = difference(*two, capsys)
    assert code == 0 and verdict.startswith("The same to the last bit")
    missing = "hardware, tokenizer, starting weights, random draws"
    assert table.endswith(f"\nnot recorded in both runs, so not compared: {missing} ({SFT})\n")
    edit(two[1] / SFT, lambda manifest: manifest["data"].update({"demo,rows=240": "a" * 32}))
    code, verdict, _ = difference(*two, capsys)
    assert code == 1 and f"rows of {SFT}: content of demo,rows=240: " in verdict


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
    assert table.endswith(f"{SFT} is only in {two[0]}\n{PPO} is only in {two[0]}\n")

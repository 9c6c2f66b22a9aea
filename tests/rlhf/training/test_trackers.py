"""Trackers: what they get, what a resumed run sends, and that none of them ends a run."""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from rlhf import plugins
from rlhf.config.options import RunOptions
from rlhf.errors import UserError
from rlhf.report.meanings import read_meanings
from rlhf.training import record, reporting, trackers
from rlhf.training.reporting import Reporter
from tests.support import tensorboard_events

MINE = """
import json
from pathlib import Path
from rlhf.config import Config as Options

class Config(Options):
    path: str
    fails: str = ""

class Mine:
    def __init__(self, config):
        self.config = config

    def call(self, name, *values):
        with Path(self.config.path).open("a") as file:
            file.write(json.dumps([name, *values]) + "\\n")
        if name == self.config.fails:
            raise ConnectionError("no route to host")

    def start(self, run):
        self.call("start", run.project, run.stage, run.done, run.run_id)
        return "id-7"

    def log_config(self, config):
        self.call("log_config", config["seed"], config["output_dir"])

    def log_metrics(self, metrics, step):
        self.call("log_metrics", metrics, step)

    def log_text(self, name, text, step):
        self.call("log_text", name, text, step)

    def log_table(self, name, columns, rows, step):
        self.call("log_table", name, columns, rows, step)

    def finish(self):
        self.call("finish")

def build(config):
    return Mine(config)
"""
SAMPLES = [{"prompt": "a|b", "score": 0.5}, {"prompt": "c\nd", "score": 2.0}]


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    directory = tmp_path / "demo" / "step3_ppo"
    directory.mkdir(parents=True)
    (tmp_path / "mine.py").write_text(MINE)
    return directory


def mine(stage: Path, fails: str = "") -> str:
    return f"{stage.parents[1] / 'mine.py'},path={calls_file(stage)}" + (f",fails={fails}" if fails else "")


def calls_file(stage: Path) -> Path:
    return stage.parents[1] / "calls.jsonl"


def calls(stage: Path) -> list[Any]:
    return [json.loads(line) for line in calls_file(stage).read_text().splitlines()]


def record_steps(stage: Path, specs: tuple[str, ...], done: int, steps: int, scale: float = 1.0) -> None:
    """A part of a run: the steps after `done`, step i with loss i * scale, an evaluation at each, and one warning."""
    options = RunOptions(output_dir=str(stage.parent), report_to=specs)
    recorded = reporting.rows_after(stage / "metrics.jsonl", done)
    recorder = record.Recorder(stage, done, Reporter(stage, options, done, recorded))
    rows = ({"loss": i * scale, "eval_kl": i * 10 * scale} for i in range(done + 1, steps + 1))
    for step, _ in enumerate(recorder.follow(rows, steps, "step3_ppo", ()), start=done + 1):
        if step == 2:
            recorder.warn(step, "kl_above_limit", {"kl": 12.5}, "raise it")
            recorder.table("samples", step, SAMPLES)
    recorder.close()
    recorder.close()


# --- what a tracker gets


def test_a_tracker_gets_config_numbers_texts_and_tables(stage: Path) -> None:
    record_steps(stage, (mine(stage),), 0, 2)
    assert calls(stage) == [
        ["start", "demo", "step3_ppo", 0, None],
        ["log_config", 0, str(stage.parent)],
        ["log_metrics", {"train/loss": 1.0}, 1],
        ["log_metrics", {"eval/eval_kl": 10.0}, 1],
        ["log_metrics", {"train/loss": 2.0}, 2],
        ["log_metrics", {"eval/eval_kl": 20.0}, 2],
        ["log_text", "warning/kl_above_limit", "kl 12.5: raise it", 2],
        ["log_table", "samples", ["prompt", "score"], [["a|b", 0.5], ["c\nd", 2.0]], 2],
        ["finish"],
    ]


def test_the_result_of_a_stage_is_sent_in_words_to_trackers_alone(stage: Path) -> None:
    options = RunOptions(output_dir=str(stage.parent), report_to=(mine(stage),))
    recorder = record.Recorder(stage, 0, Reporter(stage, options))
    recorder.verdict(7, lambda: "It got better.")
    recorder.close()
    assert calls(stage)[-2:] == [["log_text", "verdict", "It got better.", 7], ["finish"]]
    untracked = record.Recorder(stage, 0, Reporter(stage, RunOptions(output_dir=str(stage.parent))))
    untracked.verdict(7, lambda: pytest.fail("made for nobody"))
    untracked.close()


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_text_is_an_alert_where_the_service_has_alerts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda _: importlib.machinery.ModuleSpec("x", None, origin="there")
    )
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(AlertLevel=str.upper))
    sent: list[Any] = []
    opened: Any = trackers.open_tracker(name)
    run = SimpleNamespace(alert=lambda *values: sent.append(values))
    opened.service = SimpleNamespace(log=lambda values, step: sent.append((values, step)), tracker=run)
    for text in ("warning/kl_above_limit", "verdict"):
        opened.log_text(text, "words", 2)
    step = (2,) if name == "trackio" else ()
    assert sent == [
        ({"warning/kl_above_limit": "words"}, 2),
        ("warning/kl_above_limit", "words", "WARN", *step),
        ({"verdict": "words"}, 2),
        ("verdict", "words", "INFO", *step),
    ]


def test_none_is_no_tracker() -> None:
    assert RunOptions.model_validate({"report_to": ["none"]}).report_to == ()
    assert RunOptions(report_to=("wandb",)).report_to == ("wandb",)


@pytest.mark.parametrize(("value", "left"), [("true", ["aim"]), ("1", ["aim"]), ("false", ["wandb,project=x", "aim"])])
def test_wandb_is_left_out_where_its_users_disable_it(
    value: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DISABLED", value)
    assert RunOptions.model_validate({"report_to": ["wandb,project=x", "aim"]}).report_to == tuple(left)


def test_options_reach_a_tracker_flat_and_without_secrets(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "12345678-secret")
    configs: list[Any] = []
    monkeypatch.setattr(plugins.load_file(mine(stage).split(",")[0]).Mine, "log_config", lambda _, c: configs.append(c))
    options = RunOptions(output_dir="a/12345678-secret", report_to=(mine(stage),))
    Reporter(stage, options).close()
    assert (
        configs[0]["output_dir"] == "***" and configs[0]["save_minutes"] == 20.0 and configs[0]["export_every"] is None
    )
    assert configs[0]["report_to"] == json.dumps([mine(stage)])


def test_a_resumed_run_sends_each_step_once(stage: Path) -> None:
    """Killed after step 3, resumed from the checkpoint of step 1."""
    record_steps(stage, (mine(stage),), 0, 3)
    calls_file(stage).unlink()
    record_steps(stage, (mine(stage),), 1, 4)
    assert calls(stage) == [
        ["start", "demo", "step3_ppo", 1, "id-7"],
        ["log_metrics", {"train/loss": 4.0}, 4],
        ["log_metrics", {"eval/eval_kl": 40.0}, 4],
        ["finish"],
    ]
    calls_file(stage).unlink()
    record_steps(stage, (mine(stage),), 0, 1)  # with --overwrite
    assert [call[0] for call in calls(stage)] == ["start", "log_config", "log_metrics", "log_metrics", "finish"]
    assert calls(stage)[0][-1] is None


def test_rows_that_were_cut_off_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert reporting.rows_after(path, 0) == frozenset()
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "eval", "step": 2}\n{"kind": "train", "st')
    assert reporting.rows_after(path, 1) == {("eval", 2)}
    path.write_text('{"kind": "train", "step": 1}\n' + "\0" * 40 + 'l", "step": 2}\n{"kind": "train", "step": 2}\n')
    assert reporting.rows_after(path, 0) == {("train", 1), ("train", 2)}, "zeros of a power cut"
    path.write_text('{"note": "mine"}\n{"kind": "train", "step": 2}\n')
    assert reporting.rows_after(path, 0) == {("train", 2)}, "a line that no run wrote"


def test_tensorboard_has_each_step_once(stage: Path) -> None:
    """Other numbers after the checkpoint than before it: the run may have been resumed with other options."""
    record_steps(stage, ("tensorboard",), 0, 3)
    record_steps(stage, ("tensorboard",), 1, 4, scale=0.5)
    shown = tensorboard_events.shown(stage / "tensorboard")
    table = "| prompt | score |\n| --- | --- |\n| a\\|b | 0.5 |\n| c<br>d | 2 |"
    assert shown == {
        "train/loss": [(1, 1.0), (2, 1.0), (3, 1.5), (4, 2.0)],
        "eval/eval_kl": [(1, 10.0), (2, 10.0), (3, 15.0), (4, 20.0)],
        "warning/kl_above_limit": [(2, "kl 12.5: raise it")],
        "samples": [(2, table)],
    }
    assert len(list((stage / "tensorboard").glob("*/hparams.yml"))) == 1
    record_steps(stage, ("tensorboard",), 0, 1)  # with --overwrite
    assert tensorboard_events.shown(stage / "tensorboard")["train/loss"] == [(1, 1.0)]


# --- a tracker that fails, or cannot be had


@pytest.mark.parametrize("fails", ["start", "log_config", "log_metrics", "log_text", "log_table", "finish"])
def test_a_tracker_that_fails_is_left_out(fails: str, stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = stage.parents[1] / "other.py"
    other.write_text(MINE)
    record_steps(stage, (mine(stage, fails), f"{other},path={stage / 'other.jsonl'}"), 0, 3)
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == [1.0, 2.0, 3.0]
    assert [call[0] for call in calls(stage)].count(fails) == 1 and calls(stage)[-1][0] == fails
    assert len((stage / "other.jsonl").read_text().splitlines()) == 11
    output = capsys.readouterr().out
    assert output.count("is left out from here on") == 1 and "no route to host" in output and "mine.py:" in output
    [left_out] = [line for line in lines if line.get("name") == record.LEFT_OUT]
    assert lines[-1] == left_out and left_out["kind"] == "warning" and left_out["step"] == 3
    assert "mine.py fails" in left_out["advice"] and "no route to host" in left_out["advice"]
    assert record.LEFT_OUT in read_meanings()


def test_a_tracker_whose_run_has_no_id_of_text_is_left_out(stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The id is kept in a file of JSON, where a path or a tensor ended the run in a traceback."""
    source = MINE.replace("def start(self, run):", "def start(self, run):\n        return object()")
    assert source != MINE
    other = stage.parents[1] / "other.py"
    other.write_text(source)
    record_steps(stage, (f"{other},path={stage / 'other.jsonl'}",), 0, 2)
    message = "TypeError: start returned object, expected the id of the run as text"
    assert message in capsys.readouterr().out and (stage / "metrics.jsonl").read_text().count('"loss"') == 2


def test_a_metric_has_no_name_of_a_column(tmp_path: Path) -> None:
    recorder = record.Recorder(tmp_path)
    with pytest.raises(UserError, match=r"metrics.jsonl: a metric is named step, as a column of every row; rename it"):
        recorder.write("train", 1, {"loss": 1.0, "step": 7.0})


def test_accelerates_trackers_are_ours() -> None:
    """All but DVCLive, which has a callback for transformers of its own."""
    assert {*plugins.names(trackers.FOLDER)} == {*LOGGER_TYPE_TO_CLASS} - {"dvclive"}


@pytest.mark.parametrize("name", [name for name in LOGGER_TYPE_TO_CLASS if name != "dvclive"])
def test_a_tracker_fits_accelerates_class_and_names_its_package(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    namespace = importlib.machinery.ModuleSpec(name, None)  # a folder of this name in the working directory
    for missing in (None, namespace):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, missing=missing: missing)
        with pytest.raises(UserError, match=f"--report-to {name}: the package is not installed; pip install {name}"):
            trackers.check_trackers([name])
    installed = importlib.machinery.ModuleSpec(name, None, origin="there")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: installed)
    monkeypatch.chdir(tmp_path)
    trackers.check_trackers([name])
    for run_id in (None, "id-7"):
        opened: Any = trackers.open_tracker(name)
        run = trackers.TrackedRun("demo", "step1_sft", tmp_path, 3 if run_id else 0, run_id)
        assert isinstance(opened.open("demo", "step1_sft", run), LOGGER_TYPE_TO_CLASS[name])


def test_a_tracker_that_lacks_a_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    half = "from rlhf.config import Config\nclass Half:\n def start(self, run): ...\ndef build(config): return Half()\n"
    Path("half.py").write_text(half)
    with pytest.raises(UserError, match=r"half\.py: build returned .* Half, which has no function log_config"):
        trackers.check_trackers(["half.py"])

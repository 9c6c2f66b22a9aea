"""benchmarks/ppo_quality.py: the comparison at equal KL, the report, and what is run; no TRL, no models."""

import csv
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks import frontier, page, ppo_quality, ppo_report, trl_judging, trl_trainers
from benchmarks.frontier import Curve, FrontierPoint
from benchmarks.trl_ppo import Recorder, recording
from rlhf.errors import UserError


def curve(kl: list[float], score: list[float]) -> Curve:
    count = len(kl)
    return Curve(np.zeros(count, int), np.arange(1, count + 1), np.array(kl), np.array(score))


def test_a_local_line_is_exact_on_a_line() -> None:
    x = np.array([0.0, 0.3, 1.0, 1.1, 2.5, 3.5, 4.0])
    for at in (0.0, 0.7, 4.0):
        value, error = frontier.local_line(x, 2 - 3 * x, at, 1.2)
        assert value == pytest.approx(2 - 3 * at) and error == pytest.approx(0, abs=1e-9)


def test_a_wide_local_line_is_least_squares_with_its_textbook_error() -> None:
    random = np.random.default_rng(0)
    x = np.linspace(0, 1, 30)
    y = 1 + x + random.normal(size=30)
    value, error = frontier.local_line(x, y, 0.25, 1e6)
    slope, intercept = np.polyfit(x, y, 1)
    residual = ((y - slope * x - intercept) ** 2).sum() / 28
    textbook = np.sqrt(residual * (1 / 30 + (0.25 - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()))
    assert (value, error) == (pytest.approx(intercept + 0.25 * slope), pytest.approx(textbook))


def test_only_kls_that_both_reached_are_compared() -> None:
    ours = curve([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    other = curve([1, 2, 3, 4, 5, 6], [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    points = frontier.compare(ours, other, count=4)
    assert [p.kl for p in points] == pytest.approx([1, 2, 3, 4])
    assert [p.gain for p in points] == pytest.approx([0.5] * 4)
    assert "at least as high at every KL compared" in frontier.statement(points) and "4 higher" in frontier.statement(
        points
    )
    assert "lower at 4 of the 4" in frontier.statement(frontier.compare(other, ours, count=4))
    assert frontier.compare(curve([0, 1], [0, 0]), curve([2, 3], [0, 0])) == []
    assert "nothing is compared" in frontier.statement([])


def test_a_difference_within_its_interval_is_called_equal() -> None:
    point = FrontierPoint(1.0, (0.5, 0.03), (0.54, 0.04))
    assert (point.gain, point.gain_ci95) == (pytest.approx(-0.04), pytest.approx(0.05))
    assert point.verdict == "equal within the interval"
    assert FrontierPoint(1.0, (0.4, 0.03), (0.5, 0.04)).verdict == "lower"
    assert FrontierPoint(1.0, (0.4, float("nan")), (0.5, 0.04)).verdict == "compared by too few points"


def test_band_is_mean_least_and_greatest_over_seeds() -> None:
    c = Curve(np.array([0, 0, 1, 1]), np.array([1, 2, 1, 2]), np.zeros(4), np.array([0.0, 1.0, 0.5, 3.0]))
    assert c.by_iteration(c.score).tolist() == [[0.25, 2.0], [0.0, 1.0], [0.5, 3.0]]


def write_run(folder: Path, system: str, judged: list[list[float]], kl: list[float]) -> Path:
    """Responses of a run whose iterations have these true scores, and this KL each."""
    rollouts, (metrics, seconds) = ppo_report.ROLLOUTS[system], ppo_report.METRICS[system]
    (folder / rollouts).parent.mkdir(parents=True)
    rows = [
        {"iteration": i, "prompt": f"p{j}", "response": "r", "kl": kl[i - 1], "tokens": 4 + 2 * j, "ended": j == 0}
        | {"learned": 1.0, "vader": score}
        for i, scores in enumerate(judged, 1)
        for j, score in enumerate(scores)
    ]
    (folder / rollouts).write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = [{"iteration": i + 1, seconds: 10.0 + i} for i in range(len(judged))] + [{"eval_score": 1.0}]
    (folder / metrics).write_text("".join(json.dumps(row) + "\n" for row in times))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[tuple[str, int], Path]:
    ours = write_run(tmp_path / "ours-0", "ours", [[0.0, 0.2], [0.4, 0.6], [0.8, 1.0]], [0.0, 1.0, 2.0])
    trl = write_run(tmp_path / "trl-0", "trl", [[0.0, 0.2], [0.3, 0.5], [0.4, 0.8]], [0.0, 1.0, 2.0])
    return {("ours", 0): ours, ("trl", 0): trl}


def test_report_writes_every_iteration(folders: dict[tuple[str, int], Path], tmp_path: Path, capsys: Any) -> None:
    ppo_report.report(folders, tmp_path / "none.json", tmp_path / "results", "small")
    with (tmp_path / "results" / "small.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and tuple(rows[0]) == ppo_report.COLUMNS
    assert [float(row["true_score"]) for row in rows] == [0.1, 0.5, 0.9, 0.1, 0.4, 0.6]
    second = {"iteration": "2", "true_score_se": "0.1", "kl": "1.0", "response_length": "5.0", "ended": "0.5"}
    assert second.items() <= rows[1].items() and rows[1]["seconds"] == "11.0"
    printed = capsys.readouterr().out
    assert "| ours | 1 | 3 | 0.500 |" in printed and "## True score at the same KL" in printed
    assert (tmp_path / "results" / "small.md").read_text() in printed


def test_other_prompts_are_noticed(folders: dict[tuple[str, int], Path]) -> None:
    path = folders["trl", 0] / ppo_report.ROLLOUTS["trl"]
    path.write_text(path.read_text().replace('"p1"', '"p2"'))
    with pytest.raises(AssertionError, match="other prompts"):
        ppo_report.require_same_prompts(folders)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_picture(folders: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    rows = [row for key, folder in folders.items() for row in ppo_report.iteration_rows(key, folder)]
    curves = ppo_report.curves(rows)
    page.draw(tmp_path / "small.svg", (1, 3), (15, 4.2), lambda panels: ppo_report.plot(panels, curves))
    drawn = ElementTree.parse(tmp_path / "small.svg")
    assert {"true score (the judge)", "ours", "TRL 1.12"} <= {text.text for text in drawn.findall(".//{*}text")}


def test_step_3_gets_the_recipe_and_a_judge_that_counts_for_nothing() -> None:
    options = ppo_quality.Options(base="b", output_dir="o", data_path=("rt_polarity:d",), total_episodes=128)
    ppo = ppo_quality.ppo_options(options, 2)
    assert (ppo.actor_model, ppo.reward_model, ppo.output_dir) == ("b/step1_sft", "b/step2_reward", "o/ours-2")
    assert (ppo.reward, ppo.seed, ppo.total_episodes) == (("learned", "0*vader"), 2, 128)
    assert (ppo.kl_coef, ppo.response_length, ppo.data_path) == (0.05, 24, ("rt_polarity:d",))
    assert ppo.export_rollouts


def test_base_is_steps_1_and_2_of_the_recipe() -> None:
    words = ppo_quality.base_command(ppo_quality.Options(recipe="r.yaml", model="m", output_dir="o"))[1:]
    assert " ".join(words) == (
        "train.py --config r.yaml --steps 1 2 --output-dir o/base --actor-model m --reward-model m"
    )


@pytest.mark.parametrize("last", ["versions.json", "rollouts.jsonl"])
def test_a_finished_run_of_trl_is_not_taken_for_one_with_other_settings(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trl-0"
    folder.mkdir()
    (folder / last).touch()
    (folder / "settings.json").write_text(json.dumps({"dtype": "fp32", "prompts": [[1]], "output_dir": "before"}))
    judged: list[Path] = []
    monkeypatch.setattr(trl_judging, "plan", lambda ppo: None)
    monkeypatch.setattr(trl_judging, "judge", lambda ppo, plan, path: judged.append(path))
    monkeypatch.setattr(ppo_quality, "ppo_options", lambda options, seed: None)

    def run(**settings: Any) -> None:
        monkeypatch.setattr(ppo_quality, "trl_settings", lambda *_: {"output_dir": "now", **settings})
        ppo_quality.run_trl(ppo_quality.Options(output_dir=str(tmp_path)), 0)

    run(dtype="fp32", prompts=((1,),))
    assert judged == [folder] * (last == "versions.json")
    with pytest.raises(
        UserError, match=r"other settings \(dtype, prompts\), .*another --output-dir, or remove .*trl-0"
    ):
        run(dtype="bf16", prompts=[[1], [2]])


def test_a_command_gets_its_environment_and_its_failure_is_an_error() -> None:
    check = "import os; raise SystemExit(os.environ.get('PEER') != 'trl')"
    ppo_quality.run([sys.executable, "-c", check], {"PEER": "trl"})
    with pytest.raises(UserError, match="ended with code 1"):
        ppo_quality.run([sys.executable, "-c", check])


class FakeTrainer:
    """The two functions of TRL's module that are listened to."""

    @staticmethod
    def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return logits

    @staticmethod
    def get_reward(model: str, ids: torch.Tensor, pad: int, context: int) -> tuple[None, torch.Tensor, None]:
        return None, torch.tensor([5.0, 6.0]), None


def test_what_trl_samples_is_taken_down_without_padding() -> None:
    module: Any = FakeTrainer()
    recorder = Recorder(module, "reward", pad=0)
    ids = torch.tensor([[9, 3, 4, 1], [9, 3, 1, 0]])  # one prompt token, then the response, 1 ends it
    with torch.no_grad():
        module.selective_log_softmax(torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 7.0]]), ids[:, 1:])
        module.selective_log_softmax(torch.tensor([[-2.0, -2.0, -2.0], [-1.5, -2.0, 7.5]]), ids[:, 1:])
        module.get_reward("critic", ids, 0, 1)
        module.get_reward("reward", ids, 0, 1)
    module.selective_log_softmax(torch.zeros(2, 3), ids[:, 1:])  # the update's, with gradients
    first, second = recorder.pop_rows()
    assert (first["response_ids"], second["response_ids"]) == ([3, 4, 1], [3, 1])
    assert (first["kl"], second["kl"]) == (0.0, 1.5) and (first["learned"], second["learned"]) == (5.0, 6.0)
    assert first["kl_k3"] == pytest.approx((np.exp(-1) - 1 + 1) + 0 + (np.exp(1) - 1 - 1))
    assert recorder.pop_rows() == []


def test_an_iteration_of_trl_is_written_when_it_logs(tmp_path: Path) -> None:
    class Trainer:
        """Nothing of TRL's."""

    class Rows:
        def pop_rows(self) -> list[dict[str, float]]:
            return [{"kl": 1.0}, {"kl": 3.0}]

    trainer = recording(Trainer, Rows(), tmp_path)()
    for _ in range(2):
        trainer.log({"objective/kl": 2.0, "objective/scores": 0.5, "val/ratio": 1.0})
    metrics, responses = (ppo_report.read(tmp_path / f"{name}.jsonl") for name in ("metrics", "responses"))
    assert [row["iteration"] for row in metrics] == [1, 2] and all(0 <= row["seconds"] < 60 for row in metrics)
    assert [(row["iteration"], row["kl"]) for row in responses] == [(1, 1.0), (1, 3.0), (2, 1.0), (2, 3.0)]


def test_trl_gets_left_padded_prompts() -> None:
    result = trl_trainers.prompt_batches([[[5, 6], [7]], [[8]]], pad=0)
    assert [part["input_ids"].tolist() for part in result] == [[[5, 6], [0, 7]], [[8]]]

"""The benchmark of the algorithms: what it reads from runs, what it says of them, and that it makes none twice."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks import algorithms
from rlhf.config import parser

FOUND = {
    "eval_judge_before": 0.25,
    "eval_judge": 0.75,
    "eval_judge_gain_ci95": 0.125,
    "eval_kl": 2.0,
    "eval_score": 4.0,
    "eval_distinct_2_before": 0.5,
    "eval_distinct_2": 0.375,
}
ROWS = [
    {"kind": "train", "step": 1, "seconds": 1.0, "first_ratio_std": 1e-7, "first_approx_kl": -3e-7},
    {"kind": "train", "step": 2, "seconds": 2.0, "first_ratio_std": 4e-7, "first_approx_kl": 2e-7},
    {"kind": "eval", "step": 0, "seconds": 3.5},
]


def finished(directory: Path, **metrics: float) -> Path:
    """A run's directory as step 3 leaves it, with other numbers for `metrics`."""
    stage = directory / "step3_ppo"
    stage.mkdir(parents=True)
    (stage / "manifest.json").write_text(json.dumps({"metrics": FOUND | metrics}))
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return stage


def test_a_run_is_read_by_hand(tmp_path: Path) -> None:
    result = algorithms.read("rloo", 3, finished(tmp_path))
    assert (result.algorithm, result.seed, result.gain, result.gain_ci95) == ("rloo", 3, 0.5, 0.125)
    assert (result.first_ratio_std, result.first_approx_kl, result.seconds) == (4e-7, 3e-7, 3.5)
    assert result.improved
    assert not algorithms.read("rloo", 3, finished(tmp_path / "wide", eval_judge_gain_ci95=0.5)).improved


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(algorithms, "_train", lambda *words: called.append(words))
    finished(tmp_path / "ppo-0")
    (tmp_path / "models" / "step2_reward").mkdir(parents=True)
    (tmp_path / "models" / "step2_reward" / "manifest.json").touch()
    algorithms.make_models(tmp_path / "models", 0)
    algorithms.run("ppo", 0, tmp_path / "models", tmp_path / "ppo-0")
    assert not called
    with pytest.raises(FileNotFoundError):  # this run is started, and our stand-in leaves nothing
        algorithms.run("a2c", 0, tmp_path / "models", tmp_path / "a2c-0")
    algorithms.make_models(tmp_path / "others", 4)
    assert [words[words.index("--steps") + 1 : words.index("--seed")] for words in called] == [("3",), ("1", "2")]


def test_an_algorithm_without_ratios_has_empty_cells(tmp_path: Path) -> None:
    stage = finished(tmp_path)
    rows = [{name: value for name, value in row.items() if not name.startswith("first_")} for row in ROWS]
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = algorithms.read("best_of_n", 0, stage)
    assert result.starts_on_policy and len(algorithms.summary([result])) == 1
    ppo = algorithms.read("ppo", 0, finished(tmp_path / "ppo"))
    assert "ratio std at most 4.0e-07" in algorithms.summary([result, ppo])[-1]
    algorithms.write([result], tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        [row] = csv.DictReader(file)
    assert (row["first_ratio_std"], row["first_approx_kl"], row["gain"]) == ("", "", "0.5")


def test_what_is_said_of_several_seeds(tmp_path: Path) -> None:
    judged = {0: 0.75, 1: 0.35, 2: 0.2}  # improves, within its interval, below the start
    results = [algorithms.read("a2c", s, finished(tmp_path / str(s), eval_judge=value)) for s, value in judged.items()]
    algorithms.write(results, tmp_path / "results" / "a.csv")
    table = (tmp_path / "results" / "a.md").read_text()
    assert "| a2c | 0 | 0.250 | 0.750 | 0.500 ± 0.125 | 2.00 | 0.500 | 0.375 | 4 |" in table
    assert "a2c: 1 of 3 seeds improve, 1 below their start; gain -0.050 to 0.500, mean 0.183" in table
    with (tmp_path / "results" / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["after"]) for row in rows] == [0.75, 0.35, 0.2] and float(rows[0]["first_ratio_std"]) == 4e-7


@pytest.mark.parametrize("algorithm", algorithms.Options().algorithms)
def test_settings_are_words_that_train_takes(algorithm: str) -> None:
    words = algorithms.settings(algorithm)
    assert parser.peek(words, "ppo.algorithm", "ppo") == algorithm

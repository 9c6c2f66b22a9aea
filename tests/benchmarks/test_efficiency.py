"""What a policy is worth in samples, with responses whose best-of-n is known; nothing is trained."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import efficiency, peers, trl_ppo
from benchmarks.cells import Cell
from rlhf.chain import line

START = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3)
"""the best of 2 of these four has a mean score of 5/6, the best of 3 of 1"""


def test_a_policy_with_the_scores_of_best_of_2_is_worth_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's scores are the negative ones, so that its best of n is the worst."""
    options = efficiency.Options(output_dir=str(tmp_path))
    options.start(7).parent.mkdir(parents=True)
    torch.save({"score": START, "judge": -START, "kl": torch.zeros(3, 4)}, options.start(7))
    asked = []

    def respond(model: str, ppo: object, prompts: Path, samples: int) -> dict[str, torch.Tensor]:
        asked.append((model, prompts, samples))
        of_best = torch.full((3, 2), 5 / 6, dtype=torch.float64)
        return {"score": of_best, "judge": of_best - 1.5, "kl": torch.full((3, 2), math.log(2) - 0.5)}

    monkeypatch.setattr(efficiency, "respond", respond)
    numbers = efficiency.numbers_of(options, "policy", SimpleNamespace(), 7)
    assert asked == [("policy", options.start(7).with_name("prompts.jsonl"), 16)]
    assert numbers["kl"] == pytest.approx(math.log(2) - 0.5) and numbers["judge"] == pytest.approx(-2 / 3)
    assert numbers["worth"] == pytest.approx(2) and numbers["efficiency"] == pytest.approx(1)
    assert math.isnan(numbers["judge_efficiency"]) and numbers["judge_worth"] == 1.0  # of what best-of-n loses


def test_efficiency_at_a_kl_lies_between_the_policies_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a share s of the line has 4 s^2 nats and the efficiency s; the shares around 3 nats have 2.25 and 4."""
    written: dict[str, float] = {}

    def between(reference: str, policy: str, position: float, out: Path) -> None:
        assert (reference, policy) == ("sft", "run/step3_ppo/actor")
        written[str(out)] = position

    def numbers_of(_: object, model: str, *_arguments: object) -> dict[str, float]:
        return {"kl": 4 * written[model] ** 2, "efficiency": written[model]}

    monkeypatch.setattr(line, "between", between)
    monkeypatch.setattr(efficiency, "numbers_of", numbers_of)
    ppo = SimpleNamespace(output_dir="run", actor_model="sft")
    numbers = efficiency.measure_policy(efficiency.Options(), ppo, 0)["metrics"]
    assert (numbers["kl"], numbers["efficiency"], numbers["efficiency_at_1"]) == (4.0, 1.0, 0.5)
    assert numbers["efficiency_at_3"] == pytest.approx(0.75 + 0.25 * 0.75 / 1.75)
    assert numbers["efficiency_at_4"] == 1.0 and math.isnan(efficiency.at(9.1, [0, 9], [1, 1]))


def test_trl_runs_with_the_settings_of_step_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its policy is then where step 3 has one."""
    ppo = SimpleNamespace(output_dir=str(tmp_path / "run"))
    commands = []

    def run(command: list[str], env: dict[str, str], **_: object) -> None:
        commands.append((command[1:3], json.loads(Path(command[3]).read_text()), env["OMP_NUM_THREADS"]))
        (Path(command[3]).parent / "model").mkdir()
        (Path(command[3]).parent / "model" / "config.json").write_text("{}")

    monkeypatch.setattr(trl_ppo, "settings_of", lambda *given: {"same": given[0] is ppo, "folder": str(given[1])})
    monkeypatch.setattr(peers.subprocess, "run", run)
    monkeypatch.setattr(peers, "environment", lambda version: {"PYTHONPATH": version})
    trl_ppo.train(ppo)
    folder = str(tmp_path / "run" / "trl")
    assert commands == [(["-m", "benchmarks.trl_ppo"], {"same": True, "folder": folder}, "1")]
    assert (tmp_path / "run" / "step3_ppo" / "actor" / "config.json").is_file()


def test_report(tmp_path: Path) -> None:
    options = efficiency.Options(results=str(tmp_path / "docs"), output_dir=str(tmp_path))
    cells = []
    for seed, share in enumerate((0.5, 0.6, 0.7)):
        options.start(seed).parent.mkdir(parents=True)
        torch.save({"score": START, "judge": START, "kl": START}, options.start(seed))
        values = (2.0 + seed, 0.5, 0.4, 3.0, 2.5, share, 0.9, share, 1.0, 1.0, math.nan)
        numbers = dict(zip(efficiency.NUMBERS, values, strict=True))
        cells.append(Cell("some", seed, 10.0, numbers))
    efficiency.report(cells, ["not run", "some"], options)
    table = (tmp_path / "docs" / "efficiency.md").read_text().splitlines()
    # t of 2 degrees of freedom is 4.303: 4.303 * 0.1 / sqrt(3) = 0.248
    [row] = (line.strip("| ").split(" | ") for line in table[2:])
    assert row[:9] == ["some", "3", "3.00", "0.500", "0.400", "3.0", "2.5", "0.60 ± 0.25", "0.90 ± 0.00"]
    assert row[9:] == ["0.60 ± 0.25", "1.00 ± 0.00", "1.00 ± 0.00", "", "10"]
    line = (tmp_path / "docs" / "efficiency.csv").read_text().splitlines()[1]
    assert line == "some,0,2,0.5,0.4,3,2.5,0.5,0.9,0.5,1,1,nan,10"

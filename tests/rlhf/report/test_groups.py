"""For whom a stage got better, against Python's statistics; what is said of a group, and of one that is too small."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from rlhf.chain.stages import STAGES
from rlhf.maths.intervals import student_t
from rlhf.report.groups import Groups, groups
from rlhf.report.records import read_runs
from rlhf.report.verdict import judge
from rlhf.report.write import render_report
from tests.support import recorded_runs

MEANS = {"french": -0.02, "english": 0.9, "german": -0.8}
"""the gain by the judge, which has a deviation of 0.3"""
SIZES = {"french": 50, "english": 40, "german": 20, "danish": 19, "": 3}


def found(run: Path, step: int) -> Groups:
    result = groups(read_runs([str(run)], [*STAGES.values()])[0].stages[step - 1])
    assert result is not None
    return result


def samples_in_groups(path: Path) -> dict[str, list[float]]:
    """Give the samples groups in a mixed order, and gains by the judge, which are returned by group."""
    draw, rows = random.Random(1), [json.loads(line) for line in path.read_text().splitlines()]
    names = [name for name, size in SIZES.items() for _ in range(size)]
    draw.shuffle(names)
    gains: dict[str, list[float]] = {}
    for row, name in zip(rows, names, strict=True):
        gains.setdefault(name, []).append(draw.gauss(MEANS.get(name, 0.0), 0.3))
        row |= {"judge": row["judge_before"] + gains[name][-1]} | ({"group": name} if name else {})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return gains


def test_the_gain_of_each_group_has_an_interval_that_holds_for_all(tmp_path: Path) -> None:
    run = recorded_runs.run(tmp_path / "run", (1.0, 0.5), [f"answer {i}" for i in range(sum(SIZES.values()))])
    path = run / "step3_ppo/samples.jsonl"
    gains = samples_in_groups(path)
    by_judge = {each.group: each for each in found(run, 3).results if each.label == "judge"}
    assert [*by_judge] == ["english", "french", "german"]
    for name, each in by_judge.items():
        mean, half = statistics.fmean(gains[name]), statistics.stdev(gains[name]) / SIZES[name] ** 0.5
        half *= student_t(SIZES[name] - 1, 3)
        expected = (mean, mean - half, mean + half)
        assert (each.interval.mean, each.interval.low, each.interval.high) == pytest.approx(expected, rel=1e-6)
    low, high = by_judge["french"].interval.low, by_judge["french"].interval.high
    shown = f"between −{-low:.2f} and {high:.2f}; a loss of up to {-low:.2f} is not excluded"
    assert by_judge["french"].line.startswith("french (50 prompts): gain ") and by_judge["french"].line.endswith(shown)
    assert by_judge["english"].line.endswith("; better") and by_judge["german"].line.endswith("; worse")
    assert found(run, 3).left_out == "A line needs 20 held-out rows; 19 in 1 smaller group and 3 in no group have none."
    page = render_report(read_runs([str(run)], [*STAGES.values()]), [*STAGES.values()])
    assert "german (20 prompts): gain " in page and "danish (" not in page and "19 in 1 smaller group" in page


def test_groups_do_not_change_the_verdict(tmp_path: Path) -> None:
    """Nor has a run without groups a table of them."""
    run = recorded_runs.run(tmp_path / "run", responses=[f"answer {i}" for i in range(40)])
    path, declarations = run / "step3_ppo/samples.jsonl", [*STAGES.values()]
    [before] = read_runs([str(run)], declarations)
    assert [groups(stage) for stage in before.stages] == [None] * 3
    assert "For whom" not in render_report([before], declarations)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for i, row in enumerate(rows):
        row |= {"group": "worse", "judge": row["judge_before"] - 1} if i % 2 else {"group": "better"}
    ungrouped = [{name: value for name, value in row.items() if name != "group"} for row in rows]
    verdicts = []
    for version in (rows, ungrouped):
        path.write_text("".join(json.dumps(row) + "\n" for row in version))
        verdicts.append(judge(read_runs([str(run)], declarations)[0]))
    assert verdicts[0] == verdicts[1]


def test_the_accuracy_of_each_group_of_pairs(tmp_path: Path) -> None:
    """A list of three pairs counts as one; 24 of 30 are right, and 12 of 24."""
    run = recorded_runs.run(tmp_path / "run")
    table: list[tuple[float, float, str, int]] = []  # chosen, rejected, group, element
    for i in range(30):
        table += [(1.0, 0.0 if i < 24 else 2.0, "helpful", i)] * (3 if i % 2 else 1)
    table += [(float(i % 2), 0.5, "harmless", 30 + i) for i in range(24)]
    table += [(1.0, 0.0, "few", 54 + i // 2) for i in range(38)]  # 19 lists
    random.Random(2).shuffle(table)
    columns: dict[str, Any] = dict(
        zip(("chosen", "rejected", "group", "element"), map(list, zip(*table, strict=True)), strict=True)
    )
    columns["weight"] = [1.0] * len(table)
    (run / "step2_reward/heldout_scores.json").write_text(json.dumps(columns))
    result = found(run, 2)
    ends = {}
    for right, count in ((24, 30), (12, 24)):  # with one more pair won, and one more lost
        values = [1.0] * (right + 1) + [0.0] * (count - right + 1)
        half = student_t(count + 1, 2) * statistics.stdev(values) / (count + 2) ** 0.5
        ends[count] = (right / count, statistics.fmean(values) - half, statistics.fmean(values) + half)
    for each, count in zip(result.results, (24, 30), strict=True):
        interval = each.interval
        assert (interval.mean, interval.low, interval.high) == pytest.approx(ends[count], rel=1e-6)
    assert result.results[0].line.startswith("harmless (24 pairs): 50 %, between ")
    assert result.results[0].line.endswith(" %; guessing is not excluded")
    assert result.results[1].line.startswith("helpful (30 pairs): 80 %, between ")
    assert result.results[1].line.endswith(" %; better than guessing")
    assert result.left_out == "A line needs 20 held-out rows; 38 in 1 smaller group have none."

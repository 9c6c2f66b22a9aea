"""benchmarks/harmless.py: the division of the dialogues, the arithmetic of the table, and a run of tiny models."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchmarks import harmless
from benchmarks.harmless import COLUMNS, Options
from rlhf.errors import UserError
from rlhf.maths import intervals
from rlhf.models.scalar import HEAD


def write_pairs(path: Path, firsts: list[str]) -> None:
    rows = [
        {
            side: f"\n\nHuman: {first}\n\nAssistant: Yes.\n\nHuman: And then?\n\nAssistant: {response}"
            for side, response in (("chosen", "kind and calm ."), ("rejected", "rude ."))
        }
        for first in firsts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def recipe(folder: Path) -> str:
    options = {
        "actor_model": "demo-llama", "reward_model": "demo-llama", "max_prompt_length": 32, "max_length": 64,
        "dtype": "fp32", "max_eval_rows": 8,
        "sft": {"batch_size": 8}, "reward": {"batch_size": 8, "learning_rate": 0.0, "head_learning_rate": 1e-2},
        "ppo": {"response_length": 8, "total_episodes": 16, "batch_size": 8, "num_ppo_epochs": 1, "eval_samples": 4},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    return str(folder / "recipe.yaml")


def test_a_first_message_has_one_part(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", [f"question {i % 400}" for i in range(800)])
    options = Options(
        data_path=str(tmp_path / "pairs.jsonl"), recipe=recipe(tmp_path), output_dir=str(tmp_path / "out")
    )
    harmless.divide(options)
    firsts = {}
    for part in ("gold", "test", "main"):
        rows = [json.loads(row) for row in (options.folder / f"{part}.jsonl").read_text().splitlines()]
        firsts[part] = [row["chosen"].split("\n\nAssistant:")[0] for row in rows]
    assert sum(map(len, firsts.values())) == 800
    assert not set(firsts["gold"]) & set(firsts["main"]) and not set(firsts["test"]) & set(firsts["main"])
    assert 0.35 < len(firsts["gold"]) / 800 < 0.55 and 0.08 < len(firsts["test"]) / 800 < 0.22  # four deviations of 400
    prompts = [json.loads(row)["prompt"] for row in (options.folder / "prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == len(firsts["test"]) and prompts[0][-1] == {"role": "user", "content": "And then?"}


def test_the_table_by_hand() -> None:
    names = ("seed", "win rate", "length before", "length after")
    rows = [
        [dict(zip(names, (seed, wins, "20.4", "18.6"), strict=True)).get(name, "0.500") for name in COLUMNS]
        for seed, wins in ((0, "0.600"), (1, "0.700"))
    ]
    head, _, one, _, mean, gold = harmless.table(rows, 0.625, 40, 12)
    assert "accuracy (40 pairs)" in head and "(12 prompts)" in head and gold.startswith("| gold | 0.625 | 1 |  |")
    assert head.count("|") == one.count("|") == mean.count("|") == gold.count("|")
    cells = [cell.strip() for cell in one.strip("|").split("|")]
    assert len(cells) == head.count("|") - 1 and cells[5:8] == ["0.600 [0.500, 0.500]", "0.500", "20 → 19"]
    assert f"0.650 ± {intervals.student_t(1) * 0.05:.3f}" in mean  # half the range of two numbers is s / sqrt(2)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data-path no.jsonl: no such file, expected HH-RLHF pairs"):
        harmless.divide(Options(data_path="no.jsonl", output_dir=str(tmp_path)))


def test_a_run_of_tiny_models_has_its_row(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", [f"question {i}" for i in range(150)])
    options = Options(
        data_path=str(tmp_path / "pairs.jsonl"), recipe=recipe(tmp_path), output_dir=str(tmp_path / "out"), seeds=1,
        results=str(tmp_path / "results"),
    )  # fmt: skip
    harmless.divide(options)
    for member in range(harmless.MEMBERS):
        harmless.train_gold(options, member)
    harmless.join_gold(options)
    members = [load_file(options.folder / f"gold-{i}/step2_reward/model/model.safetensors") for i in (0, 1)]
    mean = load_file(options.folder / "gold/model.safetensors")
    assert not torch.equal(members[0][HEAD], members[1][HEAD])
    for name, weight in mean.items():
        exact = (members[0][name].double() + members[1][name].double()) / 2
        # fp32: a sum of two is rounded once, and half of it is exact
        assert ((weight.double() - exact).abs() <= exact.abs() * 2.0**-24).all(), name
    assert "score_mean" not in json.loads((options.folder / "gold/config.json").read_text())
    harmless.train_policy(options, 0)
    harmless.report(options)
    with (tmp_path / "results/harmless.csv").open(encoding="utf-8") as file:
        [row] = csv.DictReader(file)
    compared = json.loads((options.run(0) / "compared/results.json").read_text())
    assert float(row["win rate"]) == pytest.approx(compared["policies"][1]["win_rate"]["mean"], abs=1e-3)
    assert float(row["kl"]) == pytest.approx(compared["policies"][1]["kl"]["mean"], abs=1e-3)
    assert compared["options"]["reward"] == f"learned,model={options.folder / 'gold'}"
    assert "| 0 | " in (tmp_path / "results/harmless.md").read_text()

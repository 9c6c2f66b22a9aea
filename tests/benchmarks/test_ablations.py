"""The world of stories, and the arithmetic of ablations beside oracles; nothing is trained."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks import ablations, cells, stories
from benchmarks.cells import Cell, Variant
from rlhf.errors import UserError
from tests.support import tiny

HELD_OUT = {"eval_judge_before": 0.0, "eval_judge": 0.5, "eval_kl": 2.0, "eval_distinct_2": 0.5}


def cell(variant: str, seed: int, kl: list[float], score: list[float]) -> Cell:
    return Cell(variant, seed, 1.0, HELD_OUT, tuple(kl), tuple(score))


def lines(variant: str, slopes: list[float], intercept: float = 0.1) -> list[Cell]:
    """A run for each slope, seeds 0, 1, ..., whose points lie on a line."""
    kl = [0.0, 0.5, 1.0, 2.0, 2.5, 3.0]
    return [cell(variant, seed, kl, [intercept + slope * x for x in kl]) for seed, slope in enumerate(slopes)]


def test_a_local_line_is_exact_on_a_line() -> None:
    x = np.array([0.0, 0.3, 1.0, 1.1, 2.5, 3.5, 4.0])
    for at in (0.0, 0.7, 4.0):
        assert ablations.local_line(x, 2 - 3 * x, at, 1.2) == pytest.approx(2 - 3 * at)


def test_a_wide_local_line_is_that_of_least_squares() -> None:
    x = np.linspace(0, 1, 30)
    y = 1 + x + np.random.default_rng(0).normal(size=30)
    slope, intercept = np.polyfit(x, y, 1)
    assert ablations.local_line(x, y, 0.25, 1e6) == pytest.approx(intercept + 0.25 * slope)


def test_differences_are_paired_by_seed_at_equal_kl() -> None:
    default, other = lines("default", [0.1, 0.2, 0.3]), lines("other", [0.15, 0.3, 0.45])
    result = ablations.compare(default, [other[2], other[0], other[1]], 2.0)  # the order does not matter
    assert result.seeds == 3 and result.score == pytest.approx(0.1 + 2 * 0.3) and result.difference is not None
    assert result.difference.mean == pytest.approx(0.2)  # of 0.1, 0.2, 0.3, whose standard deviation is 0.1
    half = (result.difference.high - result.difference.low) / 2
    assert half == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=0.01)  # t of 2 degrees of freedom, from a table
    assert result.verdict == "equal"
    assert ablations.compare(default, lines("best", [0.3, 0.4, 0.5]), 2.0).verdict == "higher"
    assert ablations.compare(default, lines("worst", [0.0, 0.1, 0.2]), 2.0).verdict == "lower"


def test_a_kl_that_a_run_did_not_reach_is_not_extrapolated() -> None:
    short = cell("short", 0, [0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    assert ablations.score_at(short, 1.0) == pytest.approx(1.0) and ablations.score_at(short, 2.0) is None
    result = ablations.compare(lines("default", [0.1, 0.2]), [short], 2.0)
    assert (result.seeds, result.difference, result.verdict) == (0, None, "not reached")


def test_report(tmp_path: Path) -> None:
    options = ablations.Options(results=str(tmp_path), name="a", kl=(1.0, 2.0))
    (tmp_path / "a.md").write_text("# Page\n\n| an older table |\n|---|\n\nText.\n")
    default, better = lines("default", [0.1, 0.2, 0.3]), lines("better", [0.3, 0.4, 0.5])
    ablations.report([*better, *default], ["default", "without a run", "better"], options)  # seed 0 of the first late
    table = (tmp_path / "a.md").read_text()
    assert "| default | 0.300 [3] | 0.500 [3] | 0.600 | 2.50 | 0.50 | 1 |" in table
    assert "| better | **+0.200 ± 0.000 [3]** | **+0.400 ± 0.000 [3]** |" in table
    assert table.startswith("# Page\n\n| variant") and table.endswith(" |\n\nText.\n") and "older" not in table
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 7
    if (tmp_path / "a.svg").is_file():  # with matplotlib
        drawn = {text.text for text in ElementTree.parse(tmp_path / "a.svg").findall(".//{*}text")}
        assert {"default", "better"} <= drawn


def test_the_first_variant_of_the_file_is_the_reference_or_there_is_no_report(tmp_path: Path) -> None:
    options = ablations.Options(results=str(tmp_path), kl=(1.0,))
    with pytest.raises(UserError, match="default: got no finished run, expected one of the variant"):
        ablations.report(lines("better", [0.3]), ["default", "better"], options)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="greater than 0"):
        ablations.Options(kl=(0.0,))


def test_a_kl_that_one_seed_reached_has_no_interval() -> None:
    runs = {"default": lines("default", [0.1, 0.2]), "one": lines("one", [0.3])}
    runs["short"] = [cell("short", 0, [0.0, 0.5], [0.0, 0.5])]
    table = ablations.table(runs, ablations.Options(kl=(1.0,)))
    assert [line.split(" | ")[1] for line in table[2:]] == ["0.250 [2]", "1 seed", "not reached"]


def test_variants_share_the_models_that_they_do_not_change(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("ppo:\n  judge: vader\n")
    file = tmp_path / "variants.yaml"
    centred = "--reward.objective pairwise,centering=0.01"
    file.write_text(f"default:\nlam 1: --ppo.lam 1\ncentred: {centred} --ppo.kl-coef 0.1\n")
    variants = {variant.name: variant for variant in cells.read_variants(str(file))}
    assert list(variants) == ["default", "lam 1", "centred"]
    assert variants["centred"].words_but("ppo") == tuple(centred.split())
    options = cells.CellOptions(recipe=str(recipe), output_dir=str(tmp_path))
    sft, reward = zip(*(cells.model_directories(options, each, 0) for each in variants.values()), strict=True)
    assert len(set(sft)) == 1 and reward[0] == reward[1] != reward[2]
    before = {cells.cell_file(options, each, seed) for each in variants.values() for seed in (0, 1)}
    recipe.write_text("ppo:\n  judge: vader\n  lam: 1\n")
    after = {cells.cell_file(options, each, seed) for each in variants.values() for seed in (0, 1)}
    assert len(before) == len(after) == 6 and not before & after, "a changed recipe makes new cells"


def test_a_variant_names_the_reward_model_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, file = tmp_path / "recipe.yaml", tmp_path / "variants.yaml"
    recipe.write_text("ppo:\n  judge: vader\n")
    options = cells.CellOptions(recipe=str(recipe), output_dir=str(tmp_path))
    line = 'critic of it: --ppo.critic-model "{every token}"\n'
    file.write_text("every token: --reward.objective every_token,token_coef=1\n" + line)
    tokens, critic = cells.read_variants(str(file))
    configs = []

    class Stopped(Exception):
        pass

    def stop(config: Any) -> None:
        configs.append(config)
        raise Stopped

    monkeypatch.setattr("step3_ppo.stage.run", stop)
    with pytest.raises(Stopped):
        cells.run_cell(options, critic, 3, cells.read_run)
    own, other = (cells.model_directories(options, each, 3)[1] for each in (critic, tokens))
    assert (configs[0].reward_model, configs[0].critic_model) == (str(own), str(other)) and own != other
    old = cells.cell_file(options, critic, 3)
    file.write_text("every token: --reward.objective every_token,token_coef=2\n" + line)
    assert cells.cell_file(options, cells.read_variants(str(file))[1], 3) != old, "the other model is another"


def test_a_cell_is_read_from_a_run_and_a_finished_one_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "step3_ppo"
    stage.mkdir()
    (stage / "manifest.json").write_text(json.dumps({"metrics": HELD_OUT}))
    row = {"score": 2.0, "score_std": 1.0, "score_learned": 2.0, "score_vader": 0.25, "score_length_correlation": 0.5}
    rows = [{"kind": "eval"}, {"kind": "train", "skipped_iteration": 1.0}]
    rows += [{"kind": "train", "kl": kl, **row, "score_learned_std": 1.0, "score_vader_std": 1.0} for kl in (0.0, 1.5)]
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("ppo:\n  judge: vader\n")
    options = cells.CellOptions(recipe=str(recipe), output_dir=str(tmp_path / "out"), seeds=1)
    variant = Variant("default", ())
    monkeypatch.setattr("step3_ppo.stage.run", lambda ppo: shutil.copytree(stage, Path(ppo.output_dir) / "step3_ppo"))
    cells.run_cell(options, variant, 0, cells.read_run)
    monkeypatch.undo()
    [result] = cells.run_grid(options, [variant])
    assert result == replace(cell("default", 0, [0.0, 1.5], [0.25, 0.25]), seconds=result.seconds)
    assert not (tmp_path / "out/cells/default").exists() and len(list((tmp_path / "out/cells").iterdir())) == 1


def test_a_reader_prefers_by_bradley_terry() -> None:
    draws = (np.arange(10_000) + 0.5) / 10_000
    share = np.mean([stories.prefers_first(0.5, 0.0, 4.0, draw) for draw in draws])
    assert share == pytest.approx(1 / (1 + math.exp(-2.0)), abs=1e-4)


def test_sentences() -> None:
    text = ' Lily. She said "no!" and ran. The end.'
    assert stories.whole_sentences(text, 1) == " Lily."
    assert stories.whole_sentences(text, 2) == ' Lily. She said "no!"'
    assert stories.whole_sentences(text, 9) is None and stories.whole_sentences(" a\n b.", 1) is None
    assert stories.openings(["a b c", "a  b d", "a", "b a"], 2) == ["a b", "b a"]


def test_the_world_is_the_same_for_one_seed(tmp_path: Path) -> None:
    words = [f"{word}{mark}" for word in ("love", "happy", "sad", "tree", "hate", "fine") for mark in ("", ".", "!")]
    words += [f"word{i}" for i in range(tiny.VOCAB - 4 - len(words))]
    tiny.causal_lm().save_pretrained(tmp_path)
    tiny.tokenizer(words).save_pretrained(tmp_path)
    sizes = {
        "stories": 40,
        "sft": 8,
        "prompts": 8,
        "opening_words": 2,
        "response_words": 1,
        "response_tokens": 24,
        "responses": 2,
    }
    options = stories.Options(model=str(tmp_path), **sizes)
    threads = torch.get_num_threads()
    world = stories.make(options)
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert stories.make(options) == world
    finally:
        torch.set_num_threads(threads)
    assert stories.make(options.model_copy(update={"seed": 1})) != world
    prompts = [{row["prompt"] for row in rows} for rows in world.values()]
    assert all(prompts) and not prompts[0] & prompts[1] and not prompts[2] & (prompts[0] | prompts[1])
    assert all(row["chosen"] != row["rejected"] for row in world["pairs"])

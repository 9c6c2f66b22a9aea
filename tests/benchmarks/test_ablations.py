"""The world of stories, and the arithmetic of ablations and of over-optimisation beside oracles; nothing is trained."""

import json
import math
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks import ablations, cells, gold_model, overoptimisation, overoptimisation_report, stories
from benchmarks.cells import Cell, Variant
from rlhf import rewards
from rlhf.errors import UserError
from tests.support import tiny

HELD_OUT = {"eval_judge_before": 0.0, "eval_judge": 0.5, "eval_kl": 2.0, "eval_distinct_2": 0.5}


def cell(variant: str, seed: int, kl: list[float], score: list[float]) -> Cell:
    return Cell(variant, seed, tuple(kl), tuple(score), tuple(score), HELD_OUT, 1.0)


def lines(variant: str, slopes: list[float], intercept: float = 0.1) -> list[Cell]:
    """A run for each slope, seeds 0, 1, ..., whose points lie on a line."""
    kl = [0.0, 0.5, 1.0, 2.0, 2.5, 3.0]
    return [cell(variant, seed, kl, [intercept + slope * x for x in kl]) for seed, slope in enumerate(slopes)]


def test_differences_are_paired_by_seed_at_equal_kl() -> None:
    default, other = lines("default", [0.1, 0.2, 0.3]), lines("other", [0.15, 0.3, 0.45])
    result = ablations.compare(default, [other[2], other[0], other[1]], 2.0, 0.5)  # the order does not matter
    assert result.seeds == 3 and result.score == pytest.approx(0.1 + 2 * 0.3) and result.difference is not None
    assert result.difference.mean == pytest.approx(0.2)  # of 0.1, 0.2, 0.3, whose standard deviation is 0.1
    half = (result.difference.high - result.difference.low) / 2
    assert half == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=0.01)  # t of 2 degrees of freedom, from a table
    assert result.verdict == "equal"
    assert ablations.compare(default, lines("best", [0.3, 0.4, 0.5]), 2.0, 0.5).verdict == "higher"
    assert ablations.compare(default, lines("worst", [0.0, 0.1, 0.2]), 2.0, 0.5).verdict == "lower"


def test_a_kl_that_a_run_did_not_reach_is_not_extrapolated() -> None:
    short = cell("short", 0, [0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    assert ablations.score_at(short, 1.0, 0.5) == pytest.approx(1.0) and ablations.score_at(short, 2.0, 0.5) is None
    result = ablations.compare(lines("default", [0.1, 0.2]), [short], 2.0, 0.5)
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
    file.write_text("default:\nlam 1: --ppo.lam 1\ncentred: --reward.centering 0.01 --ppo.kl-coef 0.1\n")
    variants = {variant.name: variant for variant in cells.read_variants(str(file))}
    assert list(variants) == ["default", "lam 1", "centred"]
    assert variants["centred"].words_but("ppo") == ("--reward.centering", "0.01")
    options = cells.CellOptions(recipe=str(recipe), output_dir=str(tmp_path))
    sft, reward = zip(*(cells.model_directories(options, each, 0) for each in variants.values()), strict=True)
    assert len(set(sft)) == 1 and reward[0] == reward[1] != reward[2]
    before = {cells.cell_file(options, each, seed) for each in variants.values() for seed in (0, 1)}
    recipe.write_text("ppo:\n  judge: vader\n  lam: 1\n")
    after = {cells.cell_file(options, each, seed) for each in variants.values() for seed in (0, 1)}
    assert len(before) == len(after) == 6 and not before & after, "a changed recipe makes new cells"
    file.write_text("wrong: lam 1\n")
    with pytest.raises(UserError, match="wrong: got 'lam', expected options"):
        cells.read_variants(str(file))


def test_a_variant_names_the_reward_model_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, file = tmp_path / "recipe.yaml", tmp_path / "variants.yaml"
    recipe.write_text("ppo:\n  judge: vader\n")
    options = cells.CellOptions(recipe=str(recipe), output_dir=str(tmp_path))
    line = 'critic of it: --ppo.critic-model "{every token}"\n'
    file.write_text("every token: --reward.token-coef 1\n" + line)
    tokens, critic = cells.read_variants(str(file))
    configs = []

    class Stopped(Exception):
        pass

    def stop(config: Any) -> None:
        configs.append(config)
        raise Stopped

    monkeypatch.setattr("step3_ppo.stage.run", stop)
    with pytest.raises(Stopped):
        cells.run_cell(options, critic, 3)
    own, other = (cells.model_directories(options, each, 3)[1] for each in (critic, tokens))
    assert (configs[0].reward_model, configs[0].critic_model) == (str(own), str(other)) and own != other
    old = cells.cell_file(options, critic, 3)
    file.write_text("every token: --reward.token-coef 2\n" + line)
    assert cells.cell_file(options, cells.read_variants(str(file))[1], 3) != old, "the other model is another"
    file.write_text(line)
    with pytest.raises(UserError, match=r"critic of it: got '\{every token\}', expected a name of the file"):
        cells.read_variants(str(file))


def test_a_cell_is_read_from_a_run_and_a_finished_one_is_not_repeated(tmp_path: Path) -> None:
    stage = tmp_path / "step3_ppo"
    stage.mkdir()
    (stage / "manifest.json").write_text(json.dumps({"metrics": HELD_OUT}))
    row = {"score": 2.0, "score_std": 1.0, "score_learned": 2.0, "score_vader": 0.25, "score_length_correlation": 0.5}
    rows = [{"kind": "eval"}, {"kind": "train", "skipped_iteration": 1.0}]
    rows += [{"kind": "train", "kl": kl, **row, "score_learned_std": 1.0, "score_vader_std": 1.0} for kl in (0.0, 1.5)]
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = cells.read_run("default", 3, stage, 20.0)
    assert result == Cell("default", 3, (0.0, 1.5), (0.25, 0.25), (2.0, 2.0), HELD_OUT, 20.0)
    options, variant = cells.CellOptions(output_dir=str(tmp_path), seeds=1), Variant("default", ())
    cells.write_cell(cells.cell_file(options, variant, 0), result)
    assert cells.run_grid(options, [variant]) == [result]


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_law_is_recovered_with_its_peak(logarithmic: bool) -> None:
    law = overoptimisation_report.Law(logarithmic, 0.5, 0.2)
    d = np.linspace(0, 6, 2001)
    gain = np.concatenate([[0.0], law.gain(d[1:])])
    result = overoptimisation_report.fit(d, gain, logarithmic)
    assert (result.alpha, result.beta, result.r2) == pytest.approx((0.5, 0.2, 1.0))
    assert result.peak == pytest.approx((d[gain.argmax()], gain.max()), abs=6 / 2000)


def test_r2_counts_the_mean_of_the_residuals() -> None:
    d = np.array([1.0, 2.0, 3.0])
    gain = np.array([1.0, 0.0, 1.0])  # the best d (a - b d) leaves 12/19 times (1, -1, 1/3), whose mean is not 0
    residual = 12 / 19 * np.array([1.0, -1.0, 1 / 3])
    result = overoptimisation_report.fit(d, gain, False)
    assert gain - result.gain(d) == pytest.approx(residual)
    assert result.r2 == pytest.approx(1 - (residual**2).sum() / (2 / 3))


def test_agreement_counts_pairs_of_different_true_scores() -> None:
    gold = torch.tensor([[0.0, 1.0, 0.5, 1.0], [0.0, 1.0, 2.0, 0.0]])
    proxy = torch.tensor([[3.0, 2.0, 4.0, 1.0], [1.0, 2.0, 0.0, 1.0]])  # pairs of columns 0 and 2, 1 and 3
    assert overoptimisation.agreement(proxy, gold) == pytest.approx(2 / 3)


def test_a_reader_prefers_by_bradley_terry() -> None:
    draws = (np.arange(10_000) + 0.5) / 10_000
    share = np.mean([stories.prefers_first(0.5, 0.0, 4.0, draw) for draw in draws])
    assert share == pytest.approx(1 / (1 + math.exp(-2.0)), abs=1e-4)


def test_a_reader_rates_by_the_true_score_on_average() -> None:
    draws = (np.arange(10_000) + 0.5) / 10_000
    for score, mean in ((0.0, 2.0), (0.25, 2.5), (-0.25, 1.5)):
        assert np.mean([stories.rating(score, draw) for draw in draws]) == pytest.approx(mean, abs=1e-3)
    assert {stories.rating(score, draw) for score in (-1.0, 0.0, 1.0) for draw in draws} == {0, 1, 2, 3, 4}


def test_the_gold_model_labels_without_noise() -> None:
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 3
    labelled = gold_model.in_order(rows, torch.tensor([[2.0, 1.0], [1.0, 2.0], [-1.0, -3.0]]))
    assert [row["chosen"] for row in labelled] == ["a", "b", "a"]
    assert [row["rejected"] for row in labelled] == ["b", "a", "b"]


def test_reward_models_of_all_sizes_train_for_about_as_many_steps_and_remedies_share_the_middle_one() -> None:
    options = overoptimisation.Options(pairs=(100, 400, 1400), epochs=2)
    variants = overoptimisation.variants(options)
    assert list(variants.values()) == [
        ("PPO", 100), ("PPO", 400), ("PPO", 1400), ("PPO, KL penalty", 400),
        *((f"PPO, {name}", 400) for name in overoptimisation.ENSEMBLES),
    ]  # fmt: skip
    rows = [variant.words_but("sft", "ppo") for variant in variants]
    assert [int(words[1]) * int(words[3]) for words in rows[:3]] == [2800, 3200, 2800]
    assert all(each == rows[1] for each in rows[3:])


@pytest.mark.parametrize("change", [{"epochs": 3}, {"members": 5}, {"pairs": (100, 400, 800)}, {"options": "--seed 3"}])
def test_scores_of_other_reward_models_are_not_reused(change: dict[str, Any]) -> None:
    options = overoptimisation.Options(pairs=(100, 400, 1400), epochs=2, members=4)
    other = options.model_copy(update=change)
    assert overoptimisation.sample_file(options, 0) != overoptimisation.sample_file(other, 0)
    files = [
        {cells.cell_file(each, v, 0) for v in overoptimisation.variants(each) if v.members} for each in (options, other)
    ]
    assert all(files) and not files[0] & files[1], "an ensemble's run depends on its members"


def test_other_options_have_another_gold_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def stop(options: cells.CellOptions, folder: Path) -> None:
        folders.append(folder)
        raise UserError("stopped")

    monkeypatch.setattr(gold_model, "prepare", stop)
    for words in ([], ["--options=--actor-model other"]):
        monkeypatch.setattr("sys.argv", ["overoptimisation", "--gold", str(tmp_path), *words])
        with pytest.raises(UserError, match="stopped"):
            overoptimisation.main()
    assert folders[0] != folders[1] and {folder.parent for folder in folders} == {tmp_path}


def test_members_of_an_ensemble_learn_from_the_same_pairs_with_other_seeds() -> None:
    options = overoptimisation.Options(pairs=(100, 400, 1400), members=3)
    own, members = overoptimisation.reward_variants(options)[1], overoptimisation.member_variants(options)
    paths = {cells.model_directories(options, each, 0)[1] for each in (own, *members)}
    assert len(paths) == 3 and all(member.words[:4] == own.words for member in members)
    seeds = [cells.resolve_chain([*options.words, "--seed", "7", *member.words]).reward for member in members]
    assert [(each.seed, each.data_seed) for each in seeds] == [(1000, 0), (2000, 0)]
    ppo = [variant for variant in overoptimisation.variants(options) if variant.members]
    assert len(ppo) == len(overoptimisation.ENSEMBLES) and all(each.members == members for each in ppo)


def test_an_ensemble_scores_by_its_rule_in_best_of_n_as_in_step_3() -> None:
    scores = torch.tensor([[1.0, 4.0], [3.0, 0.0], [2.0, 2.0]])
    for rule in overoptimisation.ENSEMBLES.values():
        ppo = cells.resolve_chain(shlex.split(f"--ppo.reward a b c {rule.ppo}")).ppo
        named = zip("abc", scores, strict=True)
        sources = tuple(rewards.WeightedSource(name, 1.0, lambda _, each=each: each) for name, each in named)
        combined = rewards.Sources(sources, ppo.reward_combine, uncertainty_coef=ppo.uncertainty_coef)
        assert combined(None)[0].tolist() == pytest.approx(rule.score(scores).tolist())


def test_laws_of_a_report_are_fitted_by_method_and_size(tmp_path: Path) -> None:
    d = np.linspace(0.2, 3, 8)
    points = [
        overoptimisation_report.Points(
            method, pairs, seed, d**2, overoptimisation_report.Law(method == "PPO", alpha, 0.2).gain(d), d, 0.6
        )
        for seed in (0, 1)
        for method, pairs, alpha in (("best of n", 100, 0.5), ("best of n, worst", 100, 0.7), ("PPO", 100, 0.9))
    ]
    overoptimisation_report.report(points, 100, tmp_path)
    table = (tmp_path / "overoptimisation.md").read_text().splitlines()
    assert [line.split(" | ")[:4] for line in table[2:]] == [
        ["| best of n", "100", "0.600", "0.500 ± 0.000"],
        ["| best of n, worst", "100", "0.600", "0.700 ± 0.000"],
        ["| PPO", "100", "0.600", "0.900 ± 0.000"],
    ]
    assert len((tmp_path / "overoptimisation.csv").read_text().splitlines()) == 1 + 6 * len(d)


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
    sizes = {"stories": 40, "sft": 8, "prompts": 8, "opening_words": 2, "response_words": 1, "response_tokens": 24}
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
    for row in world["pairs"]:
        for side, rating in zip(("chosen", "rejected"), row["attribute_ratings"]["kindness"], strict=True):
            assert abs(rating - 2 - 2 * stories.vader()(row[side])) <= 2

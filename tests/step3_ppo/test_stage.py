"""The whole stage on the demo world, with what is off by default switched on, and with scores that are no numbers."""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data.batches import pair_batch
from rlhf import plugins
from rlhf.config import parser
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import policy_path
from rlhf.launch.supervisor import NON_FINITE
from rlhf.models.load import load_causal_lm
from rlhf.models.scalar import load_scalar_model, score_separately
from rlhf.text.encoder import id_count
from rlhf.training import random_sources
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING as sft
from step2_reward import heldout as pairs
from step2_reward.config import RewardConfig
from step2_reward.stage import REWARD_MODELLING as reward
from step3_ppo import __main__ as ppo_program
from step3_ppo import stage
from tests.support import programs
from tests.support.demo import SMALL

SHORT: dict[str, Any] = {"response_length": 16, "total_episodes": 96, "eval_samples": 8, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("models")
    sft.run(SFTConfig(**SMALL, num_train_epochs=1, model="demo-llama", output_dir=str(out)))
    reward.run(RewardConfig(**SMALL, num_train_epochs=1, model="demo-llama", output_dir=str(out)))
    yield out


def options(models: Path, out: Path, algorithm: str = "ppo", **changes: Any) -> Any:
    paths = {"actor_model": str(models / "step1_sft"), "reward_model": str(models / "step2_reward")}
    changed = {**SMALL, **SHORT, **paths, "algorithm": algorithm, "output_dir": str(out), **changes}
    return plugins.find("step3_ppo.algorithms", algorithm).Config(**changed)


def all_rows(out: Path) -> list[dict[str, Any]]:
    lines = (out / "step3_ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] != "warning"]


def rows(out: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [row for row in all_rows(out) if row["kind"] == kind]


@pytest.mark.parametrize(
    ("run", "options_of", "number"),
    [(sft.run, SFTConfig, "eval_perplexity was"), (reward.run, RewardConfig, "eval_loss is")],
)
def test_a_run_that_diverges_is_said_so_and_exports_nothing(
    run: Any, options_of: Any, number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    high = {"learning_rate": 50.0, "num_train_epochs": 2, "max_train_rows": 96}
    with pytest.raises(SystemExit) as leaving:
        run(options_of(**SMALL, **high, model="demo-llama", output_dir=str(tmp_path)))
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    [folder] = tmp_path.iterdir()
    assert leaving.value.code == NON_FINITE
    assert last.startswith(f"error: {folder.name}: the run has diverged: {number} ")
    assert "lower --learning-rate (now 50) and add --overwrite" in last
    assert not (folder / "model").exists()


@pytest.mark.parametrize(
    ("perplexities", "message"),
    [
        ([math.inf], "model 'demo-llama': its loss on held-out rows is not finite before training"),
        ([9.0, math.inf], "the run has diverged: eval_perplexity was 9 before training and is inf now"),
    ],
)
def test_a_model_without_a_finite_loss_is_refused_and_not_exported(
    perplexities: list[float], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """As with a NaN in its config.json: before, four steps were left out, and the model was written as the result."""
    coming = iter(perplexities)
    monkeypatch.setattr("step1_sft.stage.perplexity", lambda *_: next(coming))
    with pytest.raises(SystemExit) as leaving:
        sft.run(SFTConfig(**SMALL, max_train_rows=32, num_train_epochs=1, model="demo-llama", output_dir=str(tmp_path)))
    assert leaving.value.code == NON_FINITE and not (tmp_path / "step1_sft/model").exists()
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: step1_sft: {message}")


def test_a_reward_model_that_overfits_has_not_diverged() -> None:
    """A loss of 7 and more with half the pairs right has; not a loss of 2, nor scores far apart in the right order.
    Nor a user's objective, which may ask for scores that far apart."""
    for accuracy, loss, objective in ((0.5, 6.9, "pairwise"), (0.7, 50.0, "pairwise"), (0.5, 50.0, "hinge.py,gap=99")):
        config = RewardConfig(objective=objective)
        pairs.require_converged({"eval_accuracy": accuracy, "eval_loss": loss}, 100, config)
    config = RewardConfig(objective="every_token,token_coef=2")
    with pytest.raises(NonFiniteError, match=r"eval_loss is 7 and eval_accuracy 0\.55"):
        pairs.require_converged({"eval_accuracy": 0.55, "eval_loss": 7.0}, 100, config)
    with pytest.raises(NonFiniteError, match="1 of 2 held-out pairs are not finite"):
        pairs.require_finite(torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]), 1.0)


def test_everything_at_once_and_what_is_saved(models: Path, tmp_path: Path) -> None:
    extras = {"ptx_coef": 0.5, "ptx_batch_size": 8, "ema_decay": 0.5, "entropy_coef": 0.01, "use_score_scaling": True}
    extras |= {"score_clip": 2.0, "reward": "learned,normalize=true", "kl_budget": 1.0}
    stage.run(options(models, tmp_path, **extras))
    out = tmp_path / "step3_ppo"
    steps = rows(tmp_path)
    assert len(steps) == 3 and all(row["ptx_nll"] > 0 for row in steps)
    timed = {name for name in steps[0] if name.startswith("seconds_")}
    assert timed == {f"seconds_{part}" for part in ("generate", "score", "update", "record", "iteration")}
    # The first scores over their own deviation, but for the clip.
    assert steps[0]["shaped_score_std"] == pytest.approx(1.0, abs=0.1) and abs(steps[0]["score_learned_std"] - 1) > 0.2
    state = json.loads((out / "state.json").read_text(encoding="utf-8"))
    assert state["scores"]["moments"][0] == 96
    total = sum(row["score_learned"] for row in steps) * 32
    assert state["scores"]["moments"][1] == pytest.approx(total, rel=1e-4, abs=1e-3)
    assert state["kl_coef"] not in (steps[0]["kl_coef"], steps[-1]["kl_coef"])  # it has moved on after the last one
    weights = {
        name: AutoModelForCausalLM.from_pretrained(path).state_dict()
        for name, path in (("sft", models / "step1_sft/model"), ("actor", out / "actor"), ("ema", out / "ema"))
    }
    distances = {name: distance(weights[name], weights["sft"]) for name in ("actor", "ema")}
    assert 0 < distances["ema"] < distances["actor"]
    assert {"actor", "critic", "ema"} <= set(json.loads((out / "manifest.json").read_text(encoding="utf-8"))["models"])
    for scoring in (out, models / "step2_reward"):  # a critic and a reward model may score the next run
        stage.check(options(models, tmp_path / "next", reward=f"learned,model={scoring}"))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(value - other[name]).norm() for name, value in one.items()]).norm())


def test_vllm_samples_in_the_place_of_the_loop(models: Path, tmp_path: Path, vllm: Any) -> None:
    """A stand-in for it, on a CPU: one engine takes the weights before each rollout, those of the last look too, and is
    shut down once."""
    changes = {"adapter": "lora,r=4", "rollout_backend": "vllm,memory_share=0.3", "ema_decay": 0.5}
    chosen = options(models, tmp_path, **changes)
    stage.run(chosen)
    steps = rows(tmp_path)
    assert len(steps) == 3 and all(row["sampling_mismatch"] < 1e-5 for row in steps)
    (engine,) = vllm.made
    assert engine.share == 0.3 and engine.max_model_len == chosen.max_prompt_length + chosen.response_length
    assert engine.calls.count("generate") == engine.calls.count("reload_weights") == 3 + 2
    assert engine.calls.index("shut_down") == len(engine.calls) - 1
    last, average, first = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (tmp_path / "step3_ppo/actor", tmp_path / "step3_ppo/ema", models / "step1_sft/model")
    )
    assert distance(engine.model.state_dict(), last) == 0
    assert 0 < distance(average, first) < distance(last, first)


def test_the_reward_model_knows_its_scores(models: Path) -> None:
    config = json.loads((models / "step2_reward/model/config.json").read_text(encoding="utf-8"))
    metrics = json.loads((models / "step2_reward/manifest.json").read_text(encoding="utf-8"))["metrics"]
    assert (config["score_mean"], config["score_std"]) == (metrics["eval_score_mean"], metrics["eval_score_std"])
    tokenizer, data = reward.open_data(RewardConfig(**SMALL), "demo-llama")
    model = load_scalar_model(str(models / "step2_reward/model"), torch.float32, len(tokenizer))
    with torch.no_grad():
        scores = score_separately(model, pair_batch(data.evaluation[:], tokenizer.pad_token_id)).scores  # type: ignore[arg-type]
    assert metrics["eval_score_mean"] == pytest.approx(scores.mean().item(), abs=1e-5)
    assert metrics["eval_accuracy"] == (scores[:, 0] > scores[:, 1]).float().mean().item()


def test_an_adapter_that_steps_1_and_2_train_is_in_the_weights_they_save(tmp_path: Path) -> None:
    options = {**SMALL, "adapter": "lora,r=4", "learning_rate": 1e-2, "max_train_rows": 32, "num_train_epochs": 1}
    paths = {"model": "demo-llama", "output_dir": str(tmp_path)}
    sft.run(SFTConfig(**options, **paths))
    reward.run(RewardConfig(**options, **paths))
    tokenizer, _ = sft.open_data(SFTConfig(**SMALL), "demo-llama")
    start = load_causal_lm("demo-llama", torch.float32, id_count(tokenizer)).state_dict()
    for name in ("step1_sft", "step2_reward"):
        saved = load_file(tmp_path / name / "model/model.safetensors")
        moved = {weight for weight in saved.keys() & start.keys() if not torch.equal(saved[weight], start[weight])}
        assert "model.layers.0.self_attn.q_proj.weight" in moved and "model.embed_tokens.weight" not in moved


def test_the_seed_of_the_run_is_that_of_the_head(tmp_path: Path) -> None:
    small = {**SMALL, "data_path": ["demo,rows=120"], "learning_rate": 0.0, "model": "demo-llama"}
    reward.run(RewardConfig(**small, seed=5, output_dir=str(tmp_path)))
    model = load_scalar_model(str(tmp_path / "step2_reward/model"), torch.float32, 0)
    width = model.score.weight.shape[1]
    drawn = torch.empty(1, width).normal_(0.0, (width + 1) ** -0.5, generator=torch.Generator().manual_seed(5))
    assert torch.equal(model.score.weight, drawn)


def test_scores_that_are_no_numbers_end_the_run_with_code_3(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "calls = []\n"
        "def score(prompts, responses):\n"
        "    calls.append(1)\n"
        "    scores = [float(len(r)) for r in responses]\n"
        "    if len(calls) > 2: scores[5] = float('nan')\n"  # one look at the held-out prompts, one good iteration
        "    return scores\n"
    )
    changes = {"reward": f"{source}:score", "max_bad_steps": 2}
    with pytest.raises(SystemExit) as leaving:
        stage.run(options(models, tmp_path / "out", "rloo", **changes))
    captured = capsys.readouterr()
    assert leaving.value.code == NON_FINITE
    assert "warning, iteration 2: score is nan, score of mine.py:score is nan (training rows " in captured.out
    last = captured.err.strip().splitlines()[-1]
    assert re.match(r"error: step3_ppo: iteration 3: score is nan, .* \(training rows \d+\), 2 times in a row; ", last)
    out = tmp_path / "out/step3_ppo"
    assert not (out / "manifest.json").exists()
    assert [row.get("skipped_iteration") for row in rows(tmp_path / "out")] == [None, 1.0]


def test_an_exception_of_a_reward_function_is_one_line_with_its_row(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def score(prompts, responses):\n    return map(one, prompts)\n\n\ndef one(prompt):\n")
    with source.open("a") as file:
        file.write("    if 'fox' in prompt:\n        return {}['fox']\n    return 1.0\n")
    chosen = options(models, tmp_path / "out", "rloo", reward=f"{source}:score")
    (tmp_path / "options.yaml").write_text(parser.to_yaml(chosen), encoding="utf-8")
    argv = ["step3_ppo", "--config", str(tmp_path / "options.yaml"), "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as leaving:
        ppo_program.process()
    line = programs.without_status(capsys.readouterr().err)
    assert leaving.value.code == 2 and line.count("\n") == 1 and "Traceback" not in line
    assert f"{source}:7: in one: KeyError: 'fox', for prompt " in line
    assert re.search(r"for prompt '[^']*fox[^']*', response '", line)
    trace = Path(line.strip().partition("the traceback is in ")[2])
    assert trace.is_relative_to(tmp_path / "out/step3_ppo") and "return {}['fox']" in trace.read_text(encoding="utf-8")


def test_other_data_to_go_on_learning_is_noticed(models: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    lines = [{"prompt": f"tell me about {i}", "response": f"the {i} is kind"} for i in range(20)]
    own.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"name {i}"}) + "\n" for i in range(9)), encoding="utf-8")
    learning = {"ptx_coef": 0.1, "ptx_data_path": [str(own)], "ptx_batch_size": 4}
    paths = {"data_path": [*SMALL["data_path"]], "ppo_only_data_path": [str(prompts)]}
    config = options(models, tmp_path, "reinforce", **learning, **paths)
    (tmp_path / "step3_ppo").mkdir()
    (tmp_path / "step3_ppo/traceback-0.txt").write_text("of a process that failed before")
    stage.run(config)
    assert not (tmp_path / "step3_ppo/traceback-0.txt").exists()
    manifest = json.loads((tmp_path / "step3_ppo/manifest.json").read_text(encoding="utf-8"))
    assert {str(prompts), f"{own} (ptx)"} <= set(manifest["data"])
    stage.run(config)  # finished: nothing happens
    own.write_text("".join(json.dumps(line) + "\n" for line in lines[:15]), encoding="utf-8")
    with pytest.raises(UserError, match=r"finished with other data: .*own\.jsonl \(ptx\)"):
        stage.run(config)


def test_too_few_rows_to_go_on_learning(models: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    lines = [json.dumps({"prompt": f"tell me about {i}", "response": "kind"}) for i in range(20)]
    own.write_text("\n".join(lines), encoding="utf-8")
    learning = {"ptx_coef": 0.1, "ptx_data_path": [str(own)]}
    with pytest.raises(UserError, match=r"--ptx-batch-size 100: only 1[0-9] rows") as refused:
        stage.run(options(models, tmp_path, **learning, ptx_batch_size=100))
    rows = int(str(refused.value).partition("only ")[2].split()[0])
    stage.check(options(models, tmp_path, **learning, ptx_batch_size=rows))


def test_the_critic_warms_up_alone_and_the_actors_rate_then_falls_to_its_end(models: Path, tmp_path: Path) -> None:
    stage.run(options(models, tmp_path, critic_warmup_iterations=1, num_ppo_epochs=1, warmup_ratio=0.0))
    steps = rows(tmp_path)
    assert "policy_loss" not in steps[0] and "value_loss" in steps[0]
    assert [row["policy_learning_rate"] for row in steps[1:]] == pytest.approx([1e-3, 0.5e-3])


def test_scores_that_are_drawn_differ_between_ranks(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generators are seeded for the rank before the first iteration, and apart from it in every evaluation."""
    seeds = []
    seed = random_sources.seed

    def seed_seen(number: int, step: int) -> None:
        seeds.append((number, step))
        seed(number, step)

    monkeypatch.setattr(random_sources, "seed", seed_seen)
    stage.run(options(models, tmp_path, "rloo", seed=5, total_episodes=32))
    assert seeds == [(5, random_sources.APART), (5, 0), (5, random_sources.APART)]


def test_every_look_is_taken_once_and_the_last_policy_may_be_the_best(models: Path, tmp_path: Path) -> None:
    config = options(models, tmp_path, "rloo", eval_every=2, keep_best="eval_score", export_every=1)
    stage.run(config)
    exports = [tmp_path / f"step3_ppo/exports/step-0000000{step}" for step in (1, 2, 3)]
    assert sorted((tmp_path / "step3_ppo/exports").iterdir()) == exports
    first, last, final = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (exports[0], exports[2], tmp_path / "step3_ppo/actor")
    )
    assert distance(last, final) == 0 < distance(first, final)
    assert policy_path(str(exports[0])) == str(exports[0]), "`rlhf evaluate` takes it"
    lines = (tmp_path / "step3_ppo/samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [2] * 8 + [3] * 8
    scores = {row["step"]: row["eval_score"] for row in rows(tmp_path, "eval")}
    assert list(scores) == [0, 2, 3] and not any("eval_score" in row for row in rows(tmp_path))
    final = json.loads((tmp_path / "step3_ppo/manifest.json").read_text(encoding="utf-8"))["metrics"]
    assert [scores[0], scores[3]] == pytest.approx([final["eval_score_before"], final["eval_score"]], rel=1e-5)
    assert [row["kind"] for row in all_rows(tmp_path)] == ["eval", "train", "train", "eval", "train", "eval"]
    best, actor = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "step3_ppo" / name).state_dict() for name in ("best", "actor")
    )
    assert (distance(best, actor) == 0) == (scores[3] > scores[2])
    assert final["eval_best_step"] == (3 if scores[3] > scores[2] else 2)


def test_a_run_is_evaluated_five_times_where_that_costs_a_tenth_of_its_responses(models: Path, tmp_path: Path) -> None:
    cheap = {"total_episodes": 80, "batch_size": 8, "eval_samples": 2}  # 4 * 2 = 80 / 10
    stage.run(options(models, tmp_path, "rloo", **cheap))
    assert [row["step"] for row in rows(tmp_path, "eval")] == [0, 2, 4, 6, 8, 10]
    for others in ({"eval_samples": 3}, {"batch_size": 16}, {"eval_every": 0}):  # 16: five iterations
        assert options(models, tmp_path, "rloo", **cheap | others).iterations_between_evaluations == 0


def test_a_judge_without_a_number_at_the_end_does_not_lose_the_run(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "judge.py"
    source.write_text(
        "calls = []\n"
        "def score(prompts, responses):\n"
        "    calls.append(1)\n"
        "    return [float('nan') if len(calls) > BEFORE else 1.0] * len(responses)\n"
    )
    for before, name in ((1, "late"), (0, "early")):
        text = source.read_text(encoding="utf-8").replace("BEFORE", str(before))
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    stage.run(options(models, tmp_path / "out", "rloo", judge=f"{tmp_path}/late.py:score"))
    assert "warning, iteration 3: judge is not a finite number for 8 of 8 held-out responses" in capsys.readouterr().out
    assert (tmp_path / "out/step3_ppo/manifest.json").is_file()
    with pytest.raises(UserError, match="judge is not a finite number for 8 of 8 held-out responses"):
        stage.run(options(models, tmp_path / "no", "rloo", judge=f"{tmp_path}/early.py:score"))


def test_nothing_of_an_earlier_run_is_left(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "step3_ppo"
    stage.run(options(models, tmp_path, ema_decay=0.5, export_rollouts=True))
    exported = (out / "rollouts-0.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in exported] == [1] * 32 + [2] * 32 + [3] * 32
    (out / "rollouts-1.jsonl").touch()
    assert {"actor", "critic", "ema", "rollouts-0.jsonl"} <= {path.name for path in out.iterdir()}
    stage.run(options(models, tmp_path, "rloo", overwrite=True))
    assert {path.name for path in out.iterdir()} == {
        "actor", "config.yaml", "data.json", "manifest.json", "metrics.jsonl", "samples.jsonl", "state.json",
    }  # fmt: skip

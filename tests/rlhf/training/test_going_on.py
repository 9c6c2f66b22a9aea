"""A stage, whatever is switched on, that died at any step goes on to the bytes of one that did not."""

import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data.sources import demo
from rlhf.storage import manifests
from step3_ppo.schedule import Schedule
from tests.support import killing, tensorboard_events
from tests.support.killing import dying, left, ppo_options, require_same, reward_options, run, sft_options, undisturbed

pytestmark = pytest.mark.usefixtures("here")
Left = dict[str, Any]
"""what a run leaves, by file"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where step 3 starts from: nothing died while these were made."""
    folder = tmp_path_factory.mktemp("models")
    with contextlib.chdir(folder):
        run(sft_options())
        run(reward_options())
    return {"actor_model": str(folder / "out/step1_sft"), "reward_model": str(folder / "out/step2_reward")}


# --- what runs have a state, and when they die


WORDS = sorted(demo.words())[:20]  # of others the demo's tokenizer makes one token, and all rows would be the same
DEMONSTRATIONS = [{"prompt": f"tell me about {word}", "response": f"the {word} is kind"} for word in WORDS]
EVERYTHING: dict[str, Any] = {
    "total_episodes": 40,  # 5 iterations
    "num_mini_batches": 2,
    **{"kl_budget": 1.0, "use_score_scaling": True, "score_clip": 3.0},
    **{"ema_decay": 0.5, "ptx_coef": 0.5, "ptx_batch_size": 8, "entropy_coef": 0.01},
    **{"critic_warmup_iterations": 1, "critic_pretraining_epochs": 0.25},
    **{"eval_every": 1, "keep_best": "eval_score", "patience": 9, "export_rollouts": True},
    **{"report_to": ("tensorboard",), "sample_rows": 1},
}
"""20 demonstrations in batches of 8: the 16 optimizer steps of the actor go through them 8 times."""
NOISE = """import random
import numpy as np
import torch
def score(prompts, responses):
    return [random.random() + np.random.rand() + torch.rand(()).item() for _ in responses]
"""
"""a score that is drawn, from every generator that a user may take"""


STILL: dict[str, Any] = {
    **{"learning_rate": 0.0, "eval_every": 1, "keep_best": "eval_score", "patience": 1, "num_ppo_epochs": 1}
}
"""nothing is learned, so that the second evaluation is no better than the first, and patience ends the run"""
WATCHED: dict[str, Any] = {
    **{"eval_every": "2epochs", "patience": 2, "dropout": 0.3, "export_every": 1},
    **{"num_train_epochs": 24, "max_train_rows": 8, "learning_rate": 0.03},
}
"""Eight rows, again and again: the best model is not the last, and patience ends the run."""


def with_everything(models: dict[str, str], folder: Path) -> Any:
    own = folder / "own.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in DEMONSTRATIONS), encoding="utf-8")
    (folder / "noise.py").write_text(NOISE, encoding="utf-8")
    reward = ("learned", f"0.1*{folder}/noise.py:score")
    return ppo_options(**models, **EVERYTHING, ptx_data_path=[str(own)], reward=reward)


def step_3(**changes: Any) -> Callable[[dict[str, str], Path], Any]:
    return lambda models, _: ppo_options(**models, **changes)


def has_everything(whole: Left) -> None:
    weights = {str(Path(name).parent) for name in whole if name.endswith("model.safetensors")}
    assert weights == {"actor", "critic", "best", "ema"}
    assert {"samples.jsonl", "rollouts-0.jsonl", "metrics.jsonl", "state.json", "manifest.json"} <= set(whole)
    assert len(trained(whole)) == 5 and len({row["kl_coef"] for row in trained(whole)}) > 2
    assert len(whole["rollouts-0.jsonl"].splitlines()) == 40 and len(whole["samples.jsonl"].splitlines()) == 20
    assert whole["actor/model.safetensors"] != whole["ema/model.safetensors"]
    assert all(row["ptx_nll"] > 0 for row in trained(whole)[1:])
    assert sum("eval_critic_explained" in row for row in whole["metrics.jsonl"]) == 1


def trained(whole: Left) -> list[dict[str, Any]]:
    return [row for row in whole["metrics.jsonl"] if row["kind"] == "train"]


def best_step(whole: Left) -> int:
    return int(whole["manifest.json"]["metrics"]["eval_best_step"])


def has_a_best_model_that_is_not_the_last(whole: Left) -> None:
    metrics, name = whole["manifest.json"]["metrics"], whole["manifest.json"]["config"]["keep_best"]
    rows = [row for row in whole["metrics.jsonl"] if row["kind"] == "eval" and "eval_best_step" not in row]
    values = {row["step"]: row[name] for row in rows if row["step"]}
    best = min(values, key=values.__getitem__)
    assert best_step(whole) == best < max(values)
    assert metrics[name] == pytest.approx(values[best], rel=1e-5)  # six digits in the file
    assert whole["model/model.safetensors"] == whole[f"exports/step-{best:08d}/model.safetensors"]


@dataclass(frozen=True)
class Case:
    """A run that dies: what it has, so that something is compared, and after which steps (0: before its manifest)."""

    options: Callable[[dict[str, str], Path], Any]
    has: Callable[[Left], object] = trained
    dies: Callable[[Left], tuple[int, ...]] = lambda _: (3,)


RUNS = {
    "step 1": Case(
        lambda *_: sft_options(**WATCHED, keep_best="eval_perplexity"),
        has_a_best_model_that_is_not_the_last,
        lambda whole: (best_step(whole) + 1,),
    ),
    "step 2": Case(
        lambda *_: reward_options(**WATCHED, keep_best="eval_loss"),
        has_a_best_model_that_is_not_the_last,
        lambda whole: (best_step(whole) + 1,),
    ),
    "everything": Case(with_everything, has_everything, lambda _: (4,)),
    "everything, often": Case(with_everything, has_everything, lambda _: (1, 2, 3, 4, 5, 0)),
    "best of n": Case(step_3(algorithm="best_of_n", num_generations=4), lambda whole: whole["chosen.jsonl"]),
    "virtual tokens": Case(lambda *_: sft_options(adapter="p_tuning,num_virtual_tokens=5")),
    "adapter": Case(step_3(adapter="lora,r=4", ema_decay=0.5, zero_stage=2, critic_pretraining_epochs=0.25)),
    "shared critic": Case(step_3(critic_model="shared", critic_warmup_iterations=1, ema_decay=0.5, zero_stage=2)),
    "grpo": Case(step_3(algorithm="grpo", num_generations=4, zero_stage=0)),
    "patience": Case(step_3(**STILL), lambda whole: len(trained(whole)) == 2, lambda _: (0,)),
}
RARE = ("everything, often", "grpo")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.faults if n in RARE else ()) for n in RUNS])
def test_a_run_that_died_goes_on_to_the_same_bytes(
    name: str, models: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the expense of its last checkpoint; its trackers get each step once."""
    case = RUNS[name]
    options = case.options(models, here)
    whole = undisturbed(here / "whole", options)
    assert case.has(whole) is not False
    for step in case.dies(whole):
        dying(monkeypatch, lambda: run(options), "train" if step else "end", step)
        [stage] = Path("out").iterdir()
        assert not step or killing.steps_of(stage)[-1:] == [step - 1][: step - 1]
    run(options)
    require_same(left(stage), whole)
    assert not (stage / "checkpoints").exists()
    if "tensorboard" in (options.report_to or ()):
        shown = tensorboard_events.shown(stage / "tensorboard")
        numbers = [(row["step"], pytest.approx(row["kl_coef"], rel=1e-5)) for row in trained(whole)]  # six digits
        assert shown["train/kl_coef"] == numbers
        assert [step for step, _ in shown["eval/eval_score"]] == [0, 1, 2, 3, 4, 5]
        assert [step for step, _ in shown["samples"]] == [1, 2, 3, 4, 5]


def test_the_best_policy_is_that_of_the_checkpoint(
    models: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a step wrote there that was thrown away: on a GPU it does not come out the same again."""
    options = ppo_options(**models, eval_every=1, keep_best="eval_score", total_episodes=16)
    whole = undisturbed(here / "whole", options)
    dying(monkeypatch, lambda: run(options), "end", 0)
    best = Path("out/step3_ppo/best/model.safetensors")
    best.write_bytes(Path(options.actor_model, "model/model.safetensors").read_bytes())
    run(options)
    require_same(left(Path("out/step3_ppo")), whole)


def test_a_best_policy_without_its_weights_is_none(
    models: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of a version that had the metric of the best policy alone: the untrained one is not taken for it."""
    options = ppo_options(**models, eval_every=1, keep_best="eval_score", total_episodes=16)
    dying(monkeypatch, lambda: run(options), "end", 0)
    for folder in Path("out/step3_ppo/checkpoints").iterdir():
        manifest = json.loads((folder / "manifest.json").read_text())
        for file in [name for name in manifest["files"] if name.startswith("best.")]:
            del manifest["files"][file]
            (folder / file).unlink()
        del manifest["sha256"]
        manifests.write_manifest(folder / "manifest.json", manifest)
    run(options)
    assert "has no best, which starts from its initial state" in capsys.readouterr().out
    assert not Path("out/step3_ppo/best").exists()


def test_without_an_evaluation_the_last_model_is_exported(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the model that training began with: `keep_best` came when all steps were done."""
    options = sft_options()
    whole = undisturbed(here / "whole", options)
    dying(monkeypatch, lambda: run(options), "end", 0)
    changes = {"keep_best": "eval_perplexity", "eval_every": "1", "allow_config_change": True}
    run(options.model_copy(update=changes))
    assert left(Path("out/step1_sft"))["model/model.safetensors"] == whole["model/model.safetensors"]


def test_a_run_that_patience_ended_leaves_its_last_checkpoint_and_renamed_exports() -> None:
    """With its last checkpoint it goes on where patience allows more."""
    options = sft_options(**WATCHED | {"patience": 1}, keep_best="eval_perplexity", save_every=None)
    options = options.model_copy(update={"keep_last_checkpoint": True})
    run(options)
    stage = Path("out/step1_sft")
    [last] = killing.steps_of(stage)
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert last == max(row["step"] for row in rows if row["kind"] == "train") < 24
    renamed = stage / "exports/step-00000001-good"
    (stage / "exports/step-00000001").rename(renamed)
    run(options.model_copy(update={"num_train_epochs": 25}))
    assert renamed.is_dir()


def test_fewer_iterations_than_are_done_end_the_run() -> None:
    """A run may go on with a smaller total: with what it has, if that is more."""
    course = Schedule(40, ppo_options())
    assert [iteration.number for iteration in itertools.islice(course, 3)] == [0, 1, 2]
    for episodes, rest in ((8, []), (24, []), (40, [3, 4])):
        again = Schedule(40, ppo_options(total_episodes=episodes))
        again.load_state_dict(course.state_dict())
        assert [iteration.number for iteration in again] == rest

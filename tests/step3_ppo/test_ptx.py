"""Fine-tuning beside the reward, and the entropy bonus: what each adds to the actor's loss."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.dataset import Recipe, open_datasets
from data.prepare.encode import Demonstration
from data.prepare.pack import CROSS_TEXT_ATTENTION
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths import losses
from rlhf.models.policy import Policy
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.types import Credit, Message, Row, ScoredRollout
from step3_ppo.config import Step3Config
from step3_ppo.ptx import Ptx, describe_ptx, open_ptx
from step3_ppo.update import CreditedRollout, Trained, update
from tests.support import tiny
from tests.support.players import Players, demonstrations, first, language_model, players, twice_each
from tests.support.texts import share_of

pytestmark = pytest.mark.usefixtures("ranks")

ONE_STEP = {"num_ppo_epochs": 1, "num_mini_batches": 1, "kl_coef": 0.0}


def learn(game: Players, ptx: Ptx | None, advantage: float = 0.0) -> dict[str, float]:
    """One update with the same advantage on every token."""
    rollout = game.score(game.sample(twice_each()))
    credit = Credit(torch.where(rollout.mask, advantage, 0.0), torch.zeros(rollout.mask.shape))
    trained = Trained(game.actor, None, game.algorithm, first(game.algorithm), ptx)
    credited, draw = CreditedRollout(rollout, credit), torch.Generator().manual_seed(0)
    return update(trained, credited, game.config, draw, range(len(credited)))


def stream(game: Players, rows: Sequence[Demonstration]) -> Ptx:
    return Ptx(rows, game.config, game.config.seed, tiny.PAD)  # type: ignore[arg-type]


def test_with_no_advantage_it_is_fine_tuning() -> None:
    """The weights after the update are those of the same step of stage 1."""
    options = {**ONE_STEP, "ptx_coef": 1.0, "ptx_batch_size": 4, "adam_epsilon": 1e-3}
    weights = (1.0, 2.0, 0.0, 0.5)
    game = players("rloo", **options)
    rows = [replace(row, weight=weight) for row, weight in zip(demonstrations(4), weights, strict=True)]
    metrics = learn(game, stream(game, rows))
    tuned = Engine(Policy(language_model()), game.config, 100)
    parts = [tiny_batch(rows[i : i + 1]) for i in range(4)]
    count = sum(weight * int(part.loss_mask.sum()) for weight, part in zip(weights, parts, strict=True))
    plain = tuned.step(parts, lambda part: losses.token_nll(tuned(part)[0], part.loss_mask, count, part.weight))
    assert metrics["ptx_nll"] == pytest.approx(plain["nll"], abs=1e-6)
    assert metrics["policy_loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert metrics["policy_grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    with tuned.inference() as expected:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(game.weights()[f"actor.{name}"], value, rtol=0, atol=1e-6)


def tiny_batch(rows: Sequence[Demonstration]) -> Any:
    from data.batches import sft_batch

    return sft_batch(rows, tiny.PAD)


def test_the_gradients_add_up() -> None:
    """One optimizer step has both: the gradient is that of the policy loss plus ptx_coef times the other's."""

    def gradient(coef: float, advantage: float) -> Tensor:
        game = players("rloo", **ONE_STEP, ptx_coef=coef, ptx_batch_size=4, zero_stage=0, max_grad_norm=0.0)
        gradients: list[Tensor] = []
        inner = game.actor._engine.optimizer
        step = inner.step

        def spy(*args: Any, **options: Any) -> Any:
            grads = [p.grad.flatten() for p in game.actor.module.parameters() if p.grad is not None]
            gradients.append(torch.cat(grads).clone())
            return step(*args, **options)

        inner.step = spy
        learn(game, stream(game, demonstrations(4)) if coef else None, advantage)
        return gradients[0]

    both, policy, tuning = gradient(0.3, 1.0), gradient(0.0, 1.0), gradient(1.0, 0.0)
    torch.testing.assert_close(both, policy + 0.3 * tuning, rtol=0, atol=1e-6)
    assert tuning.norm() > 0.1 and policy.norm() > 0.01


def test_micro_batches_change_nothing() -> None:
    """The rows of both losses in one pass, or one by one: the same weights."""

    def play(size: int) -> dict[str, Tensor]:
        game = players("rloo", ptx_coef=0.3, ptx_batch_size=4, micro_batch_size=size)
        learn(game, stream(game, demonstrations(8)), 1.0)
        return game.weights()

    whole, single = play(8), play(1)
    for name, value in whole.items():
        torch.testing.assert_close(single[name], value, rtol=0, atol=1e-5, msg=name)


def test_batches_go_on_through_epochs() -> None:
    game = players("rloo", ptx_coef=1.0, ptx_batch_size=4)
    rows = demonstrations(10)
    ptx = stream(game, rows)
    learned = [
        tuple(ids[mask].tolist())
        for _ in range(5)
        for part in ptx.micro_batches()
        for ids, mask in zip(part.ids, part.mask, strict=True)
    ]
    loss, metrics = ptx.loss(game.actor, ptx.micro_batches()[0])
    assert loss.requires_grad and not metrics["ptx_nll"].requires_grad
    assert len(learned) == 20 and set(learned) <= {row.ids for row in rows}
    assert len(set(learned[:8])) == 8 and len(set(learned[8:16])) == 8  # no row twice in an epoch


# --- its rows


def write(path: Path, numbers: range) -> str:
    """Pairs of prompts of two words, the same of the same number."""
    rows = [{"prompt": f"w{4 + i // 90} w{4 + i % 90}", "chosen": f"w{4 + i % 90}", "rejected": "w9"} for i in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("held_out", ["by a share", "in a place"])
def test_it_learns_no_prompt_that_is_held_out_or_of_another_stage(tmp_path: Path, held_out: str) -> None:
    """Of the run's own file: what fine-tuning had. Of another one: what no other stage has, and no evaluation."""
    tokenizer = prepare_tokenizer(tiny.tokenizer(), "plain")
    own, heldout = write(tmp_path / "own.jsonl", range(300, 420)), write(tmp_path / "held.jsonl", range(50, 90))
    arguments: dict[str, Any] = {
        "data_path": (write(tmp_path / "run.jsonl", range(300)),),
        "ppo_only_data_path": (write(tmp_path / "ppo.jsonl", range(400, 500)),),
        "eval_data_path": () if held_out == "by a share" else (heldout,),
        "eval_fraction": 0.2,
        "ptx_coef": 0.1,
        "ptx_data_path": (f"{tmp_path}/run.jsonl", own),
    }
    config = Step3Config(**arguments)

    def prompts(items: Any, length: int) -> set[str]:
        return {tokenizer.decode(item.ids[1 : 1 + length]) for item in items}

    def share(number: int) -> str:
        row = Row((Message("user", f"w{4 + number // 90} w{4 + number % 90}"),))
        return "evaluation" if arguments["eval_data_path"] and number in range(50, 90) else share_of(row, config)

    expected = [i for i in range(300) if share(i) == "sft"] + [i for i in range(300, 400) if share(i) != "evaluation"]
    mixed = open_ptx(config, tokenizer)
    assert mixed is not None
    assert prompts(mixed, 2) == {f"w{4 + i // 90} w{4 + i % 90}" for i in expected} and len(mixed) == len(expected)
    assert sum(mixed.dropped.values()) == 420 - len(expected)
    text = describe_ptx(config, mixed)
    assert all(f"{count} {reason}" in text for reason, count in mixed.dropped.items()) and "held out" in text
    assert "stream" not in text and CROSS_TEXT_ATTENTION not in text
    assert CROSS_TEXT_ATTENTION in describe_ptx(config.model_copy(update={"ptx_objective": "text"}), mixed)
    ppo = open_datasets(config, Recipe("ppo"), tokenizer)
    assert len(ppo.evaluation) > 30
    assert not prompts(mixed, 2) & (prompts(ppo.train, 2) | prompts(ppo.evaluation, 2))


def test_a_stream_that_it_cannot_look_through_is_told(tmp_path: Path) -> None:
    own, stream = write(tmp_path / "own.jsonl", range(50)), write(tmp_path / "stream.jsonl", range(50))
    config = Step3Config(
        data_path=(), ppo_only_data_path=(f"files,streaming=true:{stream}",), ptx_coef=0.1, ptx_data_path=(own,)
    )
    mixed = open_ptx(config, prepare_tokenizer(tiny.tokenizer(), "plain"))
    assert mixed is not None and sum(mixed.dropped.values()) == 50 - len(mixed) < 20
    assert f"warning: files,streaming=true:{stream}: streams are not searched" in describe_ptx(config, mixed)


def test_a_stream_has_no_end_to_learn(tmp_path: Path) -> None:
    location = f"files,streaming=true:{write(tmp_path / 'stream.jsonl', range(50))}"
    config = Step3Config(data_path=(str(tmp_path / "stream.jsonl"),), ptx_coef=0.1, ptx_data_path=(location,))
    with pytest.raises(UserError, match=f"--ptx-data-path {location}: got a stream, .*; remove streaming=true"):
        open_ptx(config, prepare_tokenizer(tiny.tokenizer(), "plain"))


# --- entropy


def test_the_entropy_has_the_gradient_of_its_formula() -> None:
    policy = Policy(language_model(torch.float64))
    rows = tiny.sequences([6, 9, 4], [2, 3, 1], width=9)
    entropy = policy(rows, 0.7, entropy="trained").entropies
    assert entropy is not None
    entropy.sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    p = (policy.lm(input_ids=rows.ids, attention_mask=rows.mask.long()).logits / 0.7).softmax(-1)[:, :-1]
    plain = -(p * p.log()).sum(-1)
    plain[rows.loss_mask[:, 1:]].sum().backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_an_entropy_that_is_only_watched_has_no_gradient() -> None:
    policy = Policy(language_model())
    watched = policy(tiny.sequences([6, 9], [2, 3], width=9), entropy="watched").entropies
    trained = policy(tiny.sequences([6, 9], [2, 3], width=9), entropy="trained").entropies
    assert watched is not None and trained is not None
    assert torch.allclose(watched, trained, atol=1e-5) and trained.requires_grad and not watched.requires_grad


def entropy_of(game: Players, rollout: ScoredRollout) -> float:
    with game.actor.inference() as policy:
        entropies = policy(rollout.sequences, entropy="watched")[1]
    return float(entropies[rollout.sequences.loss_mask].mean())


@pytest.mark.parametrize(("coef", "sign"), [(0.5, 1), (0.0, 0)])
def test_the_bonus_alone_raises_the_entropy(coef: float, sign: int) -> None:
    game = players("rloo", entropy_coef=coef, kl_coef=0.0)
    rollout = game.score(game.sample(twice_each()))
    before = entropy_of(game, rollout)
    metrics = learn(game, None)
    gained = entropy_of(game, rollout) - before
    assert gained > 0.01 if sign else gained == 0
    assert metrics["policy_loss"] == pytest.approx(-coef * metrics["entropy"], rel=1e-5)

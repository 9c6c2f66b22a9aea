"""The two halves of an iteration: what scoring reads, and what the epochs of minibatches do with it."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.generation import open_backend
from rlhf.maths import losses, ops
from rlhf.maths.uniforms import uniforms
from rlhf.rewards import Sources, WeightedSource
from rlhf.types import Credit, Samples, ScoredRollout
from step3_ppo.algorithms import Iteration
from step3_ppo.rollout import generate, per_token
from step3_ppo.update import CreditedRollout, Trained, _means, update
from tests.support import tiny
from tests.support.players import (
    PROMPTS,
    Players,
    config_of,
    count_of_words,
    first,
    language_model,
    players,
    twice_each,
)

pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture(scope="module")
def game() -> Players:
    """Nobody trains these."""
    return players("ppo")


@pytest.fixture
def rollout(game: Players) -> ScoredRollout:
    return game.score(game.sample(twice_each()))


# --- sampling


def test_rollout_batches_are_joined_to_one(game: Players) -> None:
    rollout = game.sample(PROMPTS)
    assert len(rollout) == 4 and rollout.rows == PROMPTS.rows
    assert torch.equal(rollout.prompt_ids, PROMPTS.ids)
    # Responses do not depend on who shares the batch; a batch of 1 ends at its own last token.
    tokens = []
    draws = uniforms([(0, i) for i in range(4)], game.config.response_length)
    backend = open_backend("loop", eos_token_id=tiny.EOS, pad_token_id=tiny.PAD)
    for size in (1, 3, 4):
        config = game.config.model_copy(update={"rollout_batch_size": size})
        whole = generate(game.actor.inference(), backend, PROMPTS, draws, config)
        tokens.append(whole.response_ids.masked_fill(~whole.mask, tiny.PAD))
        assert torch.equal(whole.mask, whole.sampled_logprobs != 0)
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])


# --- scoring


def test_old_and_reference_logprobs_are_those_of_plain_models(game: Players, rollout: ScoredRollout) -> None:
    model = language_model()
    for b in range(len(rollout)):
        prompt, response = rollout.prompt_ids[b][rollout.prompt_mask[b]], rollout.response_ids[b][rollout.mask[b]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        exact = logits.double().log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)
        for logprobs in (rollout.logprobs, rollout.ref_logprobs):
            assert float((logprobs[b, : len(response)] - exact).abs().max()) < 1e-5
            assert not logprobs[b, len(response) :].any()


def test_values_are_those_of_the_states_before_each_token(game: Players, rollout: ScoredRollout) -> None:
    assert rollout.values is not None
    critic = game.critic.module
    for b in range(len(rollout)):
        prompt, response = rollout.prompt_ids[b][rollout.prompt_mask[b]], rollout.response_ids[b][rollout.mask[b]]
        for t in range(len(response)):
            before = torch.cat([prompt, response[:t]])[None]
            with torch.no_grad():
                exact = critic.score(critic.backbone(input_ids=before).last_hidden_state)[0, -1].item()
            assert rollout.values[b, t].item() == pytest.approx(exact, abs=1e-5)
        assert not rollout.values[b, len(response) :].any()


def test_the_source_gets_the_text_without_special_tokens(game: Players, rollout: ScoredRollout) -> None:
    calls: list[Samples] = []

    def source(samples: Samples) -> Tensor:
        calls.append(samples)
        return count_of_words(samples)

    replace(game, scorer=replace(game.scorer, sources=Sources((WeightedSource("heard", 1.0, source),)))).score(rollout)
    (samples,) = calls
    assert samples.rollout is rollout
    for b, (prompt, response) in enumerate(zip(samples.prompts, samples.responses, strict=True)):
        words = [f"w{i}" for i in rollout.response_ids[b][rollout.mask[b]].tolist() if i > 3]
        assert response.split() == words and prompt == "<s>" + rollout.rows[b].prompt[0].content


def test_scoring_does_not_depend_on_micro_batches_or_padding(game: Players, rollout: ScoredRollout) -> None:
    pad = nn.functional.pad
    wider = replace(
        rollout,
        prompt_ids=pad(rollout.prompt_ids, (7, 0), value=tiny.EOS),
        prompt_mask=pad(rollout.prompt_mask, (7, 0)),
        response_ids=pad(rollout.response_ids, (0, 5), value=tiny.EOS),
        mask=pad(rollout.mask, (0, 5)),
        sampled_logprobs=pad(rollout.sampled_logprobs, (0, 5)),
    )
    one_by_one = replace(game, scorer=replace(game.scorer, batch_size=1))
    for other in (game.score(wider), one_by_one.score(rollout)):
        for name in ("logprobs", "ref_logprobs", "values", "scores"):
            expected = getattr(rollout, name)
            actual = getattr(other, name)[..., : expected.shape[-1]]
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_every_row_gets_its_own_numbers_back(rollout: ScoredRollout) -> None:
    """Rows are sorted by length on the way; here the number of a row is the sum of its ids."""
    actual = per_token(
        rollout, lambda s, prompt: (s.ids * s.mask).sum(1, keepdim=True).expand(-1, s.ids.shape[1])[:, prompt:], 3
    )
    sums = (rollout.sequences.ids * rollout.sequences.mask).sum(1, keepdim=True)
    assert torch.equal(actual, (sums * rollout.mask).float())


# --- updating


@dataclass
class Watcher:
    """An algorithm that counts: its loss is the share of the optimizer step's tokens that came by."""

    rows: list[list[float]] = field(default_factory=list)

    def policy_loss(
        self, logprobs: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, _: Iteration
    ) -> losses.Loss:
        assert logprobs.shape == rollout.mask.shape == credit.advantages.shape == credit.returns.shape
        assert torch.equal(credit.returns[:, 0], rollout.scores)  # a row keeps its own credit
        self.rows.append(rollout.scores.tolist())
        share = rollout.mask.sum() / count
        return share + 0.0 * logprobs.sum(), {"approx_kl": torch.zeros(()), "share": share}

    def value_loss(
        self, values: Tensor, rollout: ScoredRollout, credit: Credit, count: Tensor, _: Iteration
    ) -> losses.Loss:
        share = rollout.mask.sum() / count
        return share + 0.0 * values.sum(), {}


def test_responses_that_weigh_alike_are_those_that_were_selected() -> None:
    """At ratio 1 the loss of tokens of one response is minus its advantage: of three of eight, minus their mean."""
    game = players("grpo", loss_aggregation="sequence", kl_coef=0.0, num_ppo_epochs=1, num_mini_batches=1)
    rollout, rows = game.score(game.sample(twice_each())), torch.tensor([1, 4, 6])
    advantages = torch.randn(8, 1, generator=torch.Generator().manual_seed(3)) * rollout.mask
    metrics = game.update(rollout[rows], Credit(advantages, advantages)[rows])
    assert metrics["policy_loss"] == pytest.approx(-advantages[rows, 0].mean().item(), abs=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_a_response_weighs_as_one_of_its_step_not_of_the_rollout(minibatches: int) -> None:
    """At ratio 1 the mean over equal steps is minus the mean advantage, however many steps there are."""
    still = {"num_ppo_epochs": 1, "num_mini_batches": minibatches, "learning_rate": 0.0}
    game = players("grpo", loss_aggregation="sequence", kl_coef=0.0, **still)
    rollout = game.score(game.sample(twice_each()))
    advantages = torch.randn(8, 1, generator=torch.Generator().manual_seed(3)) * rollout.mask
    metrics = game.update(rollout, Credit(advantages, advantages))
    assert metrics["policy_loss"] == pytest.approx(-advantages[:, 0].mean().item(), abs=1e-6)


def numbered(rollout: ScoredRollout) -> CreditedRollout:
    """Scores 0 to 7, and credit that starts with the row's number."""
    numbers = torch.arange(8.0)
    credit = torch.zeros_like(rollout.sampled_logprobs)
    credit[:, 0] = numbers
    return CreditedRollout(replace(rollout, scores=numbers), Credit(credit, credit))


@pytest.mark.parametrize(("minibatches", "size"), [(1, 8), (1, 3), (2, 3), (4, 1), (8, 3), (3, 2)])
def test_each_epoch_takes_every_row_once_and_minibatches_count_their_tokens(
    game: Players, rollout: ScoredRollout, minibatches: int, size: int
) -> None:
    watcher = Watcher()
    still = {"learning_rate": 0.0, "critic_learning_rate": 0.0}
    config = config_of("ppo", num_ppo_epochs=3, num_mini_batches=minibatches, micro_batch_size=size, **still)
    trained, draw = Trained(game.actor, None, watcher, first(None)), torch.Generator().manual_seed(0)
    metrics = update(trained, numbered(rollout), config, draw, range(len(rollout)))
    # Only if every micro-batch's share was added and divided by the minibatch's own count.
    assert metrics["share"] == pytest.approx(1.0, abs=1e-6) and metrics["policy_loss"] == pytest.approx(1.0, abs=1e-6)
    assert not any(key.startswith("value") for key in metrics)
    row_ids = [row for rows in watcher.rows for row in rows]
    epochs = [row_ids[i : i + 8] for i in range(0, 24, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 3
    assert max(len(rows) for rows in watcher.rows) <= size
    if minibatches > 1:
        assert epochs[0] != epochs[1] != epochs[2]


def test_a_learning_rate_of_0_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ops, "entropy")  # with gradients, which nobody wants: the default has no bonus
    game = players("ppo", learning_rate=0.0, critic_learning_rate=0.0)
    before = game.weights()
    metrics = game.update(game.score(game.sample(twice_each())))
    after = game.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6) and metrics["clip_fraction"] == 0.0


def test_garbage_after_the_end_changes_no_bit() -> None:
    """Ids after EOS reach neither scores, credit nor weights."""

    def play(garbage: bool) -> dict[str, Tensor]:
        game = players("ppo")
        rollout = game.sample(twice_each())
        if garbage:
            noise = torch.randint(0, tiny.VOCAB, rollout.mask.shape, generator=torch.Generator().manual_seed(5))
            rollout = replace(rollout, response_ids=torch.where(rollout.mask, rollout.response_ids, noise))
        game.update(game.score(rollout))
        return game.weights()

    clean, dirty = play(False), play(True)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_two_epochs_equal_a_plain_ppo_loop() -> None:
    """The whole update again with plain models, one row at a time, in a loop written from the papers' equations."""
    options = {"num_mini_batches": 1, "num_ppo_epochs": 2, "max_grad_norm": 0.0, "weight_decay": 0.0}
    game = players("ppo", **options)
    rollout = game.score(game.sample(twice_each()))
    credit = game.algorithm.credit(rollout, first(game.algorithm))
    metrics = game.update(rollout)
    lm, critic = language_model(), players("ppo").critic.module
    adam = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.0}
    optimizers = [torch.optim.AdamW(model.parameters(), **adam) for model in (lm, critic)]
    totals = []
    for _ in range(2):
        policy, value = plain_losses(lm, critic, rollout, credit)
        (policy + value).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        totals.append((policy.item(), value.item()))
    assert metrics["policy_loss"] == pytest.approx(sum(p for p, _ in totals) / 2, abs=1e-5)
    assert metrics["value_loss"] == pytest.approx(sum(v for _, v in totals) / 2, abs=1e-5)
    plain = {f"actor.lm.{name}": x for name, x in lm.state_dict().items()}
    plain |= {f"critic.{name}": x for name, x in critic.state_dict().items()}
    for name, weight in game.weights().items():
        torch.testing.assert_close(weight, plain[name], rtol=0, atol=1e-5, msg=name)


def plain_losses(lm: Any, critic: Any, rollout: ScoredRollout, credit: Credit) -> tuple[Tensor, Tensor]:
    """Clipped policy and value losses, summed token by token over unpadded rows, divided by the number of tokens."""
    policy, value = [], []
    assert rollout.logprobs is not None and rollout.values is not None
    for b in range(len(rollout)):
        prompt, response = rollout.prompt_ids[b][rollout.prompt_mask[b]], rollout.response_ids[b][rollout.mask[b]]
        ids, states = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
        logprobs = lm(input_ids=ids).logits[0, states].log_softmax(-1)
        values = critic.score(critic.backbone(input_ids=ids).last_hidden_state)[0, states, 0]
        for t, token in enumerate(response.tolist()):
            ratio = (logprobs[t, token] - rollout.logprobs[b, t]).exp()
            advantage = credit.advantages[b, t]
            policy.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            old, target = rollout.values[b, t], credit.returns[b, t]
            near = old + (values[t] - old).clamp(-0.2, 0.2)
            value.append(0.5 * torch.max((values[t] - target) ** 2, (near - target) ** 2))
    return torch.stack(policy).mean(), torch.stack(value).mean()


def test_means_over_the_steps_of_an_iteration_by_hand() -> None:
    """The ratio of the second step varies: 0.5 - 0.6^2 = 0.14; of the first rounding alone says that it does."""
    steps = {"ratio_square": [0.0, 0.5], "ratio_mean": [1.001, 1.6], "approx_kl": [0.25, 0.75], "policy_loss": [1.0]}
    means = _means({name: list(values) for name, values in steps.items()})
    assert means == pytest.approx(
        {
            "ratio_mean": 1.3005, "ratio_std": math.sqrt(0.14) / 2, "approx_kl": 0.5, "policy_loss": 1.0,
            "first_approx_kl": 0.25, "first_ratio_std": 0.0,
        }
    )  # fmt: skip
    assert _means({"value_loss": [1.0, 2.0]}) == {"value_loss": 1.5}


def first_kl(*, temperature: float = 1.0, dropout: float = 0.0) -> float:
    """`first_approx_kl` of an update that divides by `temperature` and drops out, after a rollout that did neither."""
    game = players("ppo", num_ppo_epochs=1, num_mini_batches=1)
    rollout = game.score(game.sample(twice_each()))
    game.actor.module.lm.model.norm.register_forward_hook(
        lambda norm, inputs, states: nn.functional.dropout(states, dropout, norm.training)
    )
    other = replace(game, config=game.config.model_copy(update={"temperature": temperature}))
    return other.update(rollout)["first_approx_kl"]


def test_an_update_that_sees_another_policy_shows_in_the_first_kl() -> None:
    assert abs(first_kl()) < 1e-6
    assert first_kl(temperature=0.8) > 1e-3
    assert first_kl(dropout=0.1) > 1e-3


def test_without_rescoring_the_update_has_its_own_old_logprobs() -> None:
    """The sampler's log-probs are 0.25 nats off. The KL is theirs; the ratio is 1, as after a pass that scores."""
    one_step = {"num_ppo_epochs": 1, "num_mini_batches": 1}
    quick, thorough = players("ppo", rescore=False, **one_step), players("ppo", **one_step)
    sampled = quick.sample(twice_each())
    sampled = replace(sampled, sampled_logprobs=sampled.sampled_logprobs - 0.25 * sampled.mask)
    rollout = quick.score(sampled)
    assert torch.equal(rollout.logprobs, sampled.sampled_logprobs)
    metrics = quick.update(rollout)
    assert metrics["first_approx_kl"] == 0.0 and metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["sampling_mismatch"] == pytest.approx(0.25, abs=1e-5)
    thorough.update(thorough.score(sampled), thorough.algorithm.credit(rollout, first(thorough.algorithm)))
    expected = thorough.weights()
    for name, weight in quick.weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"use_score_norm": True}, "--use-score-norm without --use-score-scaling"),
        ({"ptx_data_path": ("a.jsonl",)}, "--ptx-data-path with --ptx-coef 0"),
        ({"target_kl": 0.1, "num_mini_batches": 2}, "--target-kl 0.1 with fewer than three optimizer steps"),
        ({"vf_coef": 0.5}, "--vf-coef 0.5 without --critic-model shared"),
        ({"keep_best": "eval_score"}, "--keep-best eval_score without --eval-every"),
        ({"patience": 3}, "--patience 3 without --keep-best"),
    ],
)
def test_an_option_without_effect_is_named(changes: dict[str, Any], note: str) -> None:
    once = {"num_ppo_epochs": 1, "num_mini_batches": 1}
    assert next(config_of("ppo", **once | changes).idle()).startswith(note)
    needs = {"use_score_scaling": True, "ptx_coef": 0.1, "num_ppo_epochs": 2, "critic_model": "shared"}
    needs |= {"eval_every": 1, "keep_best": "eval_score"}
    assert [*config_of("ppo", **once | changes | needs).idle()] == []


def test_the_average_follows_every_step_that_was_applied() -> None:
    game = players("ppo", num_mini_batches=2, num_ppo_epochs=2, max_bad_steps=9)
    moves: list[int] = []

    class Average:
        def update(self) -> None:
            moves.append(len(moves))

    def play(rollout: ScoredRollout) -> dict[str, float]:
        trained = Trained(game.actor, game.critic, game.algorithm, first(game.algorithm), ema=Average())  # type: ignore[arg-type]
        credited = CreditedRollout(rollout, game.algorithm.credit(rollout, first(game.algorithm)))
        return update(trained, credited, game.config, torch.Generator().manual_seed(0), range(len(credited)))

    rollout = game.score(game.sample(twice_each()))
    play(rollout)
    assert len(moves) == 4
    bad = replace(rollout, logprobs=rollout.logprobs + torch.nan)
    assert play(bad)["skipped_steps"] == 4 and len(moves) == 4

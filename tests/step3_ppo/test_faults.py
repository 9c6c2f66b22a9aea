"""What step 3 does when numbers go wrong: a table of the faults, each with the tests that show what is done."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf import plugins
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.rewards import Sources, WeightedSource
from rlhf.training import checks
from step3_ppo.algorithms import grpo, ppo
from step3_ppo.inputs import check
from step3_ppo.metrics import credit_metrics, rollout_metrics
from step3_ppo.warnings import Watch
from tests.support import engine_runs, tiny
from tests.support.fault_names import require_collected
from tests.support.players import Players, first, players, scored_by, twice_each

ALGORITHMS = [name for name in plugins.names("step3_ppo.algorithms") if name != "best_of_n"]

ROWS: dict[int, tuple[str, ...]] = {
    # NaN or infinity as loss or gradient; every step left out; a score that is not finite
    71: (
        "rlhf/engine/test_engine_left_out.py::test_a_loss_of_nan_is_left_out_without_a_trace_and_five_end_the_run",
        "rlhf/engine/test_engine_left_out.py::test_a_gradient_of_nan_under_a_finite_loss_is_left_out_too",
        "rlhf/engine/test_engine.py::test_nan_on_one_rank_stops_both_with_equal_weights",
    ),
    72: (
        "rlhf/engine/test_engine_left_out.py::test_fp16_that_overflows_for_ever_ends_the_run",
        "rlhf/engine/test_engine_left_out.py::test_the_search_for_a_loss_scale_raises_nothing_of_its_own",
        "step3_ppo/test_warnings.py::test_a_warning_comes_alone_and_at_its_onset_with_its_numbers",
    ),
    76: (
        "contracts/test_rewards.py::test_a_score_that_is_not_finite_names_its_prompt_and_response",
        "contracts/test_rewards.py::test_a_reward_model_that_says_nan_is_refused",
        "step3_ppo/test_left_out.py::test_nothing_is_learned_from_a_bad_score",
        "step3_ppo/test_left_out.py::test_enough_in_a_row_end_the_run_and_keep_the_batch",
    ),
    # a loss that spikes
    73: (
        "rlhf/training/test_spikes.py::test_a_loss_that_jumps_and_stays_is_said_once",
        "rlhf/training/test_spikes.py::test_the_numbers_worked_by_hand",
        "rlhf/training/test_spikes.py::test_what_is_no_spike",
    ),
    # all scores equal
    74: (
        "step3_ppo/test_faults.py::test_equal_scores_move_nothing",
        "contracts/test_algorithms.py::test_equal_scores_that_were_foreseen_teach_nothing",
        "rlhf/maths/test_credit.py::test_equal_rewards_give_zero_advantages",
        "step3_ppo/test_warnings.py::test_rollouts_that_provoke",
    ),
    # one token in all
    75: (
        "contracts/test_algorithms.py::test_one_token_in_all_is_no_trouble",
        "rlhf/maths/test_credit.py::test_a_batch_of_one_token_is_finite",
        "rlhf/maths/test_ops.py::test_one_token_and_no_token_whiten_to_zero",
        "step3_ppo/test_metrics.py::test_one_response_of_one_token",
    ),
    # EOS at once: a response of one token, no row is dropped
    77: (
        "step3_ppo/test_faults.py::test_a_response_that_ends_at_once_is_one_token",
        "contracts/test_generation.py::test_an_end_at_once_and_no_end_at_all",
        "rlhf/engine/test_engine.py::test_ranks_that_generate_unequal_lengths_neither_hang_nor_drift",
    ),
    # EOS never
    78: (
        "step3_ppo/test_faults.py::test_responses_that_never_end_are_cut_fined_and_told",
        "step3_ppo/test_update.py::test_a_response_without_end_pays_the_penalty",
        "rlhf/maths/test_credit.py::test_a_cut_response_is_not_bootstrapped",
    ),
    # tokens after EOS
    79: (
        "step3_ppo/test_faults.py::test_tokens_after_the_end_change_no_bit_of_loss_or_gradient",
        "step3_ppo/test_update.py::test_garbage_after_the_end_changes_no_bit",
        "contracts/test_algorithms.py::test_what_stands_off_the_mask_changes_no_bit",
        "step3_ppo/test_metrics.py::test_padding_changes_no_number",
    ),
    # a KL that explodes
    80: (
        "step3_ppo/test_alarms.py::test_target_kl_ends_the_passes_of_an_iteration",
        "step3_ppo/test_alarms.py::test_a_kl_above_the_limit_for_long_ends_the_run",
        "step3_ppo/test_alarms.py::test_a_run_that_explodes_is_warned_of_and_ended_and_its_best_policy_stays",
        "step3_ppo/test_alarms.py::test_a_token_that_ran_away_spoils_no_step",
    ),
    # a KL below 0: sampled from another distribution than scored
    81: ("step3_ppo/test_alarms.py::test_sampling_from_another_distribution_is_told_by_a_negative_kl",),
    # a first ratio that is not 1
    82: (
        "step3_ppo/test_alarms.py::test_dropout_in_the_policy_trips_the_first_ratio",
        "step3_ppo/test_update.py::test_an_update_that_sees_another_policy_shows_in_the_first_kl",
        "contracts/test_algorithms.py::test_the_first_minibatch_finds_the_policy_that_sampled",
    ),
    # a reward that is hacked
    83: (
        "step3_ppo/test_alarms.py::test_a_reward_for_length_is_hacked_and_told",
        "step3_ppo/test_warnings.py::test_a_warning_comes_alone_and_at_its_onset_with_its_numbers",
        "step3_ppo/test_looks.py::test_samples_are_appended_side_by_side",
    ),
    # an entropy that collapses
    84: ("step3_ppo/test_alarms.py::test_a_policy_without_kl_collapses_and_is_told",),
    # temperature 0, greedy, cut-off distributions
    85: (
        "step3_ppo/test_faults.py::test_sampling_that_is_none_is_refused",
        "rlhf/chain/test_errors.py::test_the_chain_refuses_before_anything_starts",
        "rlhf/chain/test_errors.py::test_a_stage_alone_refuses_too",
    ),
    # fp16 that overflows in the actor alone
    86: ("step3_ppo/test_faults.py::test_a_minibatch_that_overflows_in_the_actor_is_left_out_for_the_critic",),
    # batches that do not divide
    87: (
        "step3_ppo/test_faults.py::test_batches_that_do_not_divide_are_refused_with_their_numbers",
        "step3_ppo/test_faults.py::test_groups_that_do_not_divide_are_refused",
        "step3_ppo/test_update.py::test_each_epoch_takes_every_row_once_and_minibatches_count_their_tokens",
    ),
    # a schedule past its end
    88: (
        "step3_ppo/test_faults.py::test_a_step_past_the_end_changes_no_bit",
        "rlhf/engine/test_adamw.py::test_schedules_by_hand",
    ),
    # micro-batches of unequal lengths
    89: (
        "step3_ppo/test_faults.py::test_one_by_eight_two_by_four_and_eight_by_one_are_one_step",
        "contracts/test_algorithms.py::test_losses_metrics_and_gradients_add_up_over_parts",
        "contracts/test_algorithms.py::test_the_micro_batch_size_changes_no_result",
        "rlhf/engine/test_engine.py::test_step_3_on_two_ranks_is_that_of_one",
    ),
}


def test_every_fault_has_tests_and_they_exist() -> None:
    assert sorted(ROWS) == list(range(71, 90))
    require_collected(ROWS)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def leaning_to_eos(game: Players, strength: float) -> Players:
    """Policy and reference whose logit of EOS is `strength` higher everywhere."""
    shift = torch.zeros(tiny.VOCAB).index_fill(0, torch.tensor([tiny.EOS]), strength)
    reference: Any = game.scorer.reference.source.module
    for policy in (game.actor.module, reference):
        policy.lm.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: logits + shift)
    return game


def scored_alike(game: Players) -> Players:
    """Every response scores 2, and the critic foretells 0."""
    with torch.no_grad():
        for weight in game.critic.module.score.parameters() if game.critic is not None else ():
            weight.zero_()
    alike = Sources((WeightedSource("alike", 1.0, lambda samples: torch.full((len(samples.responses),), 2.0)),))
    return replace(game, scorer=replace(game.scorer, sources=alike))


# --- rows 74, 77, 78, 79: what responses and scores may be


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_scores_move_nothing(name: str) -> None:
    """Without discount and KL every token's return is the score, so that a critic of 0 errs alike everywhere."""
    own = {"lam": 1.0} if name == "ppo" else {"lam": 1.0, "whiten_advantages": True} if name == "a2c" else {}
    game = scored_alike(players(name, **{"num_mini_batches": 1, "num_ppo_epochs": 1, **own}))
    rollout = game.score(game.sample(twice_each()))
    credit = game.algorithm.credit(rollout, first(game.algorithm))
    assert credit.advantages.abs().max() < 1e-4 and torch.isfinite(credit.returns).all()
    metrics = rollout_metrics(rollout) | credit_metrics(rollout, credit) | game.update(rollout, credit)
    assert metrics["score_std"] == 0.0 and metrics["policy_grad_norm"] < 1e-3
    assert math.isfinite(metrics["policy_loss"])
    assert "equal_advantages" in {notice.name for notice in Watch().check(1, metrics)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_response_that_ends_at_once_is_one_token(name: str) -> None:
    """Its EOS: a choice of the policy, with its score. No row is dropped, so ranks keep equally many."""
    game = leaning_to_eos(players(name, micro_batch_size=8), 1e4)
    rollout = game.score(game.sample(twice_each()))
    assert len(rollout) == 8 and rollout.response_tokens() == [[tiny.EOS]] * 8 and rollout.ended.all()
    credit = game.algorithm.credit(rollout, first(game.algorithm))
    metrics = rollout_metrics(rollout) | credit_metrics(rollout, credit) | game.update(rollout, credit)
    assert metrics["response_length"] == 1.0 and metrics["truncated"] == 0.0
    undefined = {"explained_variance", "critic_error", "score_length_correlation"}  # nothing varies
    learned = {n: value for n, value in metrics.items() if n not in undefined}
    assert all(map(math.isfinite, learned.values()))
    assert all(torch.isfinite(weight).all() for weight in game.weights().values())


def test_responses_that_never_end_are_cut_fined_and_told() -> None:
    game = leaning_to_eos(players("ppo", missing_eos_penalty=3.0, kl_coef=0.0, lam=1.0, whiten_advantages=False), -1e4)
    rollout = game.score(game.sample(twice_each()))
    assert rollout.mask.all() and not rollout.ended.any() and rollout.scores is not None
    assert rollout.source_scores is not None and torch.equal(rollout.scores, rollout.source_scores[:, 0] - 3.0)
    # Paid at the last token, and nothing after it is hoped for.
    torch.testing.assert_close(game.algorithm.credit(rollout, first(game.algorithm)).returns[:, -1], rollout.scores)
    metrics = rollout_metrics(rollout)
    assert metrics["truncated"] == 1.0 and metrics["ended"] == 0.0
    assert [notice.name for notice in Watch().check(1, metrics)] == ["truncated"]


def test_the_penalty_falls_on_cut_responses_alone_whatever_their_score() -> None:
    scores = torch.linspace(-2.0, 2.0, 8)
    game = scored_by(players("ppo", missing_eos_penalty=3.0), lambda samples: scores)
    rollout = game.score(game.sample(twice_each()))
    cut = ~rollout.ended
    assert cut[scores < 0].any() and cut[scores > 0].any() and not cut.all()
    assert rollout.scores is not None and torch.equal(rollout.scores, torch.where(cut, scores - 3.0, scores))


def test_tokens_after_the_end_change_no_bit_of_loss_or_gradient() -> None:
    def gradients(garbage: bool) -> list[Tensor]:
        game = players("ppo")
        rollout = game.sample(twice_each())
        assert not rollout.mask.all()
        if garbage:
            rollout = replace(rollout, response_ids=rollout.response_ids.masked_fill(~rollout.mask, 77))
        rollout = game.score(rollout)
        credit, policy, prompt = (
            game.algorithm.credit(rollout, first(game.algorithm)),
            game.actor.module,
            rollout.prompt_ids.shape[1],
        )
        count = rollout.mask.sum()
        critic: nn.Module = game.critic.module
        with torch.enable_grad():
            logprobs = policy(rollout.sequences)[0][:, prompt:]
            values = critic(rollout.sequences)[:, prompt - 1 : -1]
            both_losses = [
                game.algorithm.policy_loss(logprobs, rollout, credit, count, first(game.algorithm))[0],
                game.algorithm.value_loss(values, rollout, credit, count, first(game.algorithm))[0],
            ]
            weights = [w for model in (policy, critic) for w in model.parameters()]
            return [loss.detach() for loss in both_losses] + list(torch.autograd.grad(sum(both_losses), weights))

    assert all(map(torch.equal, gradients(garbage=False), gradients(garbage=True)))


# --- row 85: sampling that is none


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_sampling_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=rf"--temperature.*(greater than 0|a finite number), got {value}"):
        parser.parse(ppo.Config, ["--temperature", value], "ppo", "")
    for option in ("--do-sample", "--no-do-sample", "--greedy", "--top-k", "--top-p", "--repetition-penalty"):
        with pytest.raises(UserError, match=f"no option '{option}'"):
            parser.parse(ppo.Config, [option, "1"], "ppo", "")


# --- row 86: fp16


class Overflowing:
    """An engine that leaves out the steps of these numbers."""

    def __init__(self, left_out: set[int]) -> None:
        self.left_out, self.calls, self.module = left_out, 0, None

    def step(self, *_: Any) -> dict[str, float]:
        self.calls += 1
        return {"loss": 0.0, "skipped": float(self.calls in self.left_out)}


def test_a_minibatch_that_overflows_in_the_actor_is_left_out_for_the_critic() -> None:
    actor, critic = Overflowing({1, 3}), Overflowing({2})
    game = players("ppo")
    rollout = game.score(game.sample(twice_each()))
    played: Any = replace(game, actor=actor, critic=critic)
    metrics = played.update(rollout, game.algorithm.credit(rollout, first(game.algorithm)))
    assert metrics["optimizer_steps"] == 4.0
    assert (actor.calls, critic.calls) == (4, 2)
    assert metrics["skipped_steps"] == 3.0  # two of both, one of the critic alone


# --- row 87: batches that do not divide


@pytest.mark.parametrize(
    ("batch_size", "ranks", "parts", "message"),
    [
        (64, 3, 1, r"--batch-size 64: expected a multiple of 3 \(3 processes\); try 63"),
        (64, 1, 3, r"--batch-size 64: expected a multiple of 3 \(1 processes x --num-mini-batches 3\); try 63"),
        (64, 4, 3, r"--batch-size 64: expected a multiple of 12 \(4 processes x --num-mini-batches 3\); try 60"),
        (1, 2, 1, r"--batch-size 1: expected a multiple of 2 \(2 processes\); try 2"),
        (8, 8, 2, r"--batch-size 8: expected a multiple of 16 .*; try 16"),
        (64, 4, 16, ""),
        (64, 1, 64, ""),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_their_numbers(
    batch_size: int, ranks: int, parts: int, message: str
) -> None:
    if not message:
        checks.check_ranks(batch_size, ranks, "batch_size", parts, "num_mini_batches")
        return
    with pytest.raises(UserError, match=f"^{message}"):
        checks.check_ranks(batch_size, ranks, "batch_size", parts, "num_mini_batches")


@pytest.mark.parametrize(("ranks", "group"), [(1, 5), (2, 4), (1, 24)])
def test_groups_that_do_not_divide_are_refused(ranks: int, group: int) -> None:
    """12 responses; a rank has whole groups, or their mean would need the other ranks."""
    models = {"actor_model": "demo-llama", "reward_model": "demo-llama", "data_path": ("demo,rows=400",)}
    options = grpo.Config(algorithm="grpo", batch_size=12, num_generations=group, **models)
    wanted = rf"multiple of {ranks * group} \({ranks} processes x --num-generations {group}\)"
    with pytest.raises(UserError, match=f"^--batch-size 12: expected a {wanted}"):
        check(options, ranks=ranks)


# --- row 88: schedules


def test_a_step_past_the_end_changes_no_bit() -> None:
    trained = engine_runs.engine({"zero_stage": 1}, engine_runs.OPTIMIZER)
    batches = engine_runs.batches(engine_runs.STEPS + 2)
    rates = [engine_runs.step(trained, rows)["learning_rate"] for rows in batches[: engine_runs.STEPS]]
    before = engine_runs.weights(trained)
    rates += [engine_runs.step(trained, rows)["learning_rate"] for rows in batches[engine_runs.STEPS :]]
    assert min(rates[:-2]) > 0 and rates[-2:] == [0.0, 0.0]
    assert all(torch.equal(before[name], weight) for name, weight in engine_runs.weights(trained).items())


# --- row 89: a step cut into micro-batches of unequal lengths


def test_one_by_eight_two_by_four_and_eight_by_one_are_one_step() -> None:
    whole, *cut = (engine_runs.run({"zero_stage": 1}, size) for size in (8, 4, 1))
    for other in cut:
        for one, step in zip(whole["metrics"], other["metrics"], strict=True):
            assert step == pytest.approx(one, abs=1e-5)
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(other["weights"][name], weight, rtol=0, atol=1e-5)

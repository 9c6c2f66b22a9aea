"""A test of the tests of step 3: as tests/test_mutations.py, for its algorithms, its update and its random streams."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from data.batches import Batches
from rlhf.generation import loop
from rlhf.models import scalar
from rlhf.types import Rollout
from step3_ppo import rollout, stage, update
from step3_ppo.algorithms import _common, a2c, grpo, ppo, reinforce, rloo
from tests import test_update, tiny
from tests.contracts import test_algorithms, test_generation
from tests.data import test_batches
from tests.mutants import Check, Mutant, each, require_caught
from tests.step3 import test_by_hand, test_draws, test_faults, test_kl_controller

joined: Any = Rollout.sequences
"""a property"""

CAUGHT_BY: dict[Check, list[Mutant]] = {
    # --- each algorithm's credit
    partial(test_by_hand.test_credit, "ppo"): [
        Mutant("gamma, lambda exchanged", _common.gae_credit, "config.gamma, config.lam", "config.lam, config.gamma"),
        Mutant("PPO does not whiten", _common.gae_credit, "if config.whiten_advantages", "if False"),
        Mutant("KL coefficient never steered", ppo.PPO.credit, "self.kl.coef", "self.config.kl_coef"),
        Mutant(
            "policy and reference exchanged",
            _common.rewards_of,
            "rollout.logprobs, rollout.ref_logprobs,",
            "rollout.ref_logprobs, rollout.logprobs,",
        ),
    ],
    partial(test_by_hand.test_credit, "a2c"): [
        Mutant("A2C whitens unasked", _common.gae_credit, "if config.whiten_advantages", "if True"),
    ],
    partial(test_by_hand.test_credit, "reinforce"): [
        Mutant("returns cut short by a lambda", reinforce.Reinforce.credit, "lam=1.0", "lam=0.95"),
        Mutant("no baseline", reinforce.Reinforce.credit, "whitened(returns, rollout.mask)", "returns"),
    ],
    partial(test_by_hand.test_credit, "rloo"): [
        Mutant(
            "left-out baseline counts itself",
            rloo.RLOO.credit,
            "leave_one_out(totals,",
            "against_group(scale=False, values=totals, group=",
        ),
        Mutant(
            "baseline of the whole batch",
            rloo.RLOO.credit,
            "leave_one_out(totals, c.num_generations)",
            "leave_one_out(totals, len(totals))",
        ),
        Mutant("reward of a mean token", rloo.RLOO.credit, ".sum(1)", ".mean(1)"),
    ],
    partial(test_by_hand.test_credit, "grpo"): [
        Mutant("group's deviation left out", grpo.GRPO.credit, "c.scale_rewards)", "not c.scale_rewards)"),
        Mutant("group of two", grpo.GRPO.credit, "rollout.scores, c.num_generations", "rollout.scores, 2"),
    ],
    # --- each algorithm's loss
    partial(test_by_hand.test_policy_loss, "ppo"): [
        Mutant(
            "the critic's range for the policy",
            ppo.PPO.policy_loss,
            "self.config.cliprange,",
            "self.config.cliprange_value,",
        ),
        Mutant("dual clip forgotten", ppo.PPO.policy_loss, ", self.config.dual_clip)", ")"),
        Mutant("returns for advantages", _common.clipped_loss, "credit.advantages", "credit.returns"),
    ],
    partial(test_by_hand.test_policy_loss, "a2c"): [
        Mutant("A2C with a clip", a2c.A2C.policy_loss, "cliprange=math.inf", "cliprange=0.2"),
    ],
    partial(test_by_hand.test_policy_loss, "reinforce"): [
        Mutant("REINFORCE without its clip", reinforce.Reinforce.policy_loss, "self.config.cliprange", "float('inf')"),
    ],
    partial(test_by_hand.test_policy_loss, "rloo"): [
        Mutant("RLOO without its clip", rloo.RLOO.policy_loss, "self.config.cliprange", "float('inf')"),
    ],
    partial(test_by_hand.test_policy_loss, "grpo"): [
        Mutant("KL loss forgotten", grpo.GRPO.policy_loss, "loss + self.kl.coef * kl,", "loss,"),
        Mutant("KL loss negative", grpo.GRPO.policy_loss, "loss + self.kl.coef * kl,", "loss - self.kl.coef * kl,"),
        Mutant(
            "KL to the old policy",
            grpo.GRPO.policy_loss,
            "rollout.ref_logprobs, rollout.mask",
            "rollout.logprobs, rollout.mask",
        ),
    ],
    partial(test_by_hand.test_value_loss, "ppo"): [
        Mutant(
            "the policy's range for the critic",
            ppo.PPO.value_loss,
            "self.config.cliprange_value",
            "self.config.cliprange",
        ),
        Mutant("critic of advantages", ppo.PPO.value_loss, "credit.returns", "credit.advantages"),
    ],
    partial(test_by_hand.test_value_loss, "a2c"): [
        Mutant("A2C's critic of advantages", a2c.A2C.value_loss, "credit.returns", "credit.advantages"),
    ],
    partial(test_by_hand.test_whitening_is_over_all_ranks, "ppo"): [
        Mutant(
            "whitened by each rank",
            _common.whitened,
            "dist.sum_over_ranks(ops.moments(advantages, mask))",
            "ops.moments(advantages, mask)",
        ),
    ],
    partial(test_kl_controller.test_the_target_is_reached_and_held, 0.1, 1.5): [
        Mutant("controller deaf", _common.KLController.observe, "is not None", "is None"),
        Mutant("KL and target exchanged", _common.KLController.observe, "kl, self._target", "self._target, kl"),
    ],
    # --- the rollout and the update
    partial(test_algorithms.test_the_micro_batch_size_changes_no_result, "ppo"): [
        Mutant(
            "policy's mean of a micro-batch",
            update.update,
            "prompt:], rollout, credit, count",
            "prompt:], rollout, credit, rollout.mask.sum()",
        ),
        Mutant(
            "critic's mean of a micro-batch",
            update.update,
            "values, rollout, credit, count",
            "values, rollout, credit, rollout.mask.sum()",
        ),
    ],
    partial(test_algorithms.test_the_first_minibatch_finds_the_policy_that_sampled, "ppo", 0.7, 3): [
        Mutant("temperature forgotten in the update", update.update, "config.temperature", "1.0"),
    ],
    test_update.test_two_epochs_equal_a_plain_ppo_loop: [
        Mutant("values one token late", scalar.state_values, "prompt_length - 1 : -1", "prompt_length:"),
        Mutant(
            "pads before the prompt are seen",
            joined.fget,
            "[self.prompt_mask, self.mask]",
            "[self.prompt_mask | True, self.mask]",
        ),
    ],
    test_faults.test_responses_that_never_end_are_cut_fined_and_told: [
        Mutant("fine for an end", rollout.score, "(~rollout.ended)", "rollout.ended"),
    ],
    partial(test_generation.test_an_end_at_once_and_no_end_at_all, "loop"): [
        Mutant("tokens after the end are kept", loop._sample, "alive & (token != config.eos_token_id)", "alive"),
    ],
    # --- random streams that are lost
    test_draws.test_every_seed_iteration_prompt_and_copy_has_its_own_stream: [
        Mutant("every seed samples alike", stage.sample, "(config.seed, draw,", "(0, draw,"),
        Mutant("every iteration samples alike", stage.sample, "(config.seed, draw,", "(config.seed, 0,"),
        Mutant("every prompt samples alike", stage.sample, "index, earlier[index]))", "0, earlier[index]))"),
        Mutant("every copy samples alike", stage.sample, "earlier[index] += 1", "pass"),
    ],
    test_draws.test_a_response_is_the_same_alone_and_beside_others: [
        Mutant("sampled from anybody's stream", loop.choose, "(1.0), draws)", "(1.0), torch.rand(len(draws)))"),
    ],
    test_update.test_the_same_iteration_twice_is_bit_exact: [
        Mutant("shuffled from anybody's stream", update._minibatches, ", generator=generator", ""),
    ],
    partial(test_batches.test_an_epoch_sees_a_row_once_and_each_epoch_another_order, 12): [
        Mutant("every epoch in one order", Batches._order, "[self.seed, self.epoch]", "[self.seed]"),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


@each(CAUGHT_BY)
def test_every_mutant_is_caught(check: Check, mutant: Mutant) -> None:
    require_caught(check, mutant)


def test_the_named_tests_pass_without_a_mutant() -> None:
    for check in CAUGHT_BY:
        check()

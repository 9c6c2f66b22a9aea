"""A test of the tests: every known way to get the mathematics wrong is caught by the test named beside it.

Each mutant is one edit of a function's source. The mutated function takes the place of the right one, and
the named test must then fail by its own assertion. A mutant that survives fails here, and so does an edit
that no longer matches the source. Those of step 3's algorithms, update and random streams: step3/test_mutations.py.
"""

from functools import partial

import torch

from rlhf import credit, losses, ops
from tests import test_bandit, test_credit, test_losses, test_ops
from tests.mutants import Check, Mutant, each, require_caught

# test -> the mutants it has to catch
CAUGHT_BY: dict[Check, list[Mutant]] = {
    test_ops.test_garbage_off_the_mask_changes_no_bit: [
        Mutant("mask multiplied in", ops.zero_off_mask, "x.masked_fill(~mask, 0.0)", "x * mask"),
    ],
    test_ops.test_positions_count_real_tokens: [
        Mutant("positions from one", ops.positions, "mask.cumsum(1) - mask", "mask.cumsum(1)"),
        Mutant("positions count pads", ops.positions, "mask.cumsum(1) - mask", "torch.ones_like(mask).cumsum(1) - 1"),
    ],
    test_ops.test_last_index_is_the_last_true: [
        Mutant(
            "last index from the length",
            ops.last_index,
            "(mask * torch.arange(mask.size(1), device=mask.device)).amax(1)",
            "mask.sum(1) - 1",
        ),
    ],
    test_ops.test_parts_of_a_step_add_up_to_its_mean: [
        Mutant("mean per micro-batch", ops.masked_mean, "mask.sum() if count is None else count", "mask.sum()"),
    ],
    test_ops.test_masked_mean_by_hand: [
        Mutant("mean over padding", ops.masked_mean, "mask.sum() if count is None else count", "x.numel()"),
    ],
    partial(test_ops.test_token_logprobs_match_float64, torch.bfloat16): [
        Mutant("log-softmax in bf16", ops.tempered, "at_least_fp32(logits)", "logits"),
    ],
    test_ops.test_token_logprobs_by_hand: [
        Mutant("temperature ignored", ops.tempered, "temperature == 1.0", "True"),
        Mutant("temperature multiplied", ops.tempered, "logits / temperature", "logits * temperature"),
    ],
    test_ops.test_entropy_of_known_distributions: [
        Mutant("entropy negative", ops.entropy, "-(logprobs.exp()", "(logprobs.exp()"),
    ],
    test_ops.test_kl_estimates_by_hand: [
        Mutant("k1 sign", ops.kl_estimate, "logprobs - ref_logprobs\n    match", "ref_logprobs - logprobs\n    match"),
    ],
    test_ops.test_k1_and_k3_are_unbiased: [
        Mutant("k3 backwards", ops.kl_estimate, "torch.expm1(-d) + d", "torch.expm1(d) - d"),
    ],
    test_ops.test_k2_as_a_loss_has_the_gradient_of_the_kl: [
        Mutant("k2 without its half", ops.kl_estimate, "d.square() / 2", "d.square()"),
    ],
    test_ops.test_mean_and_biased_variance: [
        Mutant(
            "unbiased variance",
            ops.mean_var,
            "variance = mean_square - mean.square()",
            "variance = (squares - count * mean.square()) / (count - 1).clamp(min=1)",
        ),
        Mutant("moments over padding", ops.moments, "mask.sum().double()", "mask.sum().double() * 0 + mask.numel()"),
    ],
    test_ops.test_variance_is_never_negative: [
        Mutant(
            "variance below zero",
            ops.mean_var,
            "torch.where(variance > EMPTY_VARIANCE * mean_square, variance, 0.0)",
            "variance",
        ),
    ],
    partial(test_ops.test_constant_input_whitens_to_exact_zeros, 0.1): [
        Mutant("no epsilon", ops.whiten, "torch.rsqrt(var + 1e-8)", "torch.rsqrt(var)"),
    ],
    test_ops.test_whiten_matches_float64: [
        Mutant("variance for deviation", ops.whiten, "torch.rsqrt(var + 1e-8)", "1 / (var + 1e-8)"),
        Mutant("mean not kept", ops.whiten, "white + mean if keep_mean else white", "white"),
    ],
    test_credit.test_kl_rewards_by_hand: [
        Mutant("KL sign", credit.kl_rewards, "-kl_coef * kl,", "kl_coef * kl,"),
    ],
    partial(test_credit.test_rewards_of_a_row_sum_to_score_less_kl, "k1"): [
        Mutant("KL on padding", credit.kl_rewards, "zero_off_mask(-kl_coef * kl, mask)", "-kl_coef * kl"),
    ],
    test_credit.test_the_score_is_paid_once_at_the_last_token: [
        Mutant(
            "score one token early",
            credit.kl_rewards,
            "mask & (mask.long().cumsum(1) == mask.sum(1, keepdim=True))",
            "mask & (mask.long().cumsum(1) == mask.sum(1, keepdim=True) - 1)",
        ),
        Mutant(
            "score one token late",
            credit.kl_rewards,
            "mask & (mask.long().cumsum(1) == mask.sum(1, keepdim=True))",
            "(mask & (mask.long().cumsum(1) == mask.sum(1, keepdim=True))).roll(1, 1)",
        ),
        Mutant(
            "score on every token",
            credit.kl_rewards,
            "mask & (mask.long().cumsum(1) == mask.sum(1, keepdim=True))",
            "mask",
        ),
    ],
    test_credit.test_an_empty_response_earns_exactly_nothing: [
        Mutant("score on the padding after", credit.kl_rewards, "mask & (mask", "(mask"),
    ],
    test_credit.test_garbage_after_the_end_changes_no_bit: [
        Mutant("value of padding as the next value", credit.gae, "torch.where(kept, value, following)", "value"),
        Mutant(
            "advantage of padding carried on",
            credit.gae,
            "torch.where(kept, delta + gamma * lam * running, running)",
            "delta + gamma * lam * running",
        ),
    ],
    test_credit.test_a_cut_response_is_not_bootstrapped: [
        Mutant("a cut response bootstrapped", credit.gae, "torch.zeros_like(values[:, 0])", "values[:, -1]"),
    ],
    partial(test_credit.test_gae_equals_the_double_sum, 0.9, 0.5): [
        Mutant("lambda forgotten", credit.gae, "gamma * lam * running", "gamma * running"),
        Mutant("gamma forgotten in delta", credit.gae, "reward + gamma * following", "reward + following"),
        Mutant("gamma forgotten in the sum", credit.gae, "gamma * lam * running", "lam * running"),
        Mutant("lambda for gamma in delta", credit.gae, "reward + gamma * following", "reward + lam * following"),
        Mutant("returns without the values", credit.gae, "advantages + zero_off_mask(values, mask)", "advantages"),
    ],
    test_credit.test_gae_by_hand: [
        Mutant("columns left reversed", credit.gae, "columns[::-1]", "columns"),
    ],
    test_credit.test_padding_on_either_side_and_holes_change_no_bit: [
        Mutant(
            "advantages on padding",
            credit.gae,
            "zero_off_mask(torch.stack(columns[::-1], dim=1), mask)",
            "torch.stack(columns[::-1], dim=1)",
        ),
    ],
    partial(test_credit.test_adaptive_kl_by_hand, 60.0, 0.2 * 1.02): [
        Mutant("controller uncapped", credit.adapt_kl_coef, "min(max(kl / target - 1, -0.2), 0.2)", "kl / target - 1"),
    ],
    partial(test_credit.test_adaptive_kl_by_hand, 6.6, 0.2 * 1.01): [
        Mutant("controller sign", credit.adapt_kl_coef, "1 + error", "1 - error"),
        Mutant("controller deaf to episodes", credit.adapt_kl_coef, "error * episodes / horizon", "error / horizon"),
    ],
    test_losses.test_token_nll_is_cross_entropy: [
        Mutant("likelihood minimised", losses.token_nll, "-at_least_fp32(logprobs)", "at_least_fp32(logprobs)"),
    ],
    partial(test_losses.test_splitting_a_step_changes_no_sum_and_no_gradient, test_losses.nll): [
        Mutant("nll per micro-batch", losses.token_nll, "mask, count)", "mask)"),
    ],
    test_losses.test_every_response_token_counts_once_and_no_other: [
        Mutant("prompt in the loss", losses.token_nll, "logprobs), mask, count", "logprobs), mask | True, count"),
    ],
    test_losses.test_pairwise_matches_log1p_exp: [
        Mutant("pair turned round", losses.pairwise_logistic, "chosen - rejected\n", "rejected - chosen\n"),
        Mutant("margin added", losses.pairwise_logistic, "gap - margin", "gap + margin"),
    ],
    test_losses.test_centering_pulls_the_mean_of_a_pair_to_zero: [
        Mutant("centering on the gap", losses.pairwise_logistic, "(chosen + rejected).square()", "gap.square()"),
    ],
    test_losses.test_pairwise_stays_finite_far_out: [
        Mutant("naive log sigmoid", losses.pairwise_logistic, "F.logsigmoid(", "(lambda x: x.sigmoid().log())("),
    ],
    test_losses.test_policy_loss_by_hand: [
        Mutant("min and max of the clip", losses.clipped_policy, "torch.maximum(free", "torch.minimum(free"),
    ],
    test_losses.test_first_minibatch_is_the_policy_gradient: [
        Mutant(
            "ratio turned over",
            losses.clipped_policy,
            "torch.exp(logprobs - old_logprobs)",
            "torch.exp(old_logprobs - logprobs)",
        ),
    ],
    test_losses.test_policy_loss_matches_float64: [
        Mutant("clip forgotten", losses.clipped_policy, "ratio.clamp(1 - cliprange, 1 + cliprange)", "ratio"),
        Mutant("only the clipped side", losses.clipped_policy, "torch.maximum(free, clipped)", "clipped"),
        Mutant("clip fraction of the other side", losses.clipped_policy, "(clipped > free)", "(clipped < free)"),
    ],
    test_losses.test_dual_clip_by_hand: [
        Mutant("dual clip on every sign", losses.clipped_policy, "advantages < 0,", "advantages < 9,"),
    ],
    test_losses.test_approx_kl_estimates_kl_of_old_from_new: [
        Mutant(
            "approx_kl backwards",
            losses.clipped_policy,
            "kl_estimate(old_logprobs, logprobs,",
            "kl_estimate(logprobs, old_logprobs,",
        ),
    ],
    partial(test_losses.test_splitting_a_step_changes_no_sum_and_no_gradient, test_losses.policy): [
        Mutant(
            "policy loss per micro-batch",
            losses.clipped_policy,
            "masked_mean(losses, mask, count)",
            "masked_mean(losses, mask)",
        ),
    ],
    partial(test_losses.test_garbage_after_the_end_changes_no_bit, test_losses.policy): [
        Mutant(
            "padding in policy loss", losses._kept, "zero_off_mask(at_least_fp32(x), mask) for", "at_least_fp32(x) for"
        ),
    ],
    test_losses.test_value_loss_by_hand: [
        Mutant("min and max of the value clip", losses.clipped_value, "torch.maximum(", "torch.minimum("),
    ],
    test_losses.test_value_loss_matches_float64: [
        Mutant(
            "value clipped around the return",
            losses.clipped_value,
            "old_values - cliprange, old_values + cliprange",
            "returns - cliprange, returns + cliprange",
        ),
    ],
    test_losses.test_no_token_inside_the_value_range_counts_as_clipped: [
        Mutant(
            "value clip that rounds",
            losses.clipped_value,
            "torch.clamp(values, old_values - cliprange, old_values + cliprange)",
            "old_values + (values - old_values).clamp(-cliprange, cliprange)",
        ),
    ],
    test_losses.test_an_infinite_value_range_is_half_the_squared_error: [
        Mutant("value loss not halved", losses.clipped_value, "0.5 * ", "1.0 * "),
    ],
    partial(test_losses.test_splitting_a_step_changes_no_sum_and_no_gradient, test_losses.value): [
        Mutant(
            "value loss per micro-batch", losses.clipped_value, "clipped_error), mask, count)", "clipped_error), mask)"
        ),
    ],
    partial(test_losses.test_garbage_after_the_end_changes_no_bit, test_losses.value): [
        Mutant(
            "padding in value loss", losses._kept, "zero_off_mask(at_least_fp32(x), mask) for", "at_least_fp32(x) for"
        ),
    ],
    partial(test_bandit.test_an_algorithm_reaches_the_boltzmann_optimum, "ppo", 0): [
        Mutant("KL sign, end to end", credit.kl_rewards, "-kl_coef * kl,", "kl_coef * kl,"),
        Mutant("KL forgotten", credit.kl_rewards, "-kl_coef * kl,", "0 * kl,"),
        Mutant("policy sign", losses.clipped_policy, "torch.maximum(free, clipped)", "-torch.maximum(free, clipped)"),
    ],
    partial(test_bandit.test_an_algorithm_reaches_the_boltzmann_optimum, "grpo", 0): [
        Mutant("KL loss doubled", losses.kl_penalty, "masked_mean(kl", "2 * masked_mean(kl"),
        Mutant(
            "KL loss without gradient", losses.kl_penalty, "_kept(mask, logprobs, ", "_kept(mask, logprobs.detach(), "
        ),
    ],
    test_credit.test_leave_one_out_by_hand: [
        Mutant(
            "baseline counts itself",
            credit.leave_one_out,
            "(grouped.sum(1, keepdim=True) - grouped)",
            "grouped.sum(1, keepdim=True)",
        ),
        Mutant("baseline over K", credit.leave_one_out, "/ (group - 1)", "/ group"),
    ],
    test_credit.test_against_group_by_hand: [
        Mutant("group mean forgotten", credit.against_group, "grouped - grouped.mean(1, keepdim=True)", "grouped"),
        Mutant(
            "biased deviation",
            credit.against_group,
            "grouped.std(1, keepdim=True)",
            "grouped.std(1, correction=0, keepdim=True)",
        ),
        Mutant("mean of the batch", credit.against_group, "grouped.mean(1, keepdim=True)", "grouped.mean()"),
    ],
    test_credit.test_the_number_of_a_response_is_on_all_its_tokens: [
        Mutant("padding gets credit", credit.on_every_token, "zero_off_mask(", "(lambda x, _: x)("),
    ],
}


@each(CAUGHT_BY)
def test_every_mutant_is_caught(check: Check, mutant: Mutant) -> None:
    require_caught(check, mutant)


def test_the_named_tests_pass_without_a_mutant() -> None:
    for check in CAUGHT_BY:
        check()

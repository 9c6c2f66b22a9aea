"""Changes to a healthy run of step 3 that deserve a warning, each."""

from collections.abc import Mapping, Sequence

from step3_ppo.warnings import Watch

Changes = Mapping[str, float]
HEALTHY = {
    "first_approx_kl": 1e-9,
    "first_ratio_std": 3e-6,
    "sampling_mismatch": 1e-6,
    "kl": 0.8,
    "score": 1.0,
    "score_std": 0.7,
    "score_disagreement": 0.3,
    "equal_groups": 0.2,
    "advantage_std": 1.0,
    "raw_advantage_std": 0.4,
    "critic_error": 0.8,
    "advantage_peak": 0.1,
    "score_at_clip": 0.02,
    "clip_fraction": 0.05,
    "response_length": 40.0,
    "truncated": 0.1,
    "score_length_correlation": 0.2,
    "repeated_4_grams": 0.02,
    "entropy": 2.0,
    "skipped_steps": 0.0,
    "optimizer_steps": 8.0,
}


def names(rows: Sequence[Changes], dtype: str = "fp32") -> list[tuple[int, str]]:
    """(iteration, warning) of all that is said of these changes to a healthy run, one iteration each."""
    watch = Watch(dtype)
    return [
        (iteration, notice.name)
        for iteration, changes in enumerate(rows, start=1)
        for notice in watch.check(iteration, HEALTHY | dict(changes))
    ]


QUIET: Changes = {}
GAINED: Changes = {
    "eval_score_before": 0.0, "eval_score": 1.1, "eval_score_ci95": 1.0, "eval_judge_before": 0.5,
    "eval_judge_gain_ci95": 0.3,
}  # fmt: skip
PROVOKED: dict[str, list[Changes]] = {
    "first_ratio": [{"first_approx_kl": 2e-3}],
    "sampling_mismatch": [{"sampling_mismatch": 2e-3}],
    "negative_kl": [{"kl": -0.11}] * 3,
    "kl_above_limit": [{"kl": 10.1}],
    "equal_advantages": [{"raw_advantage_std": 0.0, "advantage_std": 0.0}],
    "equal_groups": [{"equal_groups": 0.6}] * 3,
    "critic_worse_than_mean": [{"critic_error": 1.1}] * 15,
    "advantage_of_one_token": [{"advantage_peak": 0.51}],
    "score_at_clip": [{"score_at_clip": 0.51}],
    "clip_fraction": [{"clip_fraction": 0.31}] * 3,
    "length_exploding": [QUIET] * 3 + [{"response_length": 81.0}],
    "length_collapsing": [QUIET] * 3 + [{"response_length": 19.0}],
    "truncated": [{"truncated": 0.96}],
    "score_follows_length": [{"score_length_correlation": 0.71}] * 3,
    "repeated_ngrams": [{"repeated_4_grams": 0.31}],
    "entropy_collapse": [QUIET] * 3 + [{"entropy": 0.39}],
    "over_optimisation": [
        {"eval_judge": 0.0, "score": -9.0},
        {"eval_judge": 1.0, "score": 2.0},
        {"eval_judge": 0.7, "score": 3.0},
        {"eval_judge": 0.6, "score": 4.0},
    ],
    "judge_diverges": [GAINED | {"eval_judge": 0.3}, GAINED | {"eval_judge": 0.1}],
    "members_disagree": [QUIET] * 3 + [{"score_disagreement": 0.61, "score": 1.1}],
    "overfitting": [
        {"eval_score": 0.0, "score": 0.0},
        {"eval_score": -0.1, "score": 2.0},
        {"eval_score": -0.2, "score": 3.0},
    ],
    "policy_collapsed": [
        {"eval_distinct_2_before": 0.5, "eval_distinct_2": 0.05},
        {"eval_distinct_2_before": 0.5, "eval_distinct_2": 0.0499},
    ],
    "policy_unmoved": [{"eval_changed": 0.01}, {"eval_changed": 0.0}],
    "skipped_steps": [{"skipped_steps": 8.0}],
}
"""By warning: changes to a healthy run of which the last is the first that deserves it."""

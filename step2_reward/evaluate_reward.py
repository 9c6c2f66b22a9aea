"""`rlhf evaluate-reward`: how well one or several reward models order the pairs of a file."""

from collections.abc import Sequence

from rlhf import console
from rlhf.errors import UserError, run_program
from rlhf.evaluation.programs import read_options
from step2_reward.evaluation_options import EvaluateRewardConfig


def check_required(options: EvaluateRewardConfig) -> None:
    """Raises: UserError if an option without a default is missing."""
    if not options.models:
        raise UserError("rlhf evaluate-reward: got no model, expected MODEL ... --data-path PATH ...")
    if not options.data_path:
        raise UserError("--data-path: not given, expected sources of pairs, e.g. pairs.jsonl")


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf evaluate-reward") -> int:
    """Exit code 2 for a user's mistake, 3 for a score that is not finite; each prints one line on stderr."""
    words = console.words(argv)
    options = read_options(EvaluateRewardConfig, words, program, "Evaluate reward models on pairs.", check_required)
    from rlhf.engine.nonfinite import NonFiniteError
    from rlhf.evaluation.batch_generation import require_output
    from rlhf.launch.supervisor import NON_FINITE
    from rlhf.training.stage_process import give_up
    from step2_reward import pair_scores, reward_results

    try:
        require_output(options.output, options.overwrite)
        reward_results.report_results(options, pair_scores.score_models(options))
    except NonFiniteError as error:
        give_up(f"error: {error}", NON_FINITE)
    return 0


if __name__ == "__main__":
    run_program(main)

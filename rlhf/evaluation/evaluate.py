"""`rlhf evaluate`: which of several policies scores higher on the prompts of a file, and at which KL."""

from collections.abc import Sequence

from rlhf import console
from rlhf.errors import UserError, run_program
from rlhf.evaluation.options import EvaluateConfig
from rlhf.evaluation.programs import read_options, require_prompts, run_on_processes


def check_required(options: EvaluateConfig) -> None:
    """Raises: UserError if an option without a default is missing."""
    if len(options.policies) < 2:
        raise UserError(f"--policies: got {len(options.policies)}, expected two or more, the baseline first")
    require_prompts(options)
    if options.reward is None:
        raise UserError("--reward: not given, expected a score source, e.g. my_judge.py:score or learned,model=DIR")


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf evaluate") -> int:
    """Exit code 2 for a user's mistake, 3 for a non-finite number; each prints one line on stderr."""
    words = console.words(argv)
    options = read_options(EvaluateConfig, words, program, "Compare policies on the prompts of a file.", check_required)
    from rlhf.engine.nonfinite import NonFiniteError
    from rlhf.evaluation import comparison, results_table
    from rlhf.launch.supervisor import NON_FINITE
    from rlhf.training.stage_process import give_up

    def compare() -> None:
        try:
            policies = comparison.check(options)
            results_table.report_results(*comparison.of_scored(policies, comparison.measure_all(policies)))
        except NonFiniteError as error:
            give_up(f"error: {error}", NON_FINITE)

    return run_on_processes("rlhf.evaluation.evaluate", words, options, compare)


if __name__ == "__main__":
    run_program(main)

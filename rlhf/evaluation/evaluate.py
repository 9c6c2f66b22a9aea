"""`rlhf evaluate`: which of several policies scores higher on the prompts of a file, and at which KL."""

import sys

from rlhf import console
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.evaluation.options import EvaluateConfig

NAME = "python -m rlhf evaluate"


def check_required(options: EvaluateConfig) -> None:
    """Raises: UserError if an option without a default is missing."""
    if len(options.policies) < 2:
        raise UserError(f"--policies: got {len(options.policies)}, expected two or more, the baseline first")
    if options.prompts is None:
        raise UserError("--prompts: not given, expected a .jsonl or .txt file")
    if options.reward is None:
        raise UserError("--reward: not given, expected a score source, e.g. my_judge.py:score or learned,model=DIR")


def main() -> int:
    """Exit code 2 for a user's mistake, 3 for a non-finite number; each prints one line on stderr."""
    options = parser.parse(
        EvaluateConfig, sys.argv[1:], console.program(NAME), "Compare policies on the prompts of a file."
    )
    check_required(options)
    console.loading(console.program(NAME), sys.argv)
    console.quiet_libraries()
    from rlhf.engine.nonfinite import NonFiniteError
    from rlhf.evaluation import comparison, results_table
    from rlhf.launch.supervisor import NON_FINITE
    from rlhf.training.stage_process import give_up

    try:
        policies = comparison.check(options)
        results_table.report_results(policies, comparison.measure_all(policies))
    except NonFiniteError as error:
        give_up(f"error: {error}", NON_FINITE)
    return 0

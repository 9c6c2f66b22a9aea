"""`rlhf evaluate`: which of several policies is better on the prompts of a file, and what it paid in KL."""

import sys

from rlhf import console
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.evaluation.options import EvaluateConfig

NAME = "python -m rlhf evaluate"


def require_all(options: EvaluateConfig) -> None:
    """Raises: UserError if an option that has no default was not given."""
    if len(options.policies) < 2:
        raise UserError(f"--policies: got {len(options.policies)}, expected two or more, the baseline first")
    if options.prompts is None:
        raise UserError("--prompts: not given, expected a .jsonl or .txt file")
    if options.reward is None:
        raise UserError("--reward: not given, expected a score source, e.g. my_judge.py:score or learned,model=DIR")


def main() -> int:
    """Exit code 2 for a user's mistake, 3 for a number that is not finite; each is one line on stderr."""
    options = parser.parse(
        EvaluateConfig, sys.argv[1:], console.program(NAME), "Compare policies on the prompts of a file."
    )
    require_all(options)
    console.loading(console.program(NAME), sys.argv)
    console.quiet_libraries()
    from rlhf.engine.nonfinite import NonFiniteError
    from rlhf.evaluation import comparison, results_table
    from rlhf.launch.launcher import NON_FINITE, give_up

    try:
        setting = comparison.check(options)
        results_table.tell(setting, comparison.measure_all(setting))
    except NonFiniteError as error:
        give_up(f"error: {error}", NON_FINITE)
    return 0

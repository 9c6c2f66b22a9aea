"""`python -m rlhf.evaluate`: which of several policies is better on the prompts of a file, and what it paid in KL."""

import sys

from pydantic import Field

from rlhf import config, status
from rlhf.config import UserError
from rlhf.options import PromptFileOptions

NAME = "python -m rlhf.evaluate"


class EvaluateConfig(PromptFileOptions):
    """Who is compared, on what, and by whom."""

    policies: tuple[str, ...] = ()
    """two or more: stage directories, model directories, hub ids or short names; the first is the baseline"""
    reference: str | None = None
    """policy that KL and perplexity are measured from; by default the baseline"""
    samples: int = Field(2, ge=2)
    """responses of each policy to each prompt; at least 2, as the win rate compares independent draws"""
    seed: int = Field(0, ge=0)
    """of the sampling; every policy draws from the same random stream"""
    micro_batch_size: int = Field(8, ge=1)
    """responses in one forward pass for log-probs; changes memory and speed, never results"""
    sample_rows: int = Field(4, ge=0)
    """prompts shown with a response of each policy"""
    output: str | None = None
    """directory for results.json, results.md and samples.jsonl; by default results are only printed"""


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
    options = config.parse(EvaluateConfig, sys.argv[1:], NAME, "Compare policies on the prompts of a file.")
    require_all(options)
    status.loading(NAME, sys.argv)
    from rlhf.record import quiet_libraries

    quiet_libraries()
    from rlhf import comparison, standings
    from rlhf.launch import NON_FINITE, give_up
    from rlhf.nonfinite import NonFiniteError

    try:
        setting = comparison.check(options)
        standings.tell(setting, comparison.measure_all(setting))
    except NonFiniteError as error:
        give_up(f"error: {error}", NON_FINITE)
    return 0


if __name__ == "__main__":
    raise SystemExit(config.run_as_user(main))

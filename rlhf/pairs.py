"""`python -m rlhf.pairs`: pairs of a policy's own responses, labelled by a score source or for a person to fill in."""

import sys

from pydantic import Field

from rlhf import config, status
from rlhf.config import UserError
from rlhf.options import PromptFileOptions

NAME = "python -m rlhf.pairs"


class PairsConfig(PromptFileOptions):
    """Who responds, to what, and who says which response is better."""

    policies: tuple[str, ...] = ()
    """one, whose two draws to each prompt are compared, or two: stage directories, model directories, hub ids or short
    names"""
    reward: str | None = None
    """score source that labels: file.py:function, learned,model=DIR, or another name in rlhf/rewards/; none: the pairs
    are written for a person to fill in"""
    tie: float = Field(0.0, ge=0)
    """scores that differ by no more than this are a tie, which is dropped"""
    margin: bool = False
    """write the difference of the scores as the column margin, which the reward model's loss then asks for"""
    output: str | None = None
    """.jsonl file to write"""


def require_all(options: PairsConfig) -> None:
    """Raises: UserError if an option that has no default was not given, or one makes no sense beside another."""
    if len(options.policies) not in (1, 2):
        raise UserError(f"--policies: got {len(options.policies)}, expected one or two")
    if options.prompts is None:
        raise UserError("--prompts: not given, expected a .jsonl or .txt file")
    if options.output is None or not options.output.endswith(".jsonl"):
        raise UserError(f"--output: got {options.output}, expected a .jsonl file")
    if options.reward is None and (options.tie or options.margin):
        raise UserError("--tie and --margin speak of scores; expected a score source: --reward SOURCE")


def main() -> int:
    """Exit code 2 for a user's mistake, one line on stderr."""
    options = config.parse(PairsConfig, sys.argv[1:], NAME, "Pairs of responses to compare, for a reward model.")
    require_all(options)
    status.loading(NAME, sys.argv)
    from rlhf.record import quiet_libraries

    quiet_libraries()
    from rlhf import pairing

    pairing.run(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(config.run_as_user(main))

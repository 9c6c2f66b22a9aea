"""`rlhf pairs`: pairs of a policy's own responses, labelled by a score source or for a person to fill in."""

from collections.abc import Sequence

from rlhf import console
from rlhf.errors import UserError, run_program
from rlhf.evaluation.options import PairsConfig
from rlhf.evaluation.programs import read_options, require_prompts, run_on_processes


def check_required(options: PairsConfig) -> None:
    """Raises: UserError if an option without a default is missing, or has a value that cannot be used."""
    if len(options.policies) not in (1, 2):
        raise UserError(f"--policies: got {len(options.policies)}, expected one or two")
    require_prompts(options)
    if options.output is None or not options.output.endswith(".jsonl"):
        raise UserError(f"--output: {options.output or 'not given'}, expected a .jsonl file")
    if options.reward is None and (options.tie or options.margin):
        console.say("note: --tie and --margin have no effect without --reward SOURCE, whose scores they compare")


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf pairs") -> int:
    """Exit code 2 for a user's mistake, with one line on stderr."""
    words = console.words(argv)
    options = read_options(
        PairsConfig, words, program, "Pairs of responses to compare, for a reward model.", check_required
    )
    from rlhf.evaluation import label_pairs

    return run_on_processes("rlhf.evaluation.pairs", words, options, lambda: label_pairs.run(options))


if __name__ == "__main__":
    run_program(main)

"""`rlhf VERB ...`: every program of the project behind one name. A program is imported when it is called."""

import importlib
import sys

from rlhf.config import suggest
from rlhf.errors import UserError, run_as_user

VERBS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "train": ("rlhf.chain.command", (), "the three stages, one after the other"),
    "plan": ("rlhf.chain.command", ("--plan",), "the memory, time and disk that `train` with these options takes"),
    "sft": ("step1_sft.__main__", (), "step 1 alone: supervised fine-tuning"),
    "reward": ("step2_reward.__main__", (), "step 2 alone: the reward model"),
    "ppo": ("step3_ppo.__main__", (), "step 3 alone: reinforcement learning"),
    "preview": ("data.preview.command", (), "the rows of your data as a model will see them"),
    "evaluate": ("rlhf.evaluation.evaluate", (), "which of several policies is better on the prompts of a file"),
    "pairs": ("rlhf.evaluation.pairs", (), "pairs of a policy's responses, to label for the next reward model"),
}
"""the module whose `main` is the program, options that it always gets, and what it does"""


def usage() -> str:
    """What `rlhf --help` prints."""
    verbs = "".join(f"  {verb:<10}{does}\n" for verb, (_, _, does) in VERBS.items())
    return f"usage: rlhf VERB [options]\n\n{verbs}\nrlhf VERB --help lists the options of a verb."


def main() -> int:
    """Run the verb that the command line names. Raises: UserError for one that there is not."""
    words = sys.argv[1:]
    if not words or words[0] in ("--help", "-h"):
        print(usage())
        return 0
    verb = words[0]
    if verb not in VERBS:
        raise UserError(f"rlhf {verb}: no such verb{suggest(verb, list(VERBS))}; have {', '.join(VERBS)}")
    module, options, _ = VERBS[verb]
    sys.argv = [f"rlhf {verb}", *words[1:], *options]
    return int(importlib.import_module(module).main() or 0)


def run() -> int:
    """The console script `rlhf`."""
    return run_as_user(main)

"""`rlhf VERB ...`: every program of the project behind one name. A program is imported when it is called."""

import importlib
import importlib.util
import sys
from pathlib import Path

from rlhf.config import suggest
from rlhf.errors import UserError, run_as_user
from rlhf.shipped import PACKAGES, ROOT

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


def require_ours() -> None:
    """Other people have packages called `data` too. Putting ours first would hide theirs from a user's own reward or
    dataset file, without a word; so a clash is refused.

    Raises: UserError if Python would import one of ours from elsewhere.
    """
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        got = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        expected = ROOT / name / "__init__.py"
        if got is None or Path(got).resolve() != expected.resolve():
            raise UserError(
                f"package {name}: Python would import it from {got}, expected {expected}; rename or remove the other "
                "one, take its directory out of PYTHONPATH, or start from another directory"
            )


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
    require_ours()
    module, options, _ = VERBS[verb]
    sys.argv = [f"rlhf {verb}", *words[1:], *options]
    return int(importlib.import_module(module).main() or 0)


def run() -> int:
    """The console script `rlhf`."""
    return run_as_user(main)

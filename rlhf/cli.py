"""`rlhf VERB ...`: one command for every program of the project. A program is imported when it is called."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rlhf import console
from rlhf.config import suggest
from rlhf.errors import UserError, run_program
from rlhf.shipped import PACKAGES, ROOT

DISTRIBUTION = "rlhf-pipeline"
"""the name of the package for pip"""
VERBS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "train": ("rlhf.chain.command", (), "the three stages, one after the other"),
    "plan": ("rlhf.chain.command", ("--plan",), "the memory and disk that `train` with these options takes"),
    "sft": ("step1_sft.__main__", (), "step 1 alone: supervised fine-tuning"),
    "reward": ("step2_reward.__main__", (), "step 2 alone: the reward model"),
    "ppo": ("step3_ppo.__main__", (), "step 3 alone: reinforcement learning"),
    "preview": ("data.preview.command", (), "the rows of your data as a model will see them"),
    "pairs": ("rlhf.evaluation.pairs", (), "pairs of a policy's responses, to label for the next reward model"),
    "report": ("rlhf.chain.report", (), "one page on what runs did, and whether it worked"),
    "diff": ("rlhf.chain.diff", (), "what makes two runs differ: the first thing that does, and all others"),
    "verify": ("rlhf.chain.verify", (), "whether the numbers of a run hold when plain transformers computes them"),
    "evaluate": ("rlhf.evaluation.evaluate", (), "which of several policies is better on the prompts of a file"),
    "evaluate-reward": ("step2_reward.evaluate_reward", (), "how well reward models order the pairs of a file"),
    "chat": ("rlhf.chain.chat", (), "talk to the policies of a run, compare them, and vote"),
    "export": ("rlhf.chain.export", (), "a plain model of an adapter, merged into its base model"),
}
"""by verb: the module with the program's `main`, options that are always added, and a description"""


HEADINGS = {"train": "train", "report": "look", "export": "share"}
"""the title of a group of verbs, by its first"""


def require_own_packages() -> None:
    """Refuse a clash with another package called `data` or the like.

    Putting this project's packages first on the path would silently hide the other package from a user's own reward or
    dataset file.
    Raises: UserError if Python would import one of this project's packages from another path.
    """
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        location = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        expected = ROOT / name / "__init__.py"
        if location is None or Path(location).resolve() != expected.resolve():
            raise UserError(
                f"package {name}: Python would import it from {location}, expected {expected}; rename or remove the "
                "other package, remove its directory from PYTHONPATH, or start from another directory"
            )


def usage() -> str:
    """The text of `rlhf --help`."""
    text = ""
    for verb, (_, _, description) in VERBS.items():
        text += f"\n{HEADINGS[verb]}:\n" if verb in HEADINGS else ""
        text += f"  {verb:<16}{description}\n"
    return f"usage: rlhf VERB [options]\n{text}\nrlhf VERB --help lists the options of a verb."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb on the command line. Raises: UserError for an unknown verb."""
    words = console.words(argv)
    if not words or words[0] in ("--help", "-h"):
        print(usage())
        return 0
    if words == ["--version"]:
        print(f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        raise UserError(f"rlhf {verb}: no such verb{suggest(verb, list(VERBS))}; have {', '.join(VERBS)}")
    require_own_packages()
    module, options, _ = VERBS[verb]
    return int(importlib.import_module(module).main([*words[1:], *options], f"rlhf {verb}"))


def run() -> NoReturn:
    """The console script `rlhf`."""
    run_program(main)

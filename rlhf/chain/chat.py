"""`rlhf chat RUN`: talk to the policies of a run, compare them, and vote."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf import console
from rlhf.chain.options import SECTIONS
from rlhf.chain.stages import STAGES
from rlhf.chat.options import ChatOptions, check_chat
from rlhf.evaluation.programs import read_options

if TYPE_CHECKING:
    from rlhf.chat.run_models import RunModels

BY_NAME = {SECTIONS[step]: stage for step, stage in STAGES.items()}
"""the stages by the names of their options"""


def open_run(argv: Sequence[str], program: str) -> tuple[ChatOptions, "RunModels"]:
    """The options of the command line, and the models of the run that they name. Raises: UserError."""
    options = read_options(ChatOptions, argv, program, "Talk to the policies of a run.", check_chat)
    from rlhf.chat.run_models import run_models  # imported here because it imports torch

    run = run_models(options.run, BY_NAME)
    console.status("loading the models")
    return options, run


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf chat") -> int:
    """Until the person ends the chat. Exit code 2 for a user's mistake."""
    options, run = open_run(console.words(argv), program)
    from rlhf.chat.session import open_session

    session = open_session(options, run)
    if options.web:
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # nothing is sent anywhere
        from rlhf.chat.web import serve_page

        serve_page(session, options)
        return 0
    import readline  # noqa: F401  (arrow keys and a history of lines in input())

    from rlhf.chat.terminal import Terminal

    Terminal(session).run()
    return 0

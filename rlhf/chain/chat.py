"""`rlhf chat RUN`: talk to the policies of a run, compare them, and vote."""

import os
import sys

from rlhf import console
from rlhf.chain.options import SECTIONS
from rlhf.chain.stages import STAGES
from rlhf.chat.options import ChatOptions, check_chat
from rlhf.config import parser

NAME = "python -m rlhf chat"
BY_NAME = {SECTIONS[step]: stage for step, stage in STAGES.items()}
"""the stages by the names of their options"""


def main() -> int:
    """Until the person ends the chat. Exit code 2 for a user's mistake."""
    options = parser.parse(ChatOptions, sys.argv[1:], console.program(NAME), "Talk to the policies of a run.")
    check_chat(options)
    if options.web:
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # nothing is sent anywhere
    console.loading(console.program(NAME), sys.argv)
    console.quiet_libraries()
    from rlhf.chat.run_models import run_models
    from rlhf.chat.session import open_session

    run = run_models(options.run, BY_NAME)
    console.status("loading the models")
    session = open_session(options, run)
    if options.web:
        from rlhf.chat.web import serve_page

        serve_page(session, options)
        return 0
    import readline  # noqa: F401  (arrow keys and a history of lines in input())

    from rlhf.chat.terminal import Terminal

    Terminal(session).run()
    return 0

"""`rlhf serve RUN`: policies of a run behind the HTTP interface of OpenAI's chat API."""

import sys

from rlhf import console
from rlhf.chain.chat import BY_NAME
from rlhf.chat.options import ServeOptions, api_key
from rlhf.config import parser

NAME = "python -m rlhf serve"


def main() -> int:
    """Until Ctrl-C. Exit code 2 for a user's mistake."""
    options = parser.parse(ServeOptions, sys.argv[1:], console.program(NAME), "Serve policies as OpenAI's chat API.")
    key = api_key(options)
    console.loading(console.program(NAME), sys.argv)
    console.quiet_libraries()
    from rlhf.chat.responses import load_models
    from rlhf.chat.run_models import run_models
    from rlhf.chat.server import serve

    run = run_models(options.run, BY_NAME)
    console.status("loading the models")
    paths = {name: run.path(name) for name in options.policies or (run.newest,)}
    models = load_models(paths, None, None, options.chat_template, options.dtype)
    serve(models, options, key)
    return 0

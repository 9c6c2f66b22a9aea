"""`rlhf serve RUN`: policies of a run behind the HTTP interface of OpenAI's chat API."""

from rlhf.chain.chat import open_run
from rlhf.chat.options import ServeOptions, api_key

NAME = "python -m rlhf serve"


def main() -> int:
    """Until Ctrl-C. Exit code 2 for a user's mistake."""
    options, key, run = open_run(NAME, "Serve policies as OpenAI's chat API.", ServeOptions, api_key)
    from rlhf.chat.responses import load_models
    from rlhf.chat.server import serve

    paths = {name: run.path(name) for name in options.policies or (run.newest,)}
    models = load_models(paths, None, None, options.chat_template, options.dtype)
    serve(models, options, key)
    return 0

"""`rlhf push DIR OWNER/NAME`: upload a saved model to the hub. Nothing else uploads, beside `--push-to-hub`.

`hf upload DIR --private` publishes samples of prompts beside the model, and writes to a public repository without a
word (huggingface_hub 2.4).
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from rlhf import console
from rlhf.config import Config, parser
from rlhf.errors import UserError

FOLDERS = ("actor", "model")
"""folders of a stage, of which the first that there is is uploaded"""
LATER = "the model stays where it is; upload it with `rlhf push DIR OWNER/NAME` once the hub answers"
LOGIN = "set HF_TOKEN to a token with write access, or log in with `hf auth login`"


class PushConfig(Config):
    """The model, and where it goes."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("model", "repository")

    model: str = ""
    """directory of a model, or of a finished stage"""
    repository: str = ""
    """OWNER/NAME on the hub; it is created if there is none"""
    private: bool = False
    """a repository that is created is private"""


def require_push(repository: str, private: bool) -> None:
    """Log in and create the repository if there is none, so that a mistake is known before training.

    Raises: UserError if the hub does not answer, or lets this user not write there.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import validate_repo_id

    from rlhf.hub.offline import unreachable

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"push to {repository}: HF_HUB_OFFLINE is set; unset it, or do not push")
    with _plain_errors(repository):
        validate_repo_id(repository)
        if "/" not in repository:
            raise UserError(f"push to {repository}: expected OWNER/NAME")
        reason = unreachable()
        if reason:
            raise UserError(
                f"push to {repository}: the hub at {constants.ENDPOINT} does not answer ({reason}); {LATER}; a "
                "run trains without --push-to-hub"
            )
        hub = HfApi()
        hub.whoami()
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.auth_check(repository, write=True)  # create_repo accepts another owner's repository that can be read
        if private and not hub.model_info(repository).private:
            raise UserError(
                f"push to {repository}: the repository is public, and got --private; make it private on the hub, or "
                "name another"
            )


def push_model(path: str, repository: str) -> str:
    """Upload the model in a directory, or of a finished stage. Returns its address.

    Raises: UserError if there is no model, a file of the stage was changed, or the hub refuses.
    """
    from huggingface_hub import HfApi

    folder = model_directory(path)
    with _plain_errors(repository):
        console.status(f"uploading {folder} to {repository}")
        info = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Upload model", ignore_patterns=[".*"]
        )
        return info.repo_url.url


def model_directory(path: str) -> Path:
    """The directory of the model that `path` names. Raises: UserError if there is no whole model."""
    from rlhf.storage import manifests

    folder = Path(manifests.resolve_model_path(path, *FOLDERS))
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        have = manifests.models_beneath(folder)
        raise UserError(f"{path}: no model, expected a directory with config.json and *.safetensors{have}")
    return folder


@contextlib.contextmanager
def _plain_errors(repository: str) -> Iterator[None]:
    """Errors of the hub as one line."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"push to {repository}: expected OWNER/NAME ({error})") from None
    except LocalTokenNotFoundError:
        raise UserError(f"push to {repository}: no token; {LOGIN}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        cure = LOGIN if status in (401, 403) else LATER
        detail = error.server_message or error.response.reason_phrase
        raise UserError(f"push to {repository}: the hub answers {status} ({detail}); {cure}") from None
    except HTTPError as error:
        raise UserError(f"push to {repository}: {type(error).__name__}: {error}; {LATER}") from None


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf push") -> int:
    """Exit code 2 for a user's mistake, or if the hub refuses."""
    words = console.words(argv)
    options = parser.parse(PushConfig, words, program, "Upload a saved model to the hub.")
    if not options.repository:
        raise UserError("rlhf push: expected a directory and OWNER/NAME")
    console.loading(program, words)
    folder = model_directory(options.model)
    require_push(options.repository, options.private)
    print(push_model(str(folder), options.repository))
    return 0

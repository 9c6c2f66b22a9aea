"""A quick test whether the model hub can be reached, before a library retries for a long time."""

import http.client
import ssl
import threading
import urllib.error
import urllib.request

from huggingface_hub import constants

from rlhf.errors import UserError
from rlhf.hub.short_names import suggestion

HUB_TIMEOUT = 5.0
"""seconds to wait for the hub's first answer"""


def require_hub(what: str) -> None:
    """Raise an error quickly if `what` must come from the hub and the hub does not answer.

    Otherwise the hub client's retries would delay a run without network by up to a minute. With HF_HUB_OFFLINE=1
    no request is sent, as only the local cache is used.
    Raises: UserError with the cure, after HUB_TIMEOUT seconds at most.
    """
    if constants.HF_HUB_OFFLINE:
        return
    reason = unreachable()
    if reason:
        raise UserError(
            f"{what}: no such local path{suggestion(what)}, and the hub at {constants.ENDPOINT} does not answer "
            f"({reason}); give a local path, or set HF_HUB_OFFLINE=1 if it is in the local cache"
        )


def unreachable() -> str:
    """Why the hub does not answer within HUB_TIMEOUT seconds; an empty string if it answers."""
    results: list[str] = []
    # In a thread, because a name lookup and a slow answer have no time limit.
    request = threading.Thread(target=lambda: results.append(_connection_error()), daemon=True)
    request.start()
    request.join(HUB_TIMEOUT)
    return results[0] if results else f"no answer in {HUB_TIMEOUT:g} s"


def _connection_error() -> str:
    """Why the hub cannot be reached; an empty string if it answers."""
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        return ""  # the hub answers; a later request reports the error
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLError):
            return ""  # the hub client may trust other certificates
        return str(error) or type(error).__name__
    return ""

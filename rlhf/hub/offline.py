"""Whether the model hub can be reached at all, asked before a library asks it at length."""

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
    """Refuse at once when `what` is to come from the hub and the hub does not answer.

    Without this the hub's own retries hold a run without network for up to a minute. With HF_HUB_OFFLINE=1
    nothing is asked: the local cache answers.
    Raises: UserError with the cure, after HUB_TIMEOUT seconds at most.
    """
    if constants.HF_HUB_OFFLINE:
        return
    found: list[str] = []
    # In a thread: looking up a name, or an answer that drips in, heeds no time limit.
    asking = threading.Thread(target=lambda: found.append(_hub_trouble()), daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT)
    trouble = found[0] if found else f"nothing came in {HUB_TIMEOUT:g} s"
    if trouble:
        raise UserError(
            f"{what}: no such local path{suggestion(what)}, and the hub at {constants.ENDPOINT} does not answer "
            f"({trouble}); give a local path, or set HF_HUB_OFFLINE=1 if it is in the local cache"
        )


def _hub_trouble() -> str:
    """Why the hub cannot be reached; empty if it answers."""
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        return ""  # an answer, if not a friendly one: what follows says more
    except (OSError, ValueError, http.client.HTTPException) as error:
        trusts = isinstance(getattr(error, "reason", None), ssl.SSLError)
        return "" if trusts else str(error) or type(error).__name__  # the hub's own client may trust other certificates
    return ""

"""One backend a file, which samples responses: `Config`, a `BackendOptions`, and `build(config)`, a `Backend`."""

from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from rlhf import plugins
from rlhf.config import Config
from rlhf.config.options import EngineOptions, SamplingOptions
from rlhf.errors import UserError
from rlhf.types import Prompts, Rollout

FOLDER = __name__


class BackendOptions(Config):
    """What the stage sets for every backend. A backend may add options of its own and override the methods."""

    eos_token_id: int
    """the one token that ends a response"""
    pad_token_id: int
    """fills a response after its end"""
    max_tokens: int | None = None
    """most tokens of a prompt with its response; None: the context of the model"""
    adapter: str | None = None
    """what the actor is wrapped in, as a spec of rlhf/adapters"""

    def check(self, engine: EngineOptions, sampling: SamplingOptions) -> None:
        """Raises: UserError if the backend cannot sample here from an actor that has these engine options."""

    def device_share(self) -> float:
        """The share of a device's memory that the backend takes for itself during a rollout, from 0 to 1."""
        return 0.0


class Backend(Protocol):
    """What a stage asks of a backend. Shapes: B prompts, P prompt tokens, at most T = response_length new tokens."""

    takes_all: bool = False
    """optional; True: one call gets all prompts of a rollout, instead of `rollout_batch_size` of them"""

    def __call__(
        self, lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, draws: Tensor | None
    ) -> Rollout:
        """A response to each of the left-padded prompts [B, P], with the log-probs it was sampled with [B, T].

        `draws`: uniform numbers [B, T] in [0, 1), the only randomness; None: greedy.
        """


def options(spec: str, **known: Any) -> BackendOptions:
    """The options of the backend that `spec` names, together with the `known` ones that the stage sets.

    Raises: UserError for an unknown name, an unknown or bad option, or one that the stage sets.
    """
    name, own = plugins.parse_spec(spec)
    for option in own.keys() & known.keys():
        raise UserError(f"rollout backend '{spec}': got {option}, expected it from the stage; leave it out")
    config = plugins.find(FOLDER, name).Config
    if not (isinstance(config, type) and issubclass(config, BackendOptions)):
        raise UserError(f"{name}: Config: got {config}, expected a class derived from rlhf.generation.BackendOptions")
    found: BackendOptions = plugins.options(FOLDER, {"name": name, **own, **known})
    return found


def open_backend(spec: str, **known: Any) -> Backend:
    """The backend that `spec` names, with every member of the contract.

    Raises: UserError as of `options`, or if the backend cannot be called as the contract says.
    """
    name, _ = plugins.parse_spec(spec)
    backend: Backend = plugins.find(FOLDER, name).build(options(spec, **known))
    return plugins.conforming(backend, Backend, name)

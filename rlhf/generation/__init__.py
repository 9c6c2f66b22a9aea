"""Generation backends, one per file: `Config`, a subclass of `BackendOptions`, and `build(config)`, which returns a
`Backend`."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from rlhf import plugins
from rlhf.config import Config
from rlhf.config.options import EngineOptions, SamplingOptions
from rlhf.errors import UserError
from rlhf.types import Prompts, SampledRollout

FOLDER = __name__


class BackendOptions(Config):
    """Options that the stage sets for every backend. A backend may add its own options and override the methods."""

    eos_token_id: int
    """the tokenizer's end token; `rlhf.models.ends.end_ids(lm, eos_token_id)` has all ids that end a response"""
    pad_token_id: int
    """padding after the end of a response"""
    max_tokens: int | None = None
    """maximum number of tokens of a prompt and its response; None: the context of the model"""
    adapter: str | None = None
    """the actor's adapter, as a spec of rlhf/adapters"""

    def check(self, engine: EngineOptions, sampling: SamplingOptions) -> None:
        """Raises: UserError if the backend cannot sample on this machine from an actor with these engine options."""

    def device_share(self) -> float:
        """The share of a device's memory that the backend itself uses during a rollout, from 0 to 1."""
        return 0.0


def nothing() -> None:
    """The default of `Backend.release`."""


class Backend(Protocol):
    """What a stage requires of a backend. B prompts, P prompt tokens, at most T = response_length new tokens."""

    takes_all: bool = False
    """optional; True: one call gets all prompts of a rollout, instead of `rollout_batch_size` of them"""
    release: Callable[[], None] = staticmethod(nothing)
    """optional; called after each rollout: other models compute now, and need the memory of the device"""
    close: Callable[[], None] | None = None
    """optional; called once at the end, also after an error, while the process group is still there"""

    def __call__(
        self, lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, uniforms: Tensor | None
    ) -> SampledRollout:
        """A response to each of the left-padded prompts [B, P], with the log-probs it was sampled with [B, T].

        Prompts and random numbers are on the CPU; `lm.device` is that of the model. The result may be on either.
        uniforms: random numbers [B, T] in [0, 1), the only source of randomness; None: greedy
        """


def options(spec: str, **stage_options: object) -> BackendOptions:
    """The options of the backend that `spec` names, together with those that the stage sets.

    Raises: UserError for an unknown name, an unknown or invalid option, or an option that only the stage may set.
    """
    name, spec_options = plugins.parse_spec(spec)
    for option in spec_options.keys() & stage_options.keys():
        raise UserError(f"rollout backend '{spec}': got {option}, which the stage sets itself; leave it out")
    config = plugins.find(FOLDER, name).Config
    if not (isinstance(config, type) and issubclass(config, BackendOptions)):
        raise UserError(f"{name}: Config: got {config}, expected a class derived from rlhf.generation.BackendOptions")
    backend_options: BackendOptions = plugins.options(FOLDER, {"name": name, **spec_options, **stage_options})
    return backend_options


def open_backend(spec: str, **stage_options: object) -> Backend:
    """The backend that `spec` names, with every member of the contract.

    Raises: UserError as of `options`, or if the backend does not fulfil the contract.
    """
    name, _ = plugins.parse_spec(spec)
    backend: Backend = plugins.build_with(FOLDER, name, options(spec, **stage_options))
    return plugins.conforming(backend, Backend, name)

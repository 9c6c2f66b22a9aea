"""A stand-in for vLLM 0.33 on a CPU: the part of its interface that the backend uses, over a transformers model.

It is as strict as the real one, or stricter: a call in the wrong state fails, weights must be those of a checkpoint,
and what it computed for a prefix it goes on using until it is told to forget.
"""

import importlib.machinery
import inspect
import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.models.traits import attention_options

INTERFACE: dict[str, set[str]] = {
    "LLM.__init__": {
        "model", "skip_tokenizer_init", "dtype", "seed", "gpu_memory_utilization", "kwargs",
    },
    "LLM.generate": {
        "self", "prompts", "sampling_params", "use_tqdm", "lora_request", "priority", "tokenization_kwargs",
        "mm_processor_kwargs",
    },
    "LLM.collective_rpc": {"self", "method", "timeout", "args", "kwargs"},
    "LLM.reset_prefix_cache": {"self", "reset_running_requests", "reset_connector"},
    "LLM.sleep": {"self", "level", "mode"},
    "LLM.wake_up": {"self", "tags"},
    "EngineArgs": {
        "load_format", "generation_config", "max_model_len", "distributed_executor_backend", "enable_sleep_mode",
        "logprobs_mode", "enforce_eager", "enable_chunked_prefill",
    },
    "SamplingParams": {
        "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "ignore_eos", "stop_token_ids", "logprobs",
        "detokenize",
    },
    "Worker.reload_weights": {"weights_iterator", "weights_path", "is_checkpoint_format"},
    "CompletionOutput": {"token_ids", "logprobs", "finish_reason"},
}  # fmt: skip
"""Read from vLLM 0.33.0: all arguments of a method, and some of the arguments or fields of what has more."""

HEAD_BIASES = {"lm_head.bias", "embed_out.bias"}


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        assert self.temperature == 0 or self.temperature >= 0.01
        assert self.seed is None or 0 <= self.seed < 2**63


@dataclass
class Logprob:
    logprob: float


@dataclass
class Output:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str


@dataclass
class Request:
    outputs: list[Output]


class LLM:
    """`made` holds every engine; `calls` of one, what was asked of it in order; `fail` makes a call raise."""

    made: ClassVar[list["LLM"]] = []
    refuses = ""

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        **kwargs: Any,
    ) -> None:
        assert set(kwargs) <= INTERFACE["EngineArgs"]
        if LLM.refuses:
            raise ValueError(LLM.refuses)
        torch.manual_seed(seed)  # of the whole process, as the real one does
        random.seed(seed)
        assert skip_tokenizer_init and kwargs["load_format"] == "dummy" and kwargs["generation_config"] == "vllm"
        assert kwargs["distributed_executor_backend"] == "external_launcher"
        self.may_sleep = kwargs.get("enable_sleep_mode", False)
        assert kwargs["logprobs_mode"] == "processed_logprobs"
        self.config = AutoConfig.from_pretrained(model)
        assert self.config.architectures and sorted(p.name for p in Path(model).iterdir()) == ["config.json"]
        self.max_model_len = kwargs["max_model_len"] or 10**9
        self.dtype = getattr(torch, dtype)
        self.model: Any = None
        self.asleep: set[str] = set()
        self.cached_logits: dict[tuple[int, ...], Tensor] = {}
        self.calls: list[str] = []
        self.share = gpu_memory_utilization
        self.fail: set[str] = set()
        LLM.made.append(self)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise RuntimeError(f"{name} failed")

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._called(f"sleep {level}")
        assert self.may_sleep
        if "weights" in self.asleep:
            return
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            self.model = None

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self._called(f"wake_up {tags}")
        self.asleep -= set(tags or self.asleep)
        return not self.asleep

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._called("reset_prefix_cache")
        self.cached_logits.clear()
        return True

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if callable(method):  # what only vLLM itself can do
            self._called(method.__name__)
            return [None]
        assert method == "reload_weights" and not args and kwargs is not None
        assert set(kwargs) <= INTERFACE["Worker.reload_weights"]
        self._called(method)
        assert "weights" not in self.asleep
        self._reload(kwargs["weights_iterator"])
        return [None]

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Through a checkpoint on disk, which the model must take without a weight missing or left."""
        state = dict(weights)  # the real one too holds what it was given until a layer is complete
        biases = [] if _has_biased_head(self.config) else [state.pop(name) for name in HEAD_BIASES & state.keys()]
        with tempfile.TemporaryDirectory() as folder:
            self.config.save_pretrained(folder)
            save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self.dtype, output_loading_info=True, **attention_options(self.config)
            )
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
        for bias in biases:  # what some tests add to a model
            model.get_output_embeddings().bias = torch.nn.Parameter(bias.clone())
        self.model = model.eval()

    @torch.no_grad()
    def generate(
        self,
        prompts: list[dict[str, list[int]]],
        sampling_params: list[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Any = None,
        tokenization_kwargs: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> list[Request]:
        self._called("generate")
        assert not self.asleep and sampling_params is not None and len(sampling_params) == len(prompts)
        return [
            Request([self._respond(prompt["prompt_token_ids"], how)])
            for prompt, how in zip(prompts, sampling_params, strict=True)
        ]

    def _respond(self, prompt: list[int], how: SamplingParams) -> Output:
        assert how.logprobs == 0 and how.ignore_eos and not how.detokenize and how.max_tokens is not None
        assert (how.top_p, how.top_k, how.min_p) == (1.0, 0, 0.0)
        assert prompt and len(prompt) < self.max_model_len and max(prompt) < self.config.vocab_size
        noise = None if how.temperature == 0 else torch.Generator().manual_seed(how.seed or 0)
        ids, logprobs = list(prompt), []
        while True:
            logits = self._logits(tuple(ids))
            scores = (logits / (how.temperature or 1.0)).log_softmax(-1)
            if noise is None:
                token = int(logits.argmax())
            else:
                token = int((scores.exp() / torch.empty_like(scores).exponential_(generator=noise)).argmax())
            ids.append(token)
            logprobs.append({token: Logprob(float(scores[token]))})
            if token in (how.stop_token_ids or ()):
                return Output(ids[len(prompt) :], logprobs, "stop")
            if len(logprobs) == how.max_tokens or len(ids) == self.max_model_len:
                return Output(ids[len(prompt) :], logprobs, "length")

    def _logits(self, ids: tuple[int, ...]) -> Tensor:
        if ids not in self.cached_logits:
            self.cached_logits[ids] = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        return self.cached_logits[ids]


def _has_biased_head(config: Any) -> bool:
    with torch.device("meta"):
        return getattr(AutoModelForCausalLM.from_config(config).get_output_embeddings(), "bias", None) is not None


def module() -> ModuleType:
    """The stand-in as `import vllm` finds it, with no engine made yet."""
    LLM.made, LLM.refuses = [], ""
    stand_in = ModuleType("vllm")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    stand_in.LLM, stand_in.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    return stand_in


def shut_down(engine: LLM) -> None:
    """In place of `_vllm_private.shut_down`."""
    engine._called("shut_down")


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)

"""vLLM on the device that also trains: one engine per rank, which copies the actor's weights at the start of each
rollout. On a GPU it sleeps between rollouts.

Written for vLLM 0.32 and 0.33. The engine runs in this process ("external_launcher" uses its RANK and LOCAL_RANK), so
it copies from the actor's own memory.
"""

import contextlib
import copy
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf import console
from rlhf.config.options import EngineOptions, SamplingOptions
from rlhf.engine import export
from rlhf.errors import UserError
from rlhf.generation import BackendOptions, _vllm_private, loop
from rlhf.models.ends import end_ids
from rlhf.models.lm_head import count_ids
from rlhf.models.policy import Policy
from rlhf.types import Prompts, SampledRollout

if TYPE_CHECKING:
    from vllm import LLM

MIN_TEMPERATURE = 0.01
"""vLLM's lowest temperature; it raises a lower one to this"""
MAX_LOGPROB_DIFFERENCE = 0.5
"""mean difference between the log-probs of vLLM and the actor, in nats per token, that rounding cannot explain (bf16:
about 0.05)"""
CHECKED_RESPONSES = 4
"""number of responses of the first rollout whose log-probs are compared with the actor's"""
DEFAULT_VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""environment variables that are set if they are not: no usage statistics, and only errors in vLLM's log"""

GPU_OPTIONS: dict[str, object] = {"enable_sleep_mode": True}
CPU_OPTIONS: dict[str, object] = {
    "enforce_eager": True,  # compiling takes longer than a short run
    "enable_chunked_prefill": False,  # after a chunk vLLM takes a seeded draw back, which a CPU's generator cannot
}


class Config(BackendOptions):
    memory_share: float = Field(0.4, gt=0, lt=1)
    """share of the GPU's memory for vLLM during a rollout: its copy of the weights, activations and cache"""
    sleep_level: Literal[1, 2] = 1
    """between rollouts vLLM's weights are kept in CPU memory (1) or dropped (2: faster for large models, but tensors
    that are neither parameters nor buffers, such as ALiBi's slopes, are lost)"""

    def check(self, engine: EngineOptions, sampling: SamplingOptions) -> None:
        """Raises: UserError if vLLM cannot sample on this machine from an actor with these engine options."""
        _require_installed()
        if engine.share_trunk:
            raise UserError(
                "rollout backend 'vllm': got --share-trunk; use --rollout-backend loop, which samples on it"
            )
        if engine.tensor_parallel_size > 1:
            raise UserError(
                f"rollout backend 'vllm': got --tensor-parallel-size {engine.tensor_parallel_size}, expected 1, as "
                "vLLM holds the whole actor on every GPU; use --rollout-backend loop"
            )
        if engine.zero_stage == 3 and not engine.gather_whole:
            raise UserError(
                "rollout backend 'vllm': got --no-gather-whole, expected all weights on every GPU, as in vLLM; "
                "use --rollout-backend loop"
            )
        if engine.quantize != "none":
            raise UserError(
                f"rollout backend 'vllm': got --quantize {engine.quantize}, whose weights would be dequantised and "
                "copied for every rollout; use --rollout-backend loop"
            )
        if sampling.temperature < MIN_TEMPERATURE:
            raise UserError(
                f"--temperature {sampling.temperature}: expected at least {MIN_TEMPERATURE} with rollout backend "
                "'vllm'; raise it, or use --rollout-backend loop"
            )

    def device_share(self) -> float:
        return self.memory_share


def build(config: Config) -> "VllmBackend":
    """A backend like the loop, except for `uniforms`: the first number of a row is the seed of its request. The same
    numbers give the same tokens, up to rounding of the logits in another batch. All ranks must make the first call at
    the same time.

    Raises: UserError without vLLM, for a recurrent model, a model that vLLM does not support or implements differently,
    or too little memory.
    """
    _require_installed()
    return VllmBackend(config)


def _require_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout backend 'vllm': the package is not installed; pip install 'rlhf-pipeline[vllm]' into an "
            "environment of its own (it wants other versions than constraints.txt), or use --rollout-backend loop"
        )


class VllmBackend:
    """The backend of `build`. Its engine is created in the first call, which has the model."""

    takes_all = True
    """vLLM makes its own batches, and every call copies the weights"""

    def release(self) -> None:
        """Nothing to do: the engine sleeps after every call."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine: LLM | None = None
        self._checked = False

    @torch.no_grad()
    def __call__(
        self, lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, uniforms: Tensor | None
    ) -> SampledRollout:
        loop.refuse_recurrent(lm)
        # For a greedy request vLLM returns the log-probs at temperature 1.
        assert uniforms is not None or sampling.temperature == 1, f"greedy at temperature {sampling.temperature}"
        if self._engine is None:
            self._engine = _start_engine(lm, self._config)
        ends = end_ids(lm, self._config.eos_token_id)
        requests = [
            {"prompt_token_ids": ids[real].tolist()} for ids, real in zip(prompts.ids, prompts.mask, strict=True)
        ]
        parameters = _parameters(sampling, uniforms, len(prompts), ends)
        with _awake_engine(self._engine, lm, self._config):
            outputs = self._engine.generate(requests, parameters, use_tqdm=False)
        rollout = _rollout(prompts, [each.outputs[0] for each in outputs], ends, self._config.pad_token_id)
        if not self._checked:
            self._checked = True
            _check_logprobs(lm, rollout[:CHECKED_RESPONSES], sampling)
        return rollout

    def close(self) -> None:
        if self._engine is not None:
            _vllm_private.shut_down(self._engine)
            self._engine = None


def _start_engine(lm: PreTrainedModel, config: Config) -> "LLM":
    """An engine for models of the shape of `lm`, with arbitrary weights; on a GPU it sleeps."""
    for name, value in DEFAULT_VARIABLES.items():
        os.environ.setdefault(name, value)
    import vllm

    if not sleeps(lm):
        console.say(
            "warning: rollout backend 'vllm' on a CPU: the loop is as fast there, and needs no second copy of the "
            "weights; use --rollout-backend loop"
        )
    devices = [lm.device] if lm.device.type == "cuda" else []
    variables = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices):  # vLLM sets the seed of this process
        config_of_actor = copy.deepcopy(lm.config)
        config_of_actor.architectures = [type(lm).__name__]
        config_of_actor.vocab_size = count_ids(lm)
        config_of_actor.save_pretrained(folder)
        try:
            engine = vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                generation_config="vllm",  # not the model's: only the request determines sampling
                dtype=str(lm.dtype).removeprefix("torch."),
                max_model_len=config.max_tokens,
                gpu_memory_utilization=config.memory_share,
                distributed_executor_backend="external_launcher",
                logprobs_mode="processed_logprobs",  # log-probs at the sampling temperature
                **(GPU_OPTIONS if sleeps(lm) else CPU_OPTIONS),
            )
        except ValueError as error:
            reason = " ".join(str(error).split())[:400]
            raise UserError(
                f"rollout backend 'vllm' with memory_share {config.memory_share}: vLLM does not start: {reason}; "
                "change memory_share (--rollout-backend vllm,memory_share=0.3), or use --rollout-backend loop"
            ) from None
        finally:  # vLLM sets variables for workers of its own, such as LOCAL_WORLD_SIZE
            os.environ |= variables
    _vllm_private.restore_classes(lm)
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        engine.collective_rpc(_vllm_private.add_head_bias)
    if sleeps(lm):
        engine.sleep(level=config.sleep_level)
    return engine


def sleeps(lm: PreTrainedModel) -> bool:
    """Whether the engine of `lm` gives its memory back between rollouts, as it can on a GPU only."""
    return lm.device.type == "cuda"


@contextlib.contextmanager
def _awake_engine(engine: "LLM", lm: PreTrainedModel, config: Config) -> Iterator[None]:
    """A context in which the engine has its memory and the current weights of `lm`."""
    try:
        if sleeps(lm):
            engine.wake_up(tags=["weights"])
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights(lm, config).items())})
        if sleeps(lm):
            engine.wake_up(tags=["kv_cache"])  # after the weights, for which vLLM may need memory twice
        else:
            engine.collective_rpc(_vllm_private.pack_weights)
        engine.reset_prefix_cache()  # its states were computed with the old weights
        yield
    finally:
        if sleeps(lm):
            engine.sleep(level=config.sleep_level)


def weights(lm: PreTrainedModel, config: Config) -> dict[str, Tensor]:
    """The weights of a checkpoint of `lm` by name: adapters merged, tied weights once, without the embedding rows of
    ids that are never sampled. Most are views of the memory of `lm`, which does not change. All weights must be
    gathered.
    """
    state = export.merged(lm, lm.state_dict(keep_vars=True), config.adapter)
    embedding_modules = (lm.get_input_embeddings(), lm.get_output_embeddings())
    embedding_names = {
        name for name, module in lm.named_modules() if any(module is embedding for embedding in embedding_modules)
    }
    unique: dict[str, Tensor] = {}
    size = count_ids(lm)
    exported: set[int] = set()
    for name, weight in state.items():
        if id(weight) not in exported:
            exported.add(id(weight))
            unique[name] = weight.detach()[:size] if name.rpartition(".")[0] in embedding_names else weight.detach()
    return dict(revert_weight_conversion(lm, unique))


def _check_logprobs(lm: PreTrainedModel, rollout: SampledRollout, sampling: SamplingOptions) -> None:
    """vLLM ignores weights that it does not know, with only a line in its log; so its log-probs are compared.

    Raises: UserError if the log-probs of sampling differ from those of `lm`.
    """
    scored = Policy(lm)(rollout.sequences, sampling.temperature).logprobs[:, rollout.prompt_ids.shape[1] :]
    difference = float((scored - rollout.sampled_logprobs)[rollout.mask].abs().mean())
    if not difference < MAX_LOGPROB_DIFFERENCE:
        raise UserError(
            f"rollout backend 'vllm', model type '{lm.config.model_type}': its log-probs are {difference:.2g} nats a "
            f"token from those of the actor, expected less than {MAX_LOGPROB_DIFFERENCE}: vLLM does not use the "
            "weights as transformers does; use --rollout-backend loop"
        )


def _parameters(sampling: SamplingOptions, uniforms: Tensor | None, rows: int, ends: Sequence[int]) -> list[Any]:
    """The sampling parameters of each row: the whole distribution, until one of the ends, which is part of the
    response."""
    from vllm import SamplingParams

    # Numbers in [0, 1) with 53 bits become integer seeds without loss.
    seeds = [None] * rows if uniforms is None else (uniforms[:, 0].double() * 2**53).long().tolist()
    return [
        SamplingParams(
            temperature=0.0 if uniforms is None else sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=seed,
            max_tokens=sampling.response_length,
            ignore_eos=True,  # EOS of the model's config, which may differ
            stop_token_ids=list(ends),
            logprobs=0,  # of the sampled token only
            detokenize=False,
        )
        for seed in seeds
    ]


def _rollout(prompts: Prompts, outputs: list[Any], ends: Sequence[int], pad_token_id: int) -> SampledRollout:
    device = prompts.ids.device
    lengths = torch.tensor([len(output.token_ids) for output in outputs], device=device)
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    tokens = torch.full(mask.shape, pad_token_id, device=device)
    logprobs = torch.zeros(mask.shape, device=device)
    tokens[mask] = torch.tensor([token for output in outputs for token in output.token_ids], device=device)
    logprobs[mask] = torch.tensor(
        [
            position[token].logprob
            for output in outputs
            for token, position in zip(output.token_ids, output.logprobs, strict=True)
        ],
        device=device,
    )
    return loop.sampled(prompts, tokens, mask, logprobs, ends)

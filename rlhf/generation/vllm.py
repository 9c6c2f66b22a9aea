"""vLLM on the GPU that also trains: one engine a rank, asleep but for rollouts, each of which it starts by taking the
actor's weights.

Written against vLLM 0.33. The engine lives in this process ("external_launcher" takes RANK and LOCAL_RANK as they are),
so the weights it is given are the actor's own memory, which it copies from.
"""

import contextlib
import copy
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf.config.options import EngineOptions, SamplingOptions
from rlhf.engine import export
from rlhf.errors import UserError
from rlhf.generation import Backend, BackendOptions, loop
from rlhf.models import traits
from rlhf.models.load import known_ids
from rlhf.models.policy import Policy
from rlhf.types import Prompts, Rollout

COLDEST = 0.01
"""vLLM raises a lower temperature to this"""
FAR = 0.5
"""nats a token between vLLM and the actor, on average, that rounding does not explain (bf16: about 0.05)"""
LOOKED_AT = 4
"""responses of the first rollout that the actor scores too"""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""variables unless they are set: nothing is reported to vLLM's makers, and its log does not drown ours"""


class Config(BackendOptions):
    memory_share: float = Field(0.4, gt=0, lt=1)
    """of the GPU's memory, taken during a rollout: vLLM's copy of the weights, its activations, its cache"""
    sleep_level: Literal[1, 2] = 1
    """between rollouts vLLM's weights go to CPU memory (1) or nowhere (2: quicker for large models, but tensors that
    are neither parameters nor buffers, such as ALiBi's slopes, are lost for good)"""

    def check(self, engine: EngineOptions, sampling: SamplingOptions) -> None:
        """Raises: UserError if vLLM cannot sample here from an actor that is held so."""
        _require_installed()
        if not torch.cuda.is_available():
            raise UserError(
                "rollout backend 'vllm': got a machine without a CUDA GPU, expected one; use --rollout-backend loop"
            )
        if engine.tensor_parallel_size > 1:
            raise UserError(
                f"rollout backend 'vllm': got --tensor-parallel-size {engine.tensor_parallel_size}, expected 1, as "
                "vLLM holds the whole actor on every GPU; use --rollout-backend loop"
            )
        if engine.zero_stage == 3 and not engine.gather_whole:
            raise UserError(
                "rollout backend 'vllm': got --no-gather-whole, expected all weights at once, which vLLM holds too; "
                "use --rollout-backend loop"
            )
        if sampling.temperature < COLDEST:
            raise UserError(
                f"--temperature {sampling.temperature}: expected at least {COLDEST} with rollout backend 'vllm'; raise "
                "it, or use --rollout-backend loop"
            )

    def device_share(self) -> float:
        return self.memory_share


def build(config: Config) -> Backend:
    """`generate(lm, prompts, sampling, draws) -> Rollout`, as of the loop, but for how `draws` are used: the first
    number of a row seeds its request. The same draws give the same tokens, up to the rounding of logits in another
    batch. All ranks make the first call together.

    Raises: UserError without vLLM, for a recurrent model, one that vLLM does not know or knows otherwise, or too little
    memory.
    """
    _require_installed()
    return Served(config)


def _require_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout backend 'vllm': the package is not installed; pip install 'rlhf-pipeline[vllm]' into an "
            "environment of its own (it wants other versions than constraints.txt), or use --rollout-backend loop"
        )


class Served:
    """The backend that `build` gives. Its engine is made in the first call, when there is a model."""

    takes_all = True
    """rows need not come in batches: vLLM makes its own, and every call takes the weights anew"""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine: Any = None
        self._compared = False

    @torch.no_grad()
    def __call__(
        self, lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, draws: Tensor | None
    ) -> Rollout:
        loop.refuse_recurrent(lm)
        # Of a greedy request vLLM tells the log-probs at temperature 1.
        assert draws is not None or sampling.temperature == 1, f"greedy at temperature {sampling.temperature}"
        if self._engine is None:
            self._engine = _asleep(lm, self._config)
        requests = [
            {"prompt_token_ids": ids[real].tolist()} for ids, real in zip(prompts.ids, prompts.mask, strict=True)
        ]
        parameters = _parameters(sampling, draws, len(prompts), self._config)
        with _awake(self._engine, lm, self._config):
            found = self._engine.generate(requests, parameters, use_tqdm=False)
        rollout = _rollout(prompts, [each.outputs[0] for each in found], self._config)
        if not self._compared:
            self._compared = True
            _require_alike(lm, rollout[:LOOKED_AT], sampling)
        return rollout


def _asleep(lm: PreTrainedModel, config: Config) -> Any:
    """An engine for models of the shape of `lm`, with any weights, asleep."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import vllm

    model = traits.base(lm)
    devices = [model.device] if model.device.type == "cuda" else []
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices):  # it sets the seed of this process
        described = copy.deepcopy(model.config)
        described.architectures = [type(model).__name__]
        described.vocab_size = known_ids(model)
        described.save_pretrained(folder)
        try:
            engine = vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                generation_config="vllm",  # not of the model: nothing but the request decides how it is sampled
                dtype=str(model.dtype).removeprefix("torch."),
                max_model_len=config.max_tokens,
                gpu_memory_utilization=config.memory_share,
                distributed_executor_backend="external_launcher",
                enable_sleep_mode=True,
                logprobs_mode="processed_logprobs",  # of the tempered distribution
            )
        except ValueError as error:
            reason = " ".join(str(error).split())[:400]
            raise UserError(
                f"rollout backend 'vllm' with memory_share {config.memory_share}: vLLM does not start: {reason}; "
                "change memory_share (--rollout-backend vllm,memory_share=0.3), or use --rollout-backend loop"
            ) from None
    engine.sleep(level=config.sleep_level)
    return engine


@contextlib.contextmanager
def _awake(engine: Any, lm: PreTrainedModel, config: Config) -> Iterator[None]:
    """Meanwhile the engine has its memory, and the weights of `lm` as they are now."""
    try:
        engine.wake_up(tags=["weights"])
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights(lm, config).items())})
        engine.wake_up(tags=["kv_cache"])  # after the weights, for which vLLM may need room twice
        engine.reset_prefix_cache()  # or prompts would go on from what other weights made of them
        yield
    finally:
        engine.sleep(level=config.sleep_level)


def weights(lm: PreTrainedModel, config: Config) -> dict[str, Tensor]:
    """What a checkpoint of `lm` holds, adapters merged: names of the files, tied weights once, no row of an id that
    is never sampled. Mostly the memory of `lm` itself, which stays as it is; all of it must be at hand.
    """
    model = traits.base(lm)
    state = export.merged(lm, model.state_dict(keep_vars=True), config.adapter)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    cut = {name for name, module in model.named_modules() if any(module is end for end in ends)}
    found: dict[str, Tensor] = {}
    size, seen = known_ids(model), set()
    for name, weight in state.items():
        if id(weight) not in seen:
            seen.add(id(weight))
            found[name] = weight.detach()[:size] if name.rpartition(".")[0] in cut else weight.detach()
    return dict(revert_weight_conversion(model, found))


def _require_alike(lm: PreTrainedModel, rollout: Rollout, sampling: SamplingOptions) -> None:
    """vLLM leaves weights that it has no place for as they were, with a line in its log.

    Raises: UserError unless the log-probs of sampling are about those of `lm`.
    """
    scored = Policy(lm)(rollout.sequences, sampling.temperature)[0][:, rollout.prompt_ids.shape[1] :]
    apart = float((scored - rollout.sampled_logprobs)[rollout.mask].abs().mean())
    if not apart < FAR:
        raise UserError(
            f"rollout backend 'vllm', model type '{lm.config.model_type}': its log-probs are {apart:.2g} nats a token "
            f"from those of the actor, expected less than {FAR}: vLLM has not taken the weights as they are meant; use "
            "--rollout-backend loop"
        )


def _parameters(sampling: SamplingOptions, draws: Tensor | None, rows: int, config: Config) -> list[Any]:
    """How each row is sampled: from the whole distribution, until EOS, which alone ends a response and is kept."""
    from vllm import SamplingParams

    # Numbers in [0, 1) with 53 bits, which a seed takes as they are.
    seeds = [None] * rows if draws is None else (draws[:, 0].double() * 2**53).long().tolist()
    return [
        SamplingParams(
            temperature=0.0 if draws is None else sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=seed,
            max_tokens=sampling.response_length,
            ignore_eos=True,  # that of the model's config, which may be another, or several
            stop_token_ids=[config.eos_token_id],
            logprobs=0,  # of the sampled token only
            detokenize=False,
        )
        for seed in seeds
    ]


def _rollout(prompts: Prompts, outputs: list[Any], config: Config) -> Rollout:
    device = prompts.ids.device
    lengths = torch.tensor([len(output.token_ids) for output in outputs], device=device)
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    tokens = torch.full(mask.shape, config.pad_token_id, device=device)
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
    return loop.sampled(prompts, tokens, mask, logprobs, config)

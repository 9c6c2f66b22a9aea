"""Training under DeepSpeed: ZeRO, offload, precision, batch arithmetic, the optimizer step."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf import console, kernels
from rlhf.config import Tree, deepspeed_json, merge
from rlhf.config.options import EngineOptions, TrainingOptions, effective_stage
from rlhf.distributed import collectives, tensor_parallel
from rlhf.distributed.zero3 import (
    Shards,
    SynchronizedPasses,
    deepspeed_settings,
    full_shape,
    gather_model,
    zero3_config,
)
from rlhf.engine import optimizer_state, optimizers
from rlhf.engine.adamw import schedule, warmup_warning
from rlhf.engine.nonfinite import Tolerance
from rlhf.engine.precision import compute_dtype, with_dtype
from rlhf.errors import UserError
from rlhf.models.head import ScoreHead
from rlhf.models.policy import Learns, generator
from rlhf.models.trunk import prepare_inference
from rlhf.types import Metrics

M = TypeVar("M", bound=nn.Module)
B = TypeVar("B")
BUCKET = 500_000_000
"""gradients that DeepSpeed reduces at once, if there are so many"""
FP16_SEARCH = 24
"""steps in a row that fp16 may skip while DeepSpeed lowers its loss scale from 2^16"""


class Engine(Generic[M]):
    """One trained model under DeepSpeed.

    `total_steps` is the number of optimizer steps, for the learning-rate schedule. The caller
    chooses batch sizes: a step takes any number of micro-batches, the same number on every rank. `title` is the name of
    the model in messages, if a stage trains several; `rates`: learning rates of weights that have one of their own.
    """

    def __init__(
        self,
        model: M,
        options: TrainingOptions,
        total_steps: int,
        title: str = "",
        rates: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # important messages are ours
        self.device = collectives.local_device()
        dtype = compute_dtype(options, self.device)
        options = with_dtype(options, dtype)
        if options.gradient_checkpointing:
            _checkpoint_activations(model)
        if options.torch_compile:
            kernels.compile_layers(model)
        warning = warmup_warning(options, total_steps)
        if warning is not None:
            console.say(f"{title}: {warning}" if title else warning)
        split = options.tensor_parallel_size > 1
        if split:
            tensor_parallel.set_autotp_config(model)
        # Without sharding, gradient norm, clipping and non-finite steps are our task, not that of ZeRO.
        self._plain = effective_stage(options, dtype.itemsize, collectives.world_size()) == 0
        self._heads = [m for m in model.modules() if isinstance(m, ScoreHead) and m.weight.requires_grad]
        heads = [head.exact.detach().to(self.device) for head in self._heads]
        model.to(self.device)
        if self.device.type == "cuda" and _decodes_compiled(options):
            kernels.compile_decoding(model)
        optimizer = optimizers.build(model, options, rates, self._plain)
        trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(options, total_steps)),
            config=deepspeed_config(options, dtype, sum(math.prod(full_shape(p)) for p in trained)),
        )
        if split:
            tensor_parallel.require_known_split(self._engine.module)
            self._engine.first_dataloader_check.remove()  # it compares tensors only
        if self._plain and collectives.world_size() == 1:
            self._engine.enable_backward_allreduce = False  # it copies every gradient twice, to nobody
        _allow_overflows(self._engine.optimizer)
        self._options = options
        # DeepSpeed divides the sum of the gradients by these ranks; our losses are parts of a sum already.
        self._ranks_in_mean = collectives.world_size() // options.tensor_parallel_size
        self._steps = 0
        self._title = title
        self._overflows = 0
        self.tolerance = Tolerance(options.max_bad_steps)
        for head, exact in zip(self._heads, heads, strict=True):  # DeepSpeed made master weights from the rounded ones
            optimizer_state.set_master(self._engine, head.weight, exact)
        self.forward_s = 0.0  # seconds of this rank's forward passes; the reader resets it

    @property
    def module(self) -> M:
        """The model itself, for generation."""
        return self._engine.module

    def __call__(self, *args: object, **options: object) -> Any:
        """The model's forward pass, with gradients."""
        self._engine.train()
        return self._engine(*args, **options)

    def step(
        self,
        micro_batches: Iterable[B],
        loss: Callable[[B], tuple[Tensor, dict[str, Tensor]]],
        rows: Sequence[Sequence[int]] = (),
        learns: Learns = "all",
    ) -> Metrics:
        """One optimizer step over `micro_batches`.

        `loss(micro)` gives the micro-batch's share of the step's loss (normalised by the token or row count
        of the whole step over all ranks) and metrics of the same kind. Returns the metrics added up over
        micro-batches and ranks, and `loss`, `learning_rate`, `grad_norm` (before clipping), `skipped` 0. If a "head"
        alone learns, weights without a learning rate of their own take no step, and `learning_rate` is the head's; if
        all learn, that is `learning_rate_of_head`.
        If a number is not finite, no rank changes its weights, and only the rates and `skipped` 1 are returned;
        `rows`, the row numbers of each micro-batch in the data, are named in the warning. If fp16 overflows, DeepSpeed
        skips the step and lowers its loss scale: `skipped` is 1 beside the other metrics, and only more than
        FP16_SEARCH overflows in a row count as non-finite.
        Raises: NonFiniteError, on every rank, after `max_bad_steps` such steps in a row.
        """
        if self.device.type == "cpu":
            kernels.keep_freed_memory()
        micros = list(micro_batches)
        if self._plain:  # rounding each micro-batch's gradient would add an error per micro-batch
            self._engine.optimizer.sum_gradients_in(torch.float32 if len(micros) > 1 else None)
        totals: dict[str, Tensor] = {}
        finite = []
        for i, micro in enumerate(micros):
            start = time.perf_counter()
            value, metrics = loss(micro)
            self.forward_s += time.perf_counter() - start
            for name, metric in {"loss": value, **metrics}.items():
                totals[name] = totals.get(name, torch.zeros((), device=self.device)) + metric.detach().float()
            finite.append(torch.stack([x.detach().float() for x in (value, *metrics.values())]).isfinite().all())
            # Even when the loss is NaN: every rank takes part in the collectives of backward.
            self._engine.set_gradient_accumulation_boundary(i == len(micros) - 1)
            self._engine.backward(value * self._ranks_in_mean)
            if i < len(micros) - 1:
                self._engine.step()
        summed = dict(zip(totals, collectives.sum_over_ranks(torch.stack(list(totals.values()))).tolist(), strict=True))
        rates = optimizer_state.rates(self._engine, learns)
        nonfinite = [f"{name} is {value}" for name, value in summed.items() if not math.isfinite(value)]
        if nonfinite:
            self._set_gradient_to_nan()
        with optimizer_state.heads_alone(self._engine) if learns == "head" else contextlib.nullcontext():
            norm, applied = self._apply()
        self._steps += 1
        self._overflows = 0 if applied else self._overflows + 1
        if not nonfinite and (applied or (self._options.dtype == "fp16" and self._overflows <= FP16_SEARCH)):
            if applied:
                self.tolerance.reset()
                self._refine_heads()
            return {**summed, **rates, "grad_norm": norm, "skipped": float(not applied)}
        if applied:  # not by `assert`: it guards the weights under python -O too
            raise RuntimeError(f"step {self._steps}: DeepSpeed changed the weights by {nonfinite}")
        finite_micros = torch.stack(finite).tolist()
        suspects = [
            micro_rows
            for micro_rows, micro_is_finite in zip(rows, finite_micros, strict=bool(rows))
            if not (nonfinite and micro_is_finite)
        ]
        self.tolerance.skip(
            f"{self._title} step {self._steps}".strip(),
            nonfinite or [f"grad_norm is {norm}"],
            [row for micro_rows in suspects for row in micro_rows],
        )
        return {**rates, "skipped": 1.0}

    def leave_out(self, steps: int) -> None:
        """Move the learning-rate schedule on by optimizer steps that are not taken."""
        optimizer_state.set_schedule(self._engine, self._engine.lr_scheduler.last_epoch + steps)

    @contextlib.contextmanager
    def own_schedule(self, total_steps: int) -> Iterator[None]:
        """Inside, `total_steps` optimizer steps have a schedule of their own; that of the engine begins after them."""
        scheduler = self._engine.lr_scheduler
        of_engine = scheduler.lr_lambdas
        scheduler.lr_lambdas = [schedule(self._options, total_steps)] * len(of_engine)
        optimizer_state.set_schedule(self._engine, 0)
        yield
        scheduler.lr_lambdas = of_engine
        optimizer_state.set_schedule(self._engine, 0)

    def _apply(self) -> tuple[float, bool]:
        """Apply the optimizer step. Returns the gradient's norm before clipping, and whether the step was applied."""
        if not self._plain:
            self._engine.step()
            return float(self._engine.get_global_grad_norm()), bool(self._engine.was_step_applied())
        norm = tensor_parallel.gradient_norm(p for _, p in self._trained())
        if math.isfinite(norm):
            most = self._options.max_grad_norm
            self._engine.optimizer.scale = min(1.0, most / (norm + 1e-6)) if most else 1.0
            self._engine.step()
        else:
            self._engine.optimizer.zero_grad()
        return norm, math.isfinite(norm)

    def _set_gradient_to_nan(self) -> None:
        """Set the gradient to NaN, so that no step is applied: after a non-finite loss it may still be finite."""
        from deepspeed.utils import safe_set_full_grad

        sums: list[Tensor] = getattr(self._engine.optimizer, "fp32_groups_gradients_flat", [])  # under ZeRO-1 in bf16
        for gradient in sums:
            gradient.fill_(torch.nan)
        for _, parameter in self._trained() if not sums else ():
            safe_set_full_grad(parameter, torch.full(full_shape(parameter), torch.nan, device=self.device))
        # With the optimizer offloaded, DeepSpeed has already computed the norms.
        norms = getattr(self._engine.optimizer, "norm_for_param_grads", {})
        norms.update(dict.fromkeys(norms, torch.tensor(torch.nan, device=self.device)))

    def fp32_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained weight, whole and in fp32, one after the other, the same on every rank; read-only. Every rank
        iterates over all of them, because ZeRO gathers the shards of each weight."""
        for name, parameter in self._trained():
            yield name, optimizer_state.master(self._engine, parameter)

    def state_dict(self) -> dict[str, float]:
        """Step counts and fp16's loss scale: the state of the engine beside `tensors`."""
        counts = {"steps": self._steps, "overflows": self._overflows, "bad_in_a_row": self.tolerance.in_a_row}
        return {**counts, **optimizer_state.numbers(self._engine)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the numbers; call it before `load_tensors`."""
        self._steps, self._overflows = int(state["steps"]), int(state["overflows"])
        self.tolerance.in_a_row = int(state["bad_in_a_row"])
        optimizer_state.restore_numbers(self._engine, state)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and moments, whole and in fp32, of every `world_size`th trained weight: this rank's share.

        All ranks iterate together.
        """
        for i, (name, tensor) in enumerate(optimizer_state.tensors(self._engine, list(self._trained()))):
            if i % collectives.world_size() == collectives.rank():
                yield name, tensor

    def load_tensors(self, saved: Iterable[tuple[str, Tensor]]) -> None:
        """Restore the tensors of all ranks, under any ZeRO stage and number of ranks."""
        optimizer_state.restore_tensors(self._engine, list(self._trained()), saved)
        self._refine_heads()

    def _refine_heads(self) -> None:
        for head in self._heads:
            if head.weight.dtype != torch.float32:
                head.refine(optimizer_state.master(self._engine, head.weight))

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    @contextlib.contextmanager
    def inference(self) -> Iterator[M]:
        """The model in eval mode without gradients. Under ZeRO-3 its weights are gathered once, or (`gather_whole` off)
        layer by layer in step with the other ranks."""
        self._engine.eval()
        prepare_inference(self._engine.module)
        with torch.no_grad(), self._gathered():
            yield self._engine.module

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        if self._options.zero_stage != 3:
            yield
            return
        offload, whole = self._engine.optimizer.parameter_offload, self._options.gather_whole
        with gather_model(offload) if whole else SynchronizedPasses(offload, generator(self.module)):
            yield


def _allow_overflows(optimizer: object) -> None:
    """fp16: we count overflows at the minimum loss scale ourselves; DeepSpeed would raise a bare Exception."""
    if hasattr(optimizer, "loss_scaler") and hasattr(optimizer.loss_scaler, "raise_error_at_min_scale"):
        optimizer.loss_scaler.raise_error_at_min_scale = False


def deepspeed_config(options: TrainingOptions, dtype: torch.dtype, trained: int) -> Tree:
    """The config of DeepSpeed. Gradient clipping is always explicit: its default changed from 0 to 1 in 0.19.3.

    Without sharding the config has no dtype and no clipping: our optimizer has master weights, and clips. DeepSpeed
    would copy every gradient three times, and the first step of its stage 0 is a dummy. Keys of the user's
    JSON that only DeepSpeed knows take precedence.
    trained: number of trained parameters. DeepSpeed's buckets have 2 GB, however small the model is, unless they are
    set.
    """
    stage = effective_stage(options, dtype.itemsize, collectives.world_size())
    plain = stage == 0
    zero: Tree = zero3_config(_param_offload(options)) if stage == 3 else {"stage": stage}
    zero["reduce_bucket_size"] = min(trained, BUCKET)
    if options.offload_optimizer:
        zero["offload_optimizer"] = _offload_device(options)
    settings = deepspeed_settings(torch.float32 if plain else dtype, options.micro_batch_size) | {
        "gradient_clipping": 0.0 if plain else options.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **tensor_parallel.autotp_settings(options.tensor_parallel_size),
    }
    return merge(settings, deepspeed_json.passed_on(options.deepspeed_config, zero))


def shards_of(options: EngineOptions) -> Shards | None:
    """How a model is sharded while it is loaded; None = whole, also for tensor parallelism, where DeepSpeed splits
    later."""
    if options.zero_stage != 3 or options.tensor_parallel_size > 1:
        return None
    return Shards(compute_dtype(options, collectives.local_device()), _param_offload(options))


def _param_offload(options: EngineOptions) -> Tree | None:
    return _offload_device(options) if options.offload_param else None


def _offload_device(options: EngineOptions) -> Tree:
    return {"device": "cpu"} if options.offload_nvme is None else {"device": "nvme", "nvme_path": options.offload_nvme}


def _decodes_compiled(options: EngineOptions) -> bool:
    """Whether rollouts on a GPU are compiled: unless somebody says no, where weights are whole and plain."""
    split = options.tensor_parallel_size > 1 or options.sequence_parallel_size > 1
    return options.torch_compile is not False and options.zero_stage != 3 and not split and options.quantize == "none"


def require_possible(options: EngineOptions, device: torch.device) -> None:
    """Raises: UserError for options that exclude each other, or that this device does not support."""
    dtype, stage = compute_dtype(options, device), options.zero_stage
    if stage == "auto":
        raise UserError("--zero-stage auto: chosen by the commands before a stage begins, expected 0, 1, 2 or 3 here")
    if options.offload_param and stage < 3:
        raise UserError(f"--offload-param: needs --zero-stage 3, got {stage}")
    if options.offload_optimizer and stage == 0 and dtype == torch.float32:
        raise UserError("--offload-optimizer: needs --zero-stage 1, 2 or 3, got 0")
    if options.torch_compile:
        if stage == 3 or options.tensor_parallel_size > 1 or options.sequence_parallel_size > 1:
            raise UserError(
                "--torch-compile: expected --zero-stage 0, 1 or 2, --tensor-parallel-size 1 and "
                "--sequence-parallel-size 1"
            )
        kernels.require_compiler(device)
    folder = options.offload_nvme
    if folder is None:
        return
    if stage < 3:
        raise UserError(f"--offload-nvme {folder}: needs --zero-stage 3, got {stage}")
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        raise UserError(
            f"--offload-nvme {folder}: DeepSpeed cannot build its asynchronous reads and writes here; install libaio "
            "with its headers (libaio-dev) and a C++ compiler, or remove the option to offload to CPU memory"
        )


def _checkpoint_activations(model: nn.Module) -> None:
    for part in model.children():
        if isinstance(part, PreTrainedModel):
            part.gradient_checkpointing_enable({"use_reentrant": False})

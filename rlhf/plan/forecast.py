"""One stage: its models, the moments at which its processes use memory, and the largest of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rlhf.config.options import EngineOptions, effective_stage
from rlhf.engine.precision import BY_NAME, compute_dtype, with_dtype
from rlhf.generation._memory import ROUNDED
from rlhf.plan import activations, zero
from rlhf.plan.activations import Activations, PassShape
from rlhf.plan.devices import SLOW_BF16
from rlhf.plan.machine import PROGRAM, Machine
from rlhf.plan.sizes import Setup, Size, size
from rlhf.plan.zero import MASTER, Bytes, ModelMemory, RankLayout
from rlhf.roles import Role

PHASES = GENERATE, SCORE, UPDATE, EVALUATE = "generate", "score", "update", "evaluate"


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """What a stage with rollouts adds to a workload: responses are sampled and scored before each update."""

    rows: int
    """rows generated together on a device"""
    prompt: int
    """maximum number of tokens"""
    response: int
    """maximum number of tokens"""
    minibatches: int
    """optimizer steps in an epoch"""
    share: float = 0.0
    """share of a device's memory that a generation backend reserves for itself; 0: the actor generates"""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a stage, as far as memory and disk depend on it."""

    stage: str
    models: tuple[Role, ...]
    """those that are loaded"""
    dtype: torch.dtype
    batch: int
    """rows of an optimizer step (with a rollout: of an iteration), over all devices"""
    micro_batch: int
    shape: PassShape
    """of a micro-batch"""
    keep: int
    """checkpoints that stay on disk"""
    rollout: RolloutWork | None = None
    averages: int = 0
    """number of fp32 copies (an average, the best weights) of the first trained model's weights"""
    models_written: int = 0
    """copies of the first trained model written at the end, in addition to one copy of each trained model"""
    eval_rows: int = 0
    """rows of a pass without gradients; 0: those of a micro-batch"""
    note: str = ""
    """a limit of the plan, for the user: a cost that depends on the data"""

    def __post_init__(self) -> None:
        models = (
            replace(role, options=with_dtype(role.options, self.dtype))
            if isinstance(role.options, EngineOptions)
            else role
            for role in self.models
        )
        object.__setattr__(self, "models", tuple(models))

    @property
    def b(self) -> int:
        """Bytes of a number in the compute dtype."""
        return self.dtype.itemsize

    def trained(self) -> list[Role]:
        return [role for role in self.models if role.trained]

    def step_rows(self, ranks: int) -> int:
        """Rows of an optimizer step on one device."""
        return math.ceil(self.batch / (self.rollout.minibatches if self.rollout else 1) / ranks)

    @property
    def checkpoints(self) -> int:
        """Bytes of the checkpoints that stay and of one being written: weights and the optimizer's state, and averages
        of the first model, in fp32."""
        sizes = [whole_size(role) for role in self.trained()]
        one = sum(size.saved_bytes for size in sizes) + MASTER * self.averages * sizes[0].trained
        return one * (self.keep + 1)


@dataclass(frozen=True, slots=True)
class ModelForecast:
    """Memory of one model in one process, in bytes."""

    role: Role
    size: Size
    memory: ModelMemory
    activations: Activations
    cache: int
    """key-value cache of a rollout at its full length"""


@dataclass(frozen=True, slots=True)
class Moment:
    """One activity of a process, and the memory it uses meanwhile."""

    phase: str
    """one of PHASES"""
    name: str
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a stage takes on a machine."""

    workload: Workload
    machine: Machine
    models: tuple[ModelForecast, ...]
    moments: tuple[Moment, ...]

    @property
    def peak_moment(self) -> Moment:
        """The moment with the most memory on the device."""
        return max(self.moments, key=self._on_device)

    @property
    def phase_peaks(self) -> dict[str, float]:
        """Peak bytes on the device in each phase of the stage, as `peak` counts them."""
        return {
            phase: max(map(self._on_device, moments))
            for phase in PHASES
            if (moments := [moment for moment in self.moments if moment.phase == phase])
        }

    @property
    def host_peak(self) -> float:
        """Peak bytes of CPU memory beside a GPU, Python and the libraries included."""
        return PROGRAM + max(moment.bytes.host for moment in self.moments)

    @property
    def peak(self) -> float:
        """Peak bytes on the device. On a CPU: of the process, without Python and the libraries."""
        return self._on_device(self.peak_moment)

    def _on_device(self, moment: Moment) -> float:
        return moment.bytes.total if self.machine.on_cpu else moment.bytes.device

    @property
    def shortfall(self) -> tuple[float, float]:
        """Missing bytes of (device memory, CPU memory); (0, 0) if the stage fits."""
        if self.machine.on_cpu:
            return max(0.0, self.peak + PROGRAM - self.machine.memory), 0.0
        return max(0.0, self.peak - self.machine.memory), max(0.0, self.host_peak - self.machine.host)

    @property
    def fits(self) -> bool:
        return self.shortfall == (0.0, 0.0)

    @property
    def disk(self) -> float:
        """Bytes of the checkpoints (one more than stay, while a new one is written) and of the final models."""
        written = [
            model.size.trained if model.role.options.share_trunk else model.size.total
            for model in self.models
            if isinstance(model.role.options, EngineOptions)
        ]
        first = written[0] * self.workload.models_written
        return self.workload.checkpoints + self.workload.b * (sum(written) + first)


def whole_size(role: Role) -> Size:
    """Of the whole model, which computes."""
    optim = role.options.optim if isinstance(role.options, EngineOptions) else "adamw"
    setup = Setup(role.adapter, not role.trained, role.options.quantize or "none", optim, role.ids)
    return size(role.path, role.part.kind, setup)


def stored_size(role: Role) -> Size:
    """Of what the model has in memory beside other models."""
    whole = whole_size(role)
    if not role.on_trunk:
        return whole
    of_adapter = size(role.path, role.part.kind, Setup(role.adapter)).trained
    return replace(whole, total=of_adapter, outer=0, quantized=0)


def micro_batches(workload: Workload, ranks: int) -> int:
    """Number of forward and backward passes in an optimizer step on one device."""
    return math.ceil(workload.step_rows(ranks) / workload.micro_batch)


def _layout(workload: Workload, machine: Machine) -> RankLayout:
    return RankLayout(machine.count, machine.on_cpu, micro_batches(workload, machine.count))


def resident_bytes(workload: Workload, machine: Machine) -> Bytes:
    """Memory between the parts of a step: less than a step needs, and known without a dry run."""
    layout = _layout(workload, machine)
    resident = sum((_model_memory(role, workload.b, layout).resident for role in workload.models), Bytes())
    return Bytes(resident.total) if machine.on_cpu else resident


def forecast(workload: Workload, machine: Machine) -> Forecast:
    """What the workload takes on the machine."""
    layout = _layout(workload, machine)
    models = tuple(
        ModelForecast(
            role,
            stored_size(role),
            _model_memory(role, workload.b, layout),
            _activations(workload, role, layout),
            _cache(workload, role, layout),
        )
        for role in workload.models
    )
    return Forecast(workload, machine, models, tuple(_moments(workload, models, layout, machine.device.memory)))


def _model_memory(role: Role, b: int, layout: RankLayout) -> ModelMemory:
    if isinstance(role.options, EngineOptions):
        return zero.model_memory(stored_size(role), role.options, b, layout)
    return zero.frozen_memory(stored_size(role), role.options, b, layout.ranks)


def _activations(workload: Workload, role: Role, layout: RankLayout) -> Activations:
    """Of a model's passes; those without gradients may have other rows, and leave an adapter out."""
    sides = workload.shape.rows // workload.micro_batch  # 2 sequences in a pair
    kind, scores = role.part.kind, role.part.kind == "scalar" and not role.trained
    step_rows = workload.step_rows(layout.ranks)
    rows, sharded = min(workload.micro_batch, step_rows) * sides, role.options.zero_stage == 3
    shape = replace(workload.shape, rows=rows, dtype=workload.dtype, whole_logits=sharded)
    sampled = workload.rollout.rows if workload.rollout and scores else 0
    rows = (min(sampled, step_rows) or _eval_rows(workload, layout.ranks)) * sides or shape.rows
    scored = shape if role.trained and rows == shape.rows else replace(shape, rows=rows, entropy="none")
    peaks = Activations()
    if isinstance(role.options, EngineOptions):
        trained = replace(shape, checkpointing=role.options.gradient_checkpointing)
        peaks = activations.training(role.path, kind, Setup(role.adapter, ids=role.ids), trained)
    inference = activations.inference(role.path, kind, Setup(ids=role.ids), scored)
    on_gpu = [0, 0]
    if kind == "lm" and not layout.on_cpu:
        vocabulary = whole_size(role).vocabulary
        on_gpu = [activations.more_on_gpu(each.rows * each.predicted * vocabulary) for each in (shape, scored)]
    return replace(peaks, head=peaks.head + on_gpu[0], inference=inference + on_gpu[1])


def _eval_rows(workload: Workload, ranks: int) -> int:
    """Rows of a pass without gradients, where they are not those of a micro-batch; else 0."""
    if workload.eval_rows == workload.micro_batch:
        return 0
    return min(workload.eval_rows, math.ceil(workload.batch / ranks)) if workload.rollout else workload.eval_rows


def _sampled_rows(workload: Workload, ranks: int) -> int:
    """Rows that the sampler `loop` has on a device at once; 0 if something else samples."""
    rollout = workload.rollout
    return 0 if rollout is None or rollout.share else min(rollout.rows, math.ceil(workload.batch / ranks))


def _cache(workload: Workload, role: Role, layout: RankLayout) -> int:
    """Bytes of the key-value cache of the sampler `loop`."""
    if workload.rollout is None or role is not workload.models[0]:
        return 0
    tokens = workload.rollout.prompt + workload.rollout.response
    space = tokens if layout.on_cpu else math.ceil(tokens / ROUNDED) * ROUNDED
    return workload.b * whole_size(role).cache * _sampled_rows(workload, layout.ranks) * space


def _moments(
    workload: Workload, models: tuple[ModelForecast, ...], layout: RankLayout, memory: float
) -> Iterator[Moment]:
    trained = [model for model in models if model.role.trained]
    resident = sum((model.memory.resident for model in models), Bytes())
    resident += Bytes(workload.averages * MASTER * math.ceil(trained[0].size.trained / layout.ranks))
    for model in trained:
        yield from _training_moments(model, resident, workload.b, layout)
    if workload.rollout is None:
        model = trained[0]
        evaluating = resident + model.memory.gathered + Bytes(model.activations.inference)
        yield Moment(EVALUATE, f"{model.role.part.name}: evaluate", evaluating)
        return
    yield from _rollout_moments(workload, models, resident, memory, layout)


def _training_moments(model: ModelForecast, resident: Bytes, b: int, layout: RankLayout) -> Iterator[Moment]:
    memory, activations, role = model.memory, model.activations, model.role.part.name
    accumulated = memory.gradients if layout.micro_batches > 1 else Bytes()
    passing = resident + memory.passing + Bytes(activations.head) + accumulated
    yield Moment(UPDATE, f"{role}: forward and backward", passing)
    end_of_backward = memory.passing + memory.gradients + Bytes(activations.embeddings)
    yield Moment(UPDATE, f"{role}: end of backward", resident + end_of_backward)
    # Gradients that fill more than one bucket are exchanged during the backward pass, except under ZeRO-0 and 1.
    exchanged = resident + memory.reducing
    if model.size.trained > zero.BUCKET and isinstance(model.role.options, EngineOptions):
        after_backward = effective_stage(model.role.options, b, layout.ranks) < 2
        exchanged += Bytes() if after_backward else memory.passing + Bytes(activations.head)
    yield Moment(UPDATE, f"{role}: exchange of gradients", exchanged)
    yield Moment(UPDATE, f"{role}: step", resident + memory.stepping)


def _rollout_moments(
    workload: Workload, models: tuple[ModelForecast, ...], resident: Bytes, memory: float, layout: RankLayout
) -> Iterator[Moment]:
    """Sampling and scoring. Under ZeRO-3 the weights of one model at a time are gathered.

    On a CPU, sampling has a second copy of the linear layers, in the order of oneDNN, unless layers are compiled
    (rlhf/kernels/decoding.py).

    memory: bytes of a device
    """
    rollout = workload.rollout
    assert rollout is not None
    actor = models[0]
    # The logits of one token of each row: in the compute dtype, and three fp32 tensors for its softmax.
    logits = _sampled_rows(workload, layout.ranks) * actor.size.vocabulary
    sampling = logits * (workload.b + 3 * MASTER) + actor.cache / actor.size.layers
    sorts = layout.on_cpu and not rollout.share and not getattr(actor.role.options, "torch_compile", False)
    ordered = workload.b * whole_size(actor.role).linear if sorts else 0
    generating = actor.cache + sampling + ordered + rollout.share * memory
    yield Moment(GENERATE, "actor: generate", resident + actor.memory.gathered + Bytes(generating))
    for model in models:
        scoring = model.memory.gathered + Bytes(model.activations.inference)
        yield Moment(SCORE, f"{model.role.part.name}: score", resident + scoring)


def dtype_on(options: EngineOptions, device: str) -> torch.dtype:
    """The compute dtype on a kind of device, which this machine need not have."""
    if options.dtype != "auto":
        return BY_NAME[options.dtype]
    if device == "cpu":
        return compute_dtype(options, torch.device("cpu"))
    return torch.float16 if device in SLOW_BF16 else torch.bfloat16

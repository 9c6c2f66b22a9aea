"""One stage: who takes part, at which moment its processes hold the most, and what a step takes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rlhf.config.options import EngineOptions, FrozenOptions, effective_stage
from rlhf.engine.training import compute_dtype
from rlhf.plan import zero
from rlhf.plan.activations import Activations, Passes, activations, inference
from rlhf.plan.machine import PROGRAM, Machine
from rlhf.plan.sizes import Head, Size, size
from rlhf.plan.zero import MASTER, Bytes, Held, Site

DTYPES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class Player:
    """One model of a stage."""

    role: str
    place: str
    head: Head
    held: EngineOptions | FrozenOptions
    """of a trained model, or of one that is only asked"""
    adapter: str | None = None
    asked_at_once: int = 0
    """rows that a model sees at once without gradients, where that is not the stage's micro-batch"""

    @property
    def trained(self) -> bool:
        return isinstance(self.held, EngineOptions)

    def size(self) -> Size:
        return size(self.place, self.head, self.adapter, not self.trained)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a stage with rollouts adds: responses are sampled and scored before each update."""

    at_once: int
    """rows generated together on a device"""
    prompt: int
    response: int
    """tokens at most, both"""
    epochs: int
    minibatches: int
    """optimizer steps of an epoch"""
    share: float = 0.0
    """of a device's memory, which a backend takes for itself to generate in; 0: the actor generates"""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a stage will do, as far as memory, time and disk depend on it."""

    stage: str
    players: tuple[Player, ...]
    dtype: torch.dtype
    batch: int
    """rows of an optimizer step (with a rollout: of an iteration), over all devices"""
    micro_batch: int
    passes: Passes
    """of a micro-batch"""
    keep: int
    """checkpoints that stay on disk"""
    rollout: Rollout | None = None
    averages: int = 0
    """fp32 averages kept of the first trained model's weights"""
    models_written: int = 0
    """copies of trained models written at the end, beside one of each"""
    note: str = ""
    """what the plan cannot count, as it depends on the data"""

    @property
    def b(self) -> int:
        return DTYPES[self.dtype]

    def trained(self) -> list[Player]:
        return [player for player in self.players if player.trained]

    @property
    def checkpoints(self) -> int:
        """Bytes of those that stay and of one being written: weights and two moments, and averages, in fp32."""
        sizes = [player.size() for player in self.trained()]
        one = 3 * sum(size.trained for size in sizes) + self.averages * sizes[0].trained
        return MASTER * one * (self.keep + 1)


@dataclass(frozen=True, slots=True)
class Line:
    """One model's share of a plan. Bytes of one process."""

    player: Player
    size: Size
    held: Held
    active: Activations
    cache: float
    """of the rollout, at its longest"""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something a process does, and what it holds then."""

    name: str
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Forecast:
    """A stage on a machine."""

    needs: Needs
    machine: Machine
    lines: tuple[Line, ...]
    moments: tuple[Moment, ...]

    @property
    def device(self) -> Moment:
        """When the device holds the most."""
        on_cpu = self.machine.on_cpu
        return max(self.moments, key=lambda moment: moment.bytes.total if on_cpu else moment.bytes.device)

    @property
    def host(self) -> float:
        """The most CPU memory beside the device's, the program included."""
        return PROGRAM + max(moment.bytes.host for moment in self.moments)

    @property
    def peak(self) -> float:
        """The most bytes on the device; on a CPU all there is, without the program."""
        found = self.device.bytes
        return found.total if self.machine.on_cpu else found.device

    @property
    def lacking(self) -> tuple[float, float]:
        """Bytes over what there is: of the device, and of CPU memory. (0, 0) where it fits."""
        if self.machine.on_cpu:
            return max(0.0, self.peak + PROGRAM - self.machine.memory), 0.0
        return max(0.0, self.peak - self.machine.memory), max(0.0, self.host - self.machine.host)

    @property
    def fits(self) -> bool:
        return self.lacking == (0.0, 0.0)

    @property
    def disk(self) -> float:
        """Bytes of checkpoints, one more than are kept while a new one is written, and of the models at the end."""
        written = [line.size for line in self.lines if line.player.trained]
        first = written[0].total * self.needs.models_written
        checkpoints = 3 * MASTER * sum(each.trained for each in written) * (self.needs.keep + 1)
        return checkpoints + self.needs.b * (sum(each.total for each in written) + first)


def micro_batches(needs: Needs, ranks: int) -> int:
    """Forward and backward passes of an optimizer step on one device."""
    parts = needs.rollout.minibatches if needs.rollout else 1
    return max(1, math.ceil(needs.batch / parts / ranks / needs.micro_batch))


def forecast(needs: Needs, machine: Machine) -> Forecast:
    """What `needs` take on `machine`."""
    site = Site(machine.count, machine.on_cpu, micro_batches(needs, machine.count))
    lines = tuple(_line(needs, player, site) for player in needs.players)
    return Forecast(needs, machine, lines, tuple(_moments(needs, lines, site, machine.device.memory)))


def _line(needs: Needs, player: Player, site: Site) -> Line:
    counts = player.size()
    at_most = math.ceil(needs.batch / (needs.rollout.minibatches if needs.rollout else 1) / site.ranks)
    sides = needs.passes.rows // needs.micro_batch  # 2 of a pair
    passes = replace(needs.passes, rows=min(needs.micro_batch, at_most) * sides)
    if isinstance(player.held, EngineOptions):
        held = zero.held(counts, player.held, needs.b, site)
        checkpointing = player.held.gradient_checkpointing
        passes = replace(passes, entropy=needs.passes.entropy and player.head == "lm")
        active = activations(player.place, player.head, player.adapter, needs.dtype, checkpointing, passes)
    else:
        held = zero.frozen(counts, player.held, needs.b, site.ranks)
        rows = min(player.asked_at_once, at_most) or passes.rows
        asked = replace(passes, rows=rows, entropy=False)
        active = Activations(0, 0, inference(player.place, player.head, needs.dtype, asked))
    cache = 0.0
    if needs.rollout and not needs.rollout.share and player.role == "actor":
        r = needs.rollout
        rows = min(r.at_once, math.ceil(needs.batch / site.ranks))
        cache = needs.b * counts.cache * rows * (r.prompt + r.response)
    return Line(player, counts, held, active, cache)


def _moments(needs: Needs, lines: tuple[Line, ...], site: Site, memory: float) -> Iterator[Moment]:
    trained = [line for line in lines if line.player.trained]
    kept = sum((line.held.kept for line in lines), Bytes())
    kept += Bytes(needs.averages * MASTER * math.ceil(trained[0].size.trained / site.ranks))
    for i, line in enumerate(lines):
        before = sum((other.held.weights + other.held.optimizer for other in lines[:i]), Bytes())
        yield Moment(f"{line.player.role}: start", before + line.held.starting)
    for line in trained:
        yield from _training(line, kept, needs.b, site)
    if needs.rollout is None:
        line = trained[0]
        yield Moment(f"{line.player.role}: evaluate", kept + line.held.gathered + Bytes(line.active.inference))
        return
    yield from _collecting(needs, lines, kept, memory)


def _training(line: Line, kept: Bytes, b: int, site: Site) -> Iterator[Moment]:
    held, active, role = line.held, line.active, line.player.role
    several = site.micro_batches > 1
    passing = kept + held.passing + Bytes(active.head) + (held.gradients if several else Bytes())
    yield Moment(f"{role}: forward and backward", passing)
    yield Moment(f"{role}: end of backward", kept + held.passing + held.gradients + Bytes(active.end))
    # Gradients of more than a bucket are exchanged while activations are there, except under ZeRO-0 and 1.
    exchanged = kept + held.reducing
    if line.size.trained > zero.BUCKET and isinstance(line.player.held, EngineOptions):
        late = effective_stage(line.player.held, b, site.ranks) < 2
        exchanged += Bytes() if late else held.passing + Bytes(active.head)
    yield Moment(f"{role}: exchange of gradients", exchanged)
    yield Moment(f"{role}: step", kept + held.stepping)


def _collecting(needs: Needs, lines: tuple[Line, ...], kept: Bytes, memory: float) -> Iterator[Moment]:
    """Sampling and scoring. The reference is asked while the actor is whole. memory: of a device, in bytes"""
    rollout = needs.rollout
    assert rollout is not None
    actor = next(line for line in lines if line.player.role == "actor")
    # one token's logits of each row: in the compute dtype, in fp32, its softmax and what it is made from
    rows = actor.cache / max(1, needs.b * actor.size.cache * (rollout.prompt + rollout.response))
    sampling = rows * actor.size.vocabulary * (needs.b + 3 * MASTER) + actor.cache / actor.size.layers
    generating = actor.cache + sampling + rollout.share * memory
    yield Moment("actor: generate", kept + actor.held.gathered + Bytes(generating))
    for line in lines:
        beside = actor.held.gathered if line.player.role in ("actor", "reference") else Bytes()
        own = Bytes() if line is actor else line.held.gathered
        yield Moment(f"{line.player.role}: score", kept + beside + own + Bytes(line.active.inference))


def dtype_on(options: EngineOptions, device: str) -> torch.dtype:
    """The compute dtype on a kind of device, which need not be here."""
    if options.dtype != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    if device == "cpu":
        return compute_dtype(options, torch.device("cpu"))
    return torch.float32 if device == "V100" else torch.bfloat16

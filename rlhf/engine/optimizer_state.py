"""The state of a DeepSpeed optimizer for each weight, read and set as whole tensors under any sharding of ZeRO.

So a checkpoint depends neither on the number of ranks nor on the ZeRO stage that wrote it.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rlhf.distributed.tensor_parallel import gather_full, local_part
from rlhf.distributed.zero3 import is_sharded
from rlhf.engine.adamw import MOMENTS, OWN_RATE, Group, MasterAdamW, initial_state
from rlhf.models.policy import Learns

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Named = Sequence[tuple[str, nn.Parameter]]
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""the state of fp16's dynamic loss scale"""


def numbers(engine: "DeepSpeedEngine") -> dict[str, float]:
    """The optimizer's and the schedule's step counts, and fp16's loss scale.

    Weights that never have a gradient count fewer steps, or none: one rank leaves them out, several give them zeros.
    Their moments are 0, so that after a resume any count is right. `held_steps` are those of `heads_alone`.
    """
    counts: dict[bool, list[float]] = {True: [0.0], False: [0.0]}  # by whether the weight has a rate of its own
    weights = list(_weights(engine))
    for group, weight in weights:
        counts[OWN_RATE in group].append(float(_adam(engine).state.get(weight, {}).get("step", 0)))
    steps = max(counts[True] + counts[False])
    held = steps - max(counts[False]) if any(OWN_RATE not in group for group, _ in weights) else 0.0
    scaler = _loss_scaler(engine)
    scale = {} if scaler is None else {name: float(getattr(scaler, name)) for name in SCALE}
    return {"adam_steps": steps, "held_steps": held, "schedule_steps": engine.lr_scheduler.last_epoch, **scale}


def tensors(engine: "DeepSpeedEngine", trained: Named) -> Iterator[tuple[str, Tensor]]:
    """`weight:NAME`, `exp_avg:NAME`, `exp_avg_sq:NAME` of every trained weight, whole and in fp32, one after the other.

    The same on every rank; all ranks iterate together. Before the first step there are no moments. Optimizers other
    than AdamW have other names, and 8-bit codes as they are.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    stepped = numbers(engine)["adam_steps"] > 0
    if stepped:
        _link_states(engine.optimizer)
    for name, parameter in trained:
        yield f"weight:{name}", master(engine, parameter)
        if not _is_sharded(parameter):
            for moment, value in _adam(engine).moments(parameter).items():
                yield f"{moment}:{name}", gather_full(parameter, value)
            continue
        for moment in MOMENTS if stepped else ():
            state = safe_get_full_optimizer_state(parameter, moment)
            yield f"{moment}:{name}", gather_full(parameter, state)


def master(engine: "DeepSpeedEngine", parameter: nn.Parameter) -> Tensor:
    """The whole fp32 master weight of the optimizer. Every rank calls this together."""
    from deepspeed.utils import safe_get_full_fp32_param

    if _is_sharded(parameter):
        return gather_full(parameter, safe_get_full_fp32_param(parameter).detach())
    return gather_full(parameter, _adam(engine).master(parameter))


def set_master(engine: "DeepSpeedEngine", parameter: nn.Parameter, value: Tensor) -> None:
    """Set the master weight, whole or (tensor parallel) this rank's part. The weight of the model is not changed."""
    from deepspeed.utils import safe_set_full_fp32_param

    if _is_sharded(parameter):
        safe_set_full_fp32_param(parameter, value)
    else:
        _adam(engine).master(parameter).copy_(value)


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Whether ZeRO shards its optimizer state."""
    return hasattr(parameter, "_hp_mapping") or is_sharded(parameter)


def restore_numbers(engine: "DeepSpeedEngine", saved: dict[str, float]) -> None:
    """Restore the result of `numbers`; call it before `restore_tensors`."""
    adam = _adam(engine)
    if saved["adam_steps"]:
        steps, held = saved["adam_steps"], saved.get("held_steps", 0.0)
        for group, weight in _weights(engine):
            count = steps if OWN_RATE in group else steps - held
            if isinstance(adam, MasterAdamW):
                adam.resume(weight, group, count)
            else:
                adam.state[weight] |= initial_state(weight, count)
        _link_states(engine.optimizer)
    set_schedule(engine, int(saved["schedule_steps"]))
    scaler = _loss_scaler(engine)
    for name in SCALE if scaler is not None else ():
        setattr(scaler, name, saved.get(name, getattr(scaler, name)))  # none of a run that began in another dtype


def _link_states(zero: Any) -> None:
    """ZeRO 1 and 2 link the state of every parameter group when only the first one has stepped."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def set_schedule(engine: "DeepSpeedEngine", steps: int) -> None:
    """Set the learning rates to those after so many optimizer steps."""
    engine.lr_scheduler.last_epoch = steps - 1
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that the optimizer has taken no step yet
        engine.lr_scheduler.step()


def rates(engine: "DeepSpeedEngine", learns: Learns) -> dict[str, float]:
    """`learning_rate` of this step, and `learning_rate_of_head` if some weights have a rate of their own. If a head
    learns alone, `learning_rate` is its rate."""
    common, own = ([x["lr"] for x in _adam(engine).param_groups if (OWN_RATE in x) is its] for its in (False, True))
    if learns == "head" or not common:
        common = own
    return {"learning_rate": common[0]} | ({"learning_rate_of_head": own[0]} if own and learns == "all" else {})


@contextlib.contextmanager
def heads_alone(engine: "DeepSpeedEngine") -> Iterator[None]:
    """Inside, an optimizer step changes only the weights that have a learning rate of their own.

    Of the others, whose gradient is 0, AdamW would decay the weights and count a step, so that its correction of the
    moments would make their first real steps too small.
    """
    adam = _adam(engine)
    still = [(group, weight) for group, weight in _weights(engine) if OWN_RATE not in group]
    if isinstance(adam, MasterAdamW):
        for _, weight in still:
            weight.grad = None
        yield
        return
    counts = [float(adam.state[weight]["step"]) if weight in adam.state else 0.0 for _, weight in still]
    for group, _ in still:
        group["lr"] = 0.0
    yield
    for (_, weight), count in zip(still, counts, strict=True):
        if weight in adam.state:
            adam.state[weight]["step"].fill_(count)
    set_schedule(engine, engine.lr_scheduler.last_epoch)


def restore_tensors(engine: "DeepSpeedEngine", trained: Named, saved: Iterable[tuple[str, Tensor]]) -> None:
    """Restore the result of `tensors`, in any order; every rank gets every tensor, whole.

    A weight without moments had no gradient yet, as those of a vision tower that text does not pass through.
    """
    from deepspeed.utils import safe_set_full_optimizer_state

    parameters, adam = dict(trained), _adam(engine)
    missing = set(parameters)
    unstepped = {name for name, parameter in trained if not _is_sharded(parameter)}
    for key, value in saved:
        kind, name = key.split(":", 1)
        parameter = parameters[name]
        value = local_part(parameter, value)
        if kind == "weight":
            missing.discard(name)
            set_master(engine, parameter, value)
            _set_compute_weight(parameter, value)
        elif _is_sharded(parameter):
            safe_set_full_optimizer_state(parameter, value, kind)
        else:
            unstepped.discard(name)
            adam.moments(parameter)[kind].copy_(value)
    if missing:
        raise ValueError(f"no weights {', '.join(sorted(missing)[:3])}")
    for name in unstepped:
        adam.unstep(parameters[name])


def _set_compute_weight(parameter: nn.Parameter, value: Tensor) -> None:
    """The weight that the forward pass uses, rounded from the master as the optimizer does."""
    import deepspeed

    if not is_sharded(parameter):
        parameter.data.copy_(value)
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)  # rank 0's is used, and all ranks have the same


def _adam(engine: "DeepSpeedEngine") -> Any:
    """The torch optimizer inside ZeRO's, or alone."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _loss_scaler(engine: "DeepSpeedEngine") -> Any:
    """The dynamic loss scaler of fp16; None in other precisions."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def _weights(engine: "DeepSpeedEngine") -> Iterator[tuple[Group, Tensor]]:
    """The tensors that AdamW updates on this rank, flat shards under ZeRO, each with its parameter group."""
    groups, zero = _adam(engine).param_groups, engine.optimizer
    flat = getattr(zero, "fp32_partitioned_groups_flat", None)
    if flat:  # ZeRO-3: several shards of a group, which has them during a step only
        yield from ((groups[zero.sub_group_to_group_id[i]], weight) for i, weight in enumerate(flat))
    else:
        yield from ((group, weight) for group in groups for weight in group["params"])

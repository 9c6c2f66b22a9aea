"""Runs of a tiny engine that stop at a checkpoint and go on from it, in the same process or in another one."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.config.options import EngineOptions
from rlhf.engine.ema import BestWeights
from rlhf.engine.training import Engine
from rlhf.models.policy import Policy
from rlhf.training import checkpoints
from rlhf.training.checkpoints import Resumable
from tests.support import engine_runs, tiny

HALF = 2
ABOUT = {"stage": "step1_sft", "config": {}, "inputs": {}, "models": []}


def with_dropout(options: dict[str, Any], adapter: str | None = None) -> Engine:
    """An engine whose forward pass draws random numbers. In ZeRO stage 0 some weights never get a gradient, as those of
    Gemma 3's vision tower in a run on text."""
    if adapter is not None:
        return engine_runs.engine(options, adapter=adapter)
    chosen = EngineOptions(**{"dtype": "fp32", **options})
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen.dtype]
    model = tiny.causal_lm("gpt2", std=0.05, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    if chosen.zero_stage == 0:
        model.tower = torch.nn.Linear(3, 2)
    return Engine(Policy(model.to(dtype)), tiny.training_options(chosen, engine_runs.OPTIMIZER), engine_runs.STEPS)


def state_of(engine: Engine, best: BestWeights | None = None) -> Resumable:
    return Resumable({"policy": engine}, {"policy": engine} | ({} if best is None else {"best": best}))


def everything(engine: Engine) -> dict[str, Tensor]:
    """Weights in fp32, moments, and the weights that compute."""
    whole = {name: tensor.detach().clone() for name, tensor in engine.tensors()}
    return whole | engine_runs.weights(engine)


def save_half(folder: Path, options: dict[str, Any], adapter: str | None = None) -> dict[str, Any]:
    """HALF the steps, a checkpoint, and the rest: what the uninterrupted run gives. The first step is the best."""
    engine = with_dropout(options, adapter)
    best = BestWeights(engine)
    rows = engine_runs.batches()
    for number, batch in enumerate(rows[:HALF], start=1):
        engine_runs.step(engine, batch, 3)
        if number == 1:
            best.update()
            at_best = both_kinds(engine)
    assert checkpoints.save(folder, HALF, state_of(engine, best), ABOUT, 2) is None
    metrics = [engine_runs.step(engine, batch, 3) for batch in rows[HALF:]]
    return {"metrics": metrics, "numbers": engine.state_dict(), "state": everything(engine), "best": at_best}


def go_on(folder: Path, options: dict[str, Any], adapter: str | None = None) -> dict[str, Any]:
    """The rest of the steps in a fresh engine, from the checkpoint."""
    torch.manual_seed(99)  # as a fresh process would not be where the other was
    engine = with_dropout(options, adapter)
    checkpoint = checkpoints.newest(folder)
    assert checkpoint is not None and checkpoint.step == HALF
    best = BestWeights(engine)
    checkpoint.restore(state_of(engine, best), seed=0)
    metrics = [engine_runs.step(engine, batch, 3) for batch in engine_runs.batches()[HALF:]]
    state, numbers = everything(engine), engine.state_dict()
    best.restore()
    return {"metrics": metrics, "numbers": numbers, "state": state, "best": both_kinds(engine)}


def both_kinds(engine: Engine) -> dict[str, Tensor]:
    """Copies of the weights that compute, and of the fp32 weights."""
    masters = {f"master:{name}": weight for name, weight in engine_runs.master(engine).items()}
    return {**engine_runs.weights(engine), **masters}

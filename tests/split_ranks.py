"""What two ranks do that share one model or the tokens of its rows, all in one launch:

    torchrun --nproc-per-node=2 -m tests.split_ranks FOLDER [all]

FOLDER is what `make` made; FOLDER/seen.pt is what rank 0 saw.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from rlhf import dist, launch
from rlhf.engine import Engine
from rlhf.models import sequence_parallel
from rlhf.models.ema import EMA
from rlhf.models.export import save_policy
from rlhf.models.load import load_causal_lm
from rlhf.models.scalar import ScalarModel, scores
from rlhf.options import EngineOptions
from rlhf.splitting import SEQUENCE, TENSOR
from tests import engine_runs, tiny
from tests.engine_runs import DECAY, STEPS, batches, generate, step
from tests.sharded_ranks import saved

# A gradient of nothing but rounding, as that of a bias of keys, makes no step.
OPTIMIZER = engine_runs.OPTIMIZER.model_copy(update={"adam_epsilon": 1e-5})


def make(folder: Path) -> None:
    """Every family as a model directory."""
    for family in {*TENSOR, *SEQUENCE} - {"mistral"}:
        tiny.causal_lm(family, std=0.05).save_pretrained(folder / family)
    tiny.causal_lm("mistral", std=0.05, sliding_window=None).save_pretrained(folder / "mistral")


def engine_of(place: Path, options: dict[str, Any]) -> Engine:
    chosen = EngineOptions(**{"dtype": "fp32", **options})
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen.dtype]
    lm = load_causal_lm(str(place), dtype, tiny.VOCAB)
    return Engine(sequence_parallel.policy(lm, chosen.sequence_parallel_size), chosen, OPTIMIZER, STEPS)


def trained(folder: Path, family: str, options: dict[str, Any], generating: bool = False) -> dict[str, Any]:
    """Three steps; an interruption, after which a new engine goes on; three more. With an average of the weights."""
    engine = engine_of(folder / family, options)
    average = EMA(engine, DECAY)
    first, metrics, tokens = saved(engine, None, folder), [], []
    for number, rows in enumerate(batches()):
        if number == STEPS // 2:
            kept = engine.state_dict(), gathered(engine), gathered(average)
            engine = engine_of(folder / family, options)
            average = EMA(engine, DECAY)
            engine.load_state_dict(kept[0])
            engine.load_tensors(kept[1])
            average.load_tensors(kept[2])
        if generating:
            tokens.append(generate(engine, 8))
        metrics.append(step(engine, rows, 3))
        average.update()
    last = saved(engine, None, folder)
    save_policy(engine, None, tiny.tokenizer(), folder / "average", average)
    dist.barrier()
    from safetensors.torch import load_file

    averaged = load_file(folder / "average" / "model.safetensors")
    again = saved(engine, None, folder)
    unspoilt = all(torch.equal(last[name], again[name]) for name in last)
    return {
        "first": first,
        "metrics": metrics,
        "last": last,
        "averaged": averaged,
        "tokens": tokens,
        "unspoilt": unspoilt,
        "size": engine.size(),
    }


def gathered(part: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors that all ranks keep, as a checkpoint brings them back."""
    mine = [(name, tensor.clone()) for name, tensor in part.tensors()]
    return [pair for share in dist.gather_objects(mine) for pair in share]


def scored(size: int) -> list[list[float]]:
    """Scores of rows by a scalar model, before and after steps that raise them."""
    head = torch.nn.Linear(tiny.WIDTH, 1, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, tiny.WIDTH))
    model = sequence_parallel.scalar_model(ScalarModel(tiny.backbone(std=0.05), head), size)
    engine = Engine(model, EngineOptions(dtype="fp32", sequence_parallel_size=size), OPTIMIZER, STEPS)
    rows = tiny.sequences([5, 9, 7, 8, 6, 4], [1] * 6)
    mine = rows[torch.arange(dist.data_rank(), len(rows), dist.data_world_size())]
    found = []
    for _ in range(3):
        with engine.inference() as scalar:
            found.append(scores(scalar(rows), rows.mask).tolist())
        engine.step([mine], lambda part: (-scores(engine(part), part.mask).sum() / len(rows), {}))
    return found


def runs(folder: Path, everything: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"alone": {}, "tensor": {}, "sequence": {}}
    stages = (0, 1, 2, 3) if everything else (0, 3)
    dist.work_alike(1)
    found["scores alone"] = scored(1)
    dist.work_alike(2)
    found["scores sequence"] = scored(2)
    dist.work_alike(1)
    for family in sorted({*TENSOR, *SEQUENCE}) if everything else ("llama",):
        found["alone"][family] = trained(folder, family, {}, generating=True)
    dist.work_alike(2)
    # Once a model is split, DeepSpeed holds every other in the process for split too.
    for kind, families in (("sequence", SEQUENCE), ("tensor", TENSOR)):
        for family in families if everything else ("llama",):
            for stage in stages if family == "llama" else (1,):
                options = {"zero_stage": stage, f"{kind}_parallel_size": 2}
                generating = kind == "tensor"
                found[kind][f"{family} {stage}"] = trained(folder, family, options, generating)
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with dist.process_group(timeout_s=60):
        seen = runs(place, "all" in sys.argv[2:])
        if dist.is_main():
            torch.save(seen, place / "seen.pt")
    launch.end_well()

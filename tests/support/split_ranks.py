"""What two ranks do that share one model or the tokens of its rows, all in one launch:

    torchrun --nproc-per-node=2 -m tests.support.split_ranks FOLDER [all]

FOLDER is what `make` made; FOLDER/seen.pt is what rank 0 saw.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.engine.ema import EMA
from rlhf.engine.export import save_policy
from rlhf.engine.training import Engine
from rlhf.maths import losses
from rlhf.models import sequence_parallel
from rlhf.models.head import ScoreHead
from rlhf.models.load import load_causal_lm
from rlhf.models.scalar import ScalarModel, scores
from rlhf.models.splitting import SEQUENCE, TENSOR
from rlhf.training import stage_process
from rlhf.training.checkpoints import Resumable, newest, save
from tests.support import tiny
from tests.support.engine_runs import DECAY, OPTIMIZER, STEPS, batches, gathered, generate, step
from tests.support.resuming import ABOUT, HALF
from tests.support.sharded_ranks import saved


def make(folder: Path) -> None:
    """Every family as a model directory."""
    for family in {*TENSOR, *SEQUENCE} - {"mistral"}:
        tiny.causal_lm(family, std=0.05).save_pretrained(folder / family)
    tiny.causal_lm("mistral", std=0.05, sliding_window=None).save_pretrained(folder / "mistral")


def engine_of(path: Path, options: dict[str, Any]) -> Engine:
    chosen = EngineOptions(**{"dtype": "fp32", **options})
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen.dtype]
    lm = load_causal_lm(str(path), dtype, tiny.VOCAB)
    return Engine(
        sequence_parallel.policy(lm, chosen.sequence_parallel_size), tiny.training_options(chosen, OPTIMIZER), STEPS
    )


def trained(
    folder: Path, family: str, options: dict[str, Any], generating: bool = False, begun: Path | None = None
) -> dict[str, Any]:
    """HALF the steps and a checkpoint; a new engine goes on from it, or from that of another run; the rest.

    With an average of the weights. Without `begun` nothing is interrupted.
    """
    engine = engine_of(folder / family, options)
    average = EMA(engine, DECAY)
    first, metrics, tokens = saved(engine, None, folder), [], []
    for number, rows in enumerate(batches()):
        if number == HALF:
            weights_at_half = gathered(engine), gathered(average)
            assert save(checkpoint_folder(folder, family, options), HALF, state_of(engine, average), ABOUT, 2) is None
            if begun is not None:
                engine = engine_of(folder / family, options)
                average = EMA(engine, DECAY)
                checkpoint = newest(begun)
                assert checkpoint is not None and checkpoint.step == HALF
                checkpoint.restore(state_of(engine, average), seed=0)
        if generating:
            tokens.append(generate(engine, 8))
        metrics.append(step(engine, rows, 3))
        average.update()
    last = saved(engine, None, folder)
    save_policy(engine, None, tiny.tokenizer(), folder / "average", average)
    collectives.barrier()
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
        "kept": weights_at_half,
        "copies": collectives.gather_objects(copies(engine)),
    }


def state_of(engine: Engine, average: EMA) -> Resumable:
    return Resumable({"policy": engine}, {"policy": engine, "ema": average})


def checkpoint_folder(folder: Path, family: str, options: dict[str, Any]) -> Path:
    """Where a run leaves them."""
    return folder / "checkpoints" / family / "-".join(map(str, sorted(options.items())))


def copies(engine: Engine) -> dict[str, float]:
    """A checksum of each weight that every rank has whole, under every sharing."""
    with engine.inference() as model:
        named = dict(model.named_parameters())
        return {n: w.double().sum().item() for n, w in named.items() if "norm" in n or "embed" in n or "head" in n}


def scored(size: int) -> list[list[float]]:
    """Scores of rows by a scalar model, before and after steps that raise them."""
    head = ScoreHead(torch.linspace(-1, 1, tiny.WIDTH)[None])
    model = sequence_parallel.scalar_model(ScalarModel(tiny.backbone(std=0.05), head), size)
    engine = Engine(
        model, tiny.training_options(EngineOptions(dtype="fp32", sequence_parallel_size=size), OPTIMIZER), STEPS
    )
    rows = tiny.sequences([5, 9, 7, 8, 6, 4, 5, 6], [1] * 8)
    mine = rows[torch.arange(collectives.dp_rank(), len(rows), collectives.dp_size())]
    results = []
    for _ in range(3):
        with engine.inference() as scalar:
            results.append(scores(scalar(rows), rows.mask).tolist())
        engine.step([mine], lambda part: (-scores(engine(part), part.mask).sum() / len(rows), {}))
    return results


def one_sided(size: int) -> list[float]:
    """Losses of rows of which only tokens at the beginning count, so that the second stretch predicts nothing."""
    model = sequence_parallel.policy(tiny.causal_lm(std=0.05), size)
    engine = Engine(
        model, tiny.training_options(EngineOptions(dtype="fp32", sequence_parallel_size=size), OPTIMIZER), STEPS
    )
    rows = tiny.sequences([12, 9, 11, 7], [2] * 4)
    rows.loss_mask[:, 5:] = False
    mine = rows[torch.arange(collectives.dp_rank(), len(rows), collectives.dp_size())]
    count = rows.loss_mask.sum()
    return [
        engine.step([mine], lambda part: losses.token_nll(engine(part)[0], part.loss_mask, count))["loss"]
        for _ in range(3)
    ]


def runs(folder: Path, everything: bool) -> dict[str, Any]:
    results: dict[str, Any] = {"alone": {}, "tensor": {}, "sequence": {}}
    stages = (0, 1, 2, 3) if everything else (3,)
    collectives.set_ranks_per_replica(1)
    results["scores alone"], results["losses alone"] = scored(1), one_sided(1)
    collectives.set_ranks_per_replica(2)
    results["scores sequence"], results["losses sequence"] = scored(2), one_sided(2)
    collectives.set_ranks_per_replica(1)
    for family in sorted({*TENSOR, *SEQUENCE}) if everything else ("llama",):
        results["alone"][family] = trained(folder, family, {}, generating=True)
    collectives.set_ranks_per_replica(2)
    # Once a model is split, DeepSpeed holds every other in the process for split too.
    for kind, families in (("sequence", SEQUENCE), ("tensor", TENSOR)):
        for family in families if everything else ("llama",):
            for stage in stages if family == "llama" else (1,):
                options = {"zero_stage": stage, f"{kind}_parallel_size": 2}
                checkpoint_of_other = checkpoint_folder(folder, family, {})
                results[kind][f"{family} {stage}"] = trained(
                    folder, family, options, kind == "tensor", checkpoint_of_other
                )
        if not everything:
            continue
        options = {"zero_stage": 3, f"{kind}_parallel_size": 2}
        results[kind]["whole"] = trained(folder, "llama", options)
        results[kind]["gone on"] = trained(folder, "llama", options, begun=checkpoint_folder(folder, "llama", options))
    return results


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with collectives.process_group(timeout_s=60):
        results = runs(root, "all" in sys.argv[2:])
        if collectives.is_main():
            torch.save(results, root / "seen.pt")
    stage_process.end_well()

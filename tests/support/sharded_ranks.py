"""What is run on two ranks with models that are loaded in parts, all in one launch:

    torchrun --nproc-per-node=2 -m tests.support.sharded_ranks FOLDER RUN...

FOLDER holds what `make` wrote; FOLDER/seen.pt is what rank 0 saw. RUN: of RUNS.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf import adapters
from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.distributed import collectives
from rlhf.distributed.zero3 import full_shape
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.frozen import shards_of as frozen_shards_of
from rlhf.engine.training import Engine, shards_of
from rlhf.models.head import ScoreHead
from rlhf.models.load import Loading, load_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel, load_scalar_model
from rlhf.training import stage_process
from tests.support import tiny
from tests.support.engine_runs import OPTIMIZER, STEPS, batches, generate, sample, step

FAMILIES = ("llama", "gpt2", "opt")
"""untied, tied, and tied with a projection around the layers"""
ADAPTERS = {"lora": "lora", "dora": "lora,r=4,use_dora=true"}
"""DoRA reads the weights when it wraps them, and weights of other modules in its passes"""
ADDED = 3
"""ids of the tokenizer that the model on disk has no rows for"""
DEEP = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
"""28 million weights, none of them more than a fiftieth."""
RUNS = [
    *((family, kind) for family in FAMILIES for kind in ("whole", "sharded")),
    *(("llama", kind) for kind in ("offloaded", "layers")),
    *((name, kind) for name in ADAPTERS for kind in ("whole", "layers")),
    ("lora", "sharded"),
]
QUICK = [run for run in RUNS if run[0] in ("llama", "gpt2", "dora") and run[1] != "offloaded"]
"""those of `make test`"""
KINDS: dict[str, dict[str, Any]] = {
    "whole": {"zero_stage": 3},
    "sharded": {"zero_stage": 3},
    "offloaded": {"zero_stage": 3, "offload_param": True, "offload_optimizer": True},
    "layers": {"zero_stage": 3, "gather_whole": False},
}
FROZEN: dict[str, dict[str, Any]] = {
    "whole": {},
    "sharded": {"zero_stage": 3},
    "sharded offloaded": {"zero_stage": 3, "offload": True},
    "layers": {"zero_stage": 3, "gather_whole": False},
}
FROZEN_ROWS = tiny.sequences([5, 9, 7, 8, 6, 4], [1] * 6)
M_MMAP_THRESHOLD = -3
"""of malloc.h"""
HEAD = torch.linspace(-1, 1, tiny.WIDTH)[None]


def make(folder: Path) -> None:
    """A small model of each family, one of many layers, and a reward model."""
    tiny.causal_lm("llama", std=0.05, **DEEP).save_pretrained(folder / "deep")
    for family in FAMILIES:
        tiny.causal_lm(family, std=0.05).save_pretrained(folder / family)
    with tiny.one_rank():
        model = ScalarModel(tiny.backbone(), ScoreHead(HEAD))
        save_scalar(
            Engine(model, tiny.training_options(EngineOptions(dtype="fp32"), OPTIMIZER), 1),
            None,
            tiny.tokenizer(),
            folder / "reward",
        )


def policy(path: Path, kind: str, adapter: str | None = None) -> Engine:
    options = EngineOptions(dtype="fp32", **KINDS[kind])
    shards = None if kind == "whole" else shards_of(options)
    lm = load_causal_lm(str(path), torch.float32, tiny.VOCAB + ADDED, Loading(shards=shards))
    torch.manual_seed(0)  # of the adapter's first weights
    return Engine(Policy(adapters.wrap(lm, adapter)), tiny.training_options(options, OPTIMIZER), STEPS)


def trained(folder: Path, family: str, kind: str, adapter: str | None = None) -> dict[str, Any]:
    """Two steps, before each of them generation, ranks of unequal length; the weights before and after, and what was
    saved."""
    engine = policy(folder / family, kind, adapter)
    first, tokens, metrics = saved(engine, adapter, folder), [], []
    for rows in batches(2):
        tokens.append(generate(engine, 3 + 8 * collectives.rank()))
        metrics.append(step(engine, rows, 3))
    return {"first": first, "tokens": tokens, "metrics": metrics, "last": saved(engine, adapter, folder)}


def saved(engine: Engine, adapter: str | None, folder: Path) -> dict[str, Tensor]:
    """The model as it is written to disk."""
    from safetensors.torch import load_file

    save_policy(engine, adapter, tiny.tokenizer(), folder / "saved")
    collectives.barrier()
    tensors = load_file(folder / "saved" / "model.safetensors")
    collectives.barrier()
    return tensors


def scores(folder: Path, kind: str) -> list[list[float]]:
    """What each rank hears of a frozen reward model, the second rank in three times as many passes as the first; then
    again in equally many, to see that nothing is left over."""
    options = FrozenOptions(**FROZEN[kind])
    shards = frozen_shards_of(options, torch.float32)
    model = load_scalar_model(str(folder / "reward"), torch.float32, tiny.VOCAB, Loading(0, shards))
    engine = FrozenEngine(model, options, torch.float32)
    results: list[float] = []
    for parts in (1 + 2 * collectives.rank(), 2, 3 - 2 * collectives.rank()):
        with engine.inference() as scalar:
            for index in torch.arange(6).tensor_split(parts):
                results += scalar(FROZEN_ROWS[index])[:, 3].tolist()
    return collectives.gather_objects(results)


def unequal_passes(folder: Path, kind: str) -> list[float]:
    """Log-probs of rows that the ranks share unequally, one pass a row, as held-out rows are; then a step's loss."""
    engine = policy(folder / "llama", kind)
    rows = batches(1)[0]
    totals = []
    for count in (3, 4):
        with engine.inference() as model:
            total = sum(model(rows[[i]])[0].sum().item() for i in range(collectives.rank(), count, 2))
        totals.append(collectives.sum_over_ranks(torch.tensor(total)).item())
    with engine.inference() as model:
        model(rows[[0]])
        sample(model, 3 + 8 * collectives.rank())  # passes of the language model alone, after one of the whole
    return [*totals, step(engine, rows)["loss"]]


def own_memory() -> int:
    """Bytes of this process that are not of files it maps."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """Most bytes of its own that this process had while at work, beside what it had before; and what the work gave."""
    before, samples, done = own_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            samples.append(own_memory())
            time.sleep(0.001)

    watching = threading.Thread(target=watch)
    watching.start()
    result = work()
    done.set()
    watching.join()
    return max(samples) - before, result


def memory(folder: Path) -> dict[str, Any]:
    """Peaks of every rank as shares of the model's bytes: to load it, and to ask it something."""
    peaks = {}
    rows = batches(1)[0]
    for kind in ("layers", "sharded", "whole"):
        options = FrozenOptions(**FROZEN[kind])
        shards = frozen_shards_of(options, torch.bfloat16)
        load = partial(load_causal_lm, str(folder / "deep"), torch.bfloat16, tiny.VOCAB, Loading(shards=shards))
        loading, lm = peak(load)
        engine = FrozenEngine(Policy(lm), options, torch.bfloat16)

        def ask(engine: FrozenEngine = engine) -> None:
            with engine.inference() as model:
                model(rows[[0]])

        asking, _ = peak(ask)
        size = 2 * sum(full_shape(weight).numel() for weight in lm.parameters())
        peaks[kind] = collectives.gather_objects((loading / size, asking / size))
    return peaks


def runs(folder: Path, chosen: list[str]) -> dict[str, Any]:
    # Tensors of 64 KiB and more have mappings of their own, which go back to the system at once.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    results: dict[str, Any] = {"memory": memory(folder)}  # first: training keeps what it has had
    for run in chosen:
        what, _, kind = run.partition(" ")
        results[run] = trained(folder, what if what in FAMILIES else "llama", kind, ADAPTERS.get(what))
    for kind in FROZEN:
        results[f"frozen {kind}"] = scores(folder, kind)
    for kind in ("whole", "sharded", "layers"):
        results[f"unequal {kind}"] = unequal_passes(folder, kind)
    return results


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with collectives.process_group(timeout_s=60):
        results = runs(root, sys.argv[2:])
        if collectives.is_main():
            torch.save(results, root / "seen.pt")
    stage_process.end_well()

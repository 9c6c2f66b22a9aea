"""A run that goes on from a checkpoint is the run that was not interrupted, to the bit."""

import itertools
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.training import checkpoints, random_sources, stage_process
from tests.support import engine_runs, forked_ranks, resuming
from tests.support.engine_runs import ROUNDING

pytestmark = pytest.mark.usefixtures("ranks")


ALONE = engine_runs.ALONE
Case = tuple[dict[str, Any], str | None]
CASES: dict[str, Case] = {
    **{f"zero {stage}, bf16": ({"zero_stage": stage, "dtype": "bf16"}, None) for stage in ALONE},
    **{
        f"zero {stage}, {dtype}, offloaded": ({"zero_stage": stage, "dtype": dtype, "offload_optimizer": True}, None)
        for stage, dtype in ((1, "bf16"), (2, "fp32"), (3, "bf16"))
    },
    **{f"zero {stage}, lora": ({"zero_stage": stage}, "lora,r=4") for stage in ALONE},
    "muon": ({"zero_stage": 0, "optim": "muon", "dtype": "fp32"}, None),
    "adamw_8bit": ({"zero_stage": 0, "optim": "adamw_8bit", "dtype": "bf16"}, None),
}
"""options and adapter; in fp32, not offloaded: test_more_ranks_and_fewer_go_on"""
NEXT = {0: 2, 2: 3, 3: 0}
"""ZeRO stages on two ranks; 1 differs from 2 in when gradients are divided alone, of which a checkpoint has none"""
NEEDS_PACKAGE = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["metrics"] == other["metrics"] and one["numbers"] == other["numbers"]
    for part in ("state", "best"):
        assert set(one[part]) == set(other[part])
        assert all(torch.equal(value, other[part][name]) for name, value in one[part].items()), part


@pytest.mark.parametrize("name", [pytest.param(n, marks=NEEDS_PACKAGE if "8bit" in n else ()) for n in CASES])
def test_it_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    """With dropout, and weights without a gradient. A checkpoint has the weights that learn alone."""
    whole = resuming.save_half(tmp_path, *CASES[name])
    require_same(whole, resuming.go_on(tmp_path, *CASES[name]))
    assert not any("tower" in weight and "exp_avg" in weight for weight in whole["state"])
    names = {tensor for tensor, _ in checkpoints.newest(tmp_path)._tensors("policy")}  # type: ignore[union-attr]
    assert names and all(("lora" in tensor) == name.endswith("lora") for tensor in names)


def test_what_is_drawn_apart_is_no_part_of_the_run() -> None:
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    random_sources.seed(0, 0)
    expected = [draws(), draws()]
    random_sources.seed(0, 0)
    of_run = [draws()]
    with random_sources.apart(0):
        apart = [draws(), draws()]
    of_run.append(draws())
    assert of_run == expected
    assert not {*itertools.chain(*apart)} & {*itertools.chain(*expected)}, "another stream, too"
    with random_sources.apart(0):
        assert draws() == apart[0]


def test_ranks_draw_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for rank in (0, 1):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        random_sources.seed(3, 0)
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_an_engine_that_has_not_stepped_goes_on(tmp_path: Path) -> None:
    """The actor of a critic's warm-up."""
    waiting = resuming.with_dropout({"zero_stage": 1})
    assert checkpoints.save(tmp_path, 3, resuming.state_of(waiting), resuming.ABOUT, 2) is None
    fresh = resuming.with_dropout({"zero_stage": 1})
    checkpoint = checkpoints.newest(tmp_path)
    assert checkpoint is not None
    checkpoint.restore(resuming.state_of(fresh), seed=0)
    states = []
    for engine in (waiting, fresh):
        torch.manual_seed(5)
        engine_runs.step(engine, engine_runs.batches()[0])
        states.append(resuming.everything(engine))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_more_ranks_and_fewer_go_on(tmp_path: Path) -> None:
    """Saved by two, gone on with two (to the bit, in that process; under the next stage to rounding) and with one (to
    rounding), and saved by one, gone on with two. Without dropout: its draws are each rank's own. Some weights never
    get a gradient: one rank leaves them out, two give them zeros. Each run is saved once more."""
    for stage in (0, 3):
        save_without_dropout(tmp_path / f"one {stage}", {"zero_stage": stage})
    forked_ranks.run("tests.rlhf.training.test_resume", str(tmp_path))
    results = torch.load(tmp_path / "seen.pt", weights_only=True)
    for stage in NEXT:
        one = torch.load(tmp_path / f"one {stage // 3 * 3}" / "whole.pt", weights_only=True)
        assert results[f"to the bit {stage}"]
        assert engine_runs.apart(one, results[f"from one {stage}"]) < ROUNDING
        assert engine_runs.apart(one, results[f"next stage {stage}"]) < ROUNDING
        engine = engine_with_tower({"zero_stage": stage})
        rest(engine, tmp_path / f"two {stage}")
        assert engine_runs.apart(one, used_weights(engine)) < ROUNDING


def engine_with_tower(options: dict[str, Any]) -> Engine:
    start = engine_runs.start

    def start_with_tower() -> Any:
        model = start()
        torch.manual_seed(0)
        model.tower = torch.nn.Linear(3, 2)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_runs, "start", start_with_tower)
        return engine_runs.engine(options)


def used_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Those that get gradients: with several ranks, weight decay changes the others too."""
    return {name: weight for name, weight in engine_runs.weights(engine).items() if "tower" not in name}


def save_without_dropout(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    engine = engine_with_tower(options)
    for batch in engine_runs.batches()[: resuming.HALF]:
        engine_runs.step(engine, batch, 3)
    assert checkpoints.save(folder, resuming.HALF, resuming.state_of(engine), resuming.ABOUT, 2) is None
    for batch in engine_runs.batches()[resuming.HALF :]:
        engine_runs.step(engine, batch, 3)
    whole = used_weights(engine)
    if not (folder / "whole.pt").exists():
        torch.save(whole, folder / "whole.pt")
    return whole


def rest(engine: Engine, folder: Path) -> None:
    checkpoint = checkpoints.newest(folder)
    assert checkpoint is not None
    checkpoint.restore(resuming.state_of(engine), seed=0)
    for batch in engine_runs.batches()[resuming.HALF :]:
        engine_runs.step(engine, batch, 3)
    again = folder / f"again with {collectives.world_size()}"
    assert checkpoints.save(again, engine_runs.STEPS, resuming.state_of(engine), resuming.ABOUT, 2) is None


def two_ranks(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage in NEXT:
        options = {"zero_stage": stage}
        whole = resuming.save_half(folder / f"dropout {stage}", options)
        again = resuming.go_on(folder / f"dropout {stage}", options)
        mine = all(
            torch.equal(value, again[part][name]) for part in ("state", "best") for name, value in whole[part].items()
        )
        results[f"to the bit {stage}"] = all(collectives.gather_objects(mine)) and whole["metrics"] == again["metrics"]
        save_without_dropout(folder / f"two {stage}", options)
        for name, number, saved in (
            (f"from one {stage}", stage, f"one {stage // 3 * 3}"),
            (f"next stage {stage}", NEXT[stage], f"two {stage}"),
        ):
            engine = engine_with_tower({"zero_stage": number})
            rest(engine, folder / saved)
            results[name] = used_weights(engine)
    return results


if __name__ == "__main__":
    with collectives.process_group(timeout_s=60):
        results = two_ranks(Path(sys.argv[1]))
        if collectives.is_main():
            torch.save(results, Path(sys.argv[1]) / "seen.pt")
    stage_process.end_well()

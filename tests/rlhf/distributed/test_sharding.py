"""Models loaded in parts (ZeRO-3) on two ranks: the same numbers as whole ones, never more of a model than a part."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf.distributed.zero3 import Shards, gather_weights, is_sharded
from rlhf.errors import UserError
from rlhf.models.load import Loading, load_causal_lm
from tests.support import forked_ranks, tiny
from tests.support.choice import includes_long, marked_long
from tests.support.engine_runs import EPS, ROUNDING, apart
from tests.support.sharded_ranks import ADDED, FAMILIES, FROZEN, FROZEN_ROWS, HEAD, QUICK, RUNS, make

pytestmark = pytest.mark.ranks

EMBEDDINGS = re.compile(r"(embed_tokens|wte|lm_head)\.weight$")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    make(path)
    return path


@pytest.fixture(scope="module")
def two(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    runs = RUNS if includes_long(request) else QUICK
    forked_ranks.run("tests.support.sharded_ranks", str(folder), *(" ".join(run) for run in runs))
    results: dict[str, Any] = torch.load(folder / "seen.pt")
    return results


@pytest.mark.parametrize(("what", "kind"), [marked_long(run, QUICK) for run in RUNS if run[1] != "whole"])
def test_training_equals_that_of_a_model_loaded_whole(what: str, kind: str, two: dict[str, Any]) -> None:
    expected, result = two[f"{what} whole"], two[f"{what} {kind}"]
    assert all(torch.equal(one, other) for one, other in zip(expected["tokens"], result["tokens"], strict=True))
    for one, other in zip(expected["metrics"], result["metrics"], strict=True):
        assert other == pytest.approx(one, rel=8 * EPS)
    assert apart(expected["last"], result["last"]) < ROUNDING
    assert apart(expected["last"], expected["first"]) > 1e-3  # something was learned


@pytest.mark.parametrize("family", [marked_long(family, dict(QUICK)) for family in FAMILIES])
def test_what_is_saved_is_what_was_read_and_the_rows_added_are_the_mean(
    family: str, two: dict[str, Any], folder: Path
) -> None:
    on_disk: dict[str, Tensor] = load_file(folder / family / "model.safetensors")
    saved = two[f"{family} sharded"]["first"]
    assert set(saved) == set(on_disk)
    for name, weight in on_disk.items():
        rows = len(weight)
        if EMBEDDINGS.search(name):
            assert saved[name].shape[0] == rows + ADDED
            torch.testing.assert_close(saved[name][rows:], weight.mean(0).expand(ADDED, -1))
        assert torch.equal(saved[name][:rows], weight), name


def test_no_rank_ever_holds_a_whole_copy(two: dict[str, Any]) -> None:
    """Of 28 million weights in bf16, as shares; half of them is each rank's."""
    for loading, asking in two["memory"]["layers"]:
        assert 0.45 < loading < 0.75
        assert asking < 0.3
    for loading, asking in two["memory"]["whole"]:
        assert loading > 0.95 and asking < 0.1
    for loading, asking in two["memory"]["sharded"]:
        assert loading < 0.75 and asking > 0.9


@pytest.mark.parametrize("kind", FROZEN)
def test_ranks_may_ask_a_frozen_model_different_numbers_of_times(kind: str, two: dict[str, Any]) -> None:
    """Passes of more rows or fewer add up in another order: `tiny.ORDERS` of the terms of a score."""
    with torch.no_grad():
        states = tiny.backbone()(input_ids=FROZEN_ROWS.ids).last_hidden_state
    bound = tiny.ORDERS * float((states.abs() @ HEAD[0].abs()).max())
    expected = two["frozen whole"][0][:6]
    for scored in two[f"frozen {kind}"]:
        assert scored == pytest.approx(expected * 3, rel=0, abs=bound)
    assert max(expected) - min(expected) > 1000 * bound


@pytest.mark.parametrize("kind", ["sharded", "layers"])
def test_ranks_may_ask_a_trained_model_different_numbers_of_times(kind: str, two: dict[str, Any]) -> None:
    assert two[f"unequal {kind}"] == pytest.approx(two["unequal whole"], rel=8 * EPS)


# --- one process: what a load in parts refuses


@pytest.fixture
def alone() -> Iterator[Shards]:
    with tiny.one_rank():
        yield Shards(torch.float32, None)


def spoiled(path: Path, change: Any) -> str:
    tiny.causal_lm().save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(path)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_is_read_in_parts(family: str, tmp_path: Path, alone: Shards) -> None:
    """Experts that a file has one by one, tied weights, buffers: all as in a whole load."""
    tiny.causal_lm(family).save_pretrained(tmp_path)
    whole_one, parted = (
        load_causal_lm(str(tmp_path), torch.float32, tiny.VOCAB + ADDED, Loading(shards=shards))
        for shards in (None, alone)
    )
    assert {len(weight) for weight in parted.parameters() if not is_sharded(weight)} == {tiny.VOCAB + ADDED}
    with gather_weights(list(parted.parameters())):
        for name, value in whole_one.state_dict().items():
            assert torch.equal(parted.state_dict()[name], value), name


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(NORM), f"1 weights are missing ({NORM})"),
        (lambda weights: weights.update(extra=torch.zeros(3)), "1 weights are unexpected (extra)"),
        (lambda weights: weights.update({NORM: torch.zeros(3)}), f"1 weights have another shape ({NORM}: got [3]"),
        (lambda weights: weights[NORM].fill_(torch.nan), f"weight {NORM} has values that are not finite"),
    ],
)
def test_what_a_whole_load_refuses_a_load_in_parts_refuses_too(
    change: Any, message: str, tmp_path: Path, alone: Shards
) -> None:
    path = spoiled(tmp_path, change)
    for shards in (None, alone):
        with pytest.raises(UserError, match=re.escape(message)):
            load_causal_lm(path, torch.float32, tiny.VOCAB, Loading(shards=shards))


def test_loading_in_parts_draws_no_random_numbers_and_leaves_later_models_whole(tmp_path: Path, alone: Shards) -> None:
    path = spoiled(tmp_path, lambda weights: None)
    before = torch.random.get_rng_state()
    assert (
        sum(p.numel() for p in load_causal_lm(path, torch.float32, tiny.VOCAB, Loading(shards=alone)).parameters()) == 0
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    later = load_causal_lm(path, torch.float32, tiny.VOCAB)
    assert sum(p.numel() for p in later.parameters()) > 0

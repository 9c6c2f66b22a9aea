"""The scalar model, as reward model and as critic: where its number is read, how it is stored, what is refused."""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session, constants
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf import kernels
from rlhf.config.options import TrainingOptions
from rlhf.engine.export import save_scalar
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths.losses import pairwise_logistic
from rlhf.models import packing
from rlhf.models.head import ScoreHead
from rlhf.models.load import Loading
from rlhf.models.scalar import (
    HEAD,
    ScalarModel,
    can_join,
    load_scalar_model,
    new_scalar_model,
    read_head,
    score_joined,
    score_separately,
    scores,
    state_values,
)
from rlhf.models.traits import attention_options
from rlhf.types import JoinedPairs, Pairs, Sequences
from tests.support import tiny

ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
SCORE = tiny.ORDERS * 30
"""1.3e-4, of scores about 10: the sizes of a score's terms, |w_i h_i|, add up to 18 to 27 in these families."""
GRADIENT = 2 * tiny.ORDERS
"""of the norm of all gradients: the backward pass has as many sums again"""
families = pytest.mark.parametrize("family", tiny.FAMILIES)


def scalar_model(family: str, **changes: Any) -> ScalarModel:
    model = tiny.backbone(family, **changes)
    width = tiny.FAMILIES[family].get("word_embed_proj_dim", tiny.WIDTH)
    return ScalarModel(model, ScoreHead(torch.randn(1, width, generator=torch.Generator().manual_seed(0)))).eval()


@torch.no_grad()
def scored(model: ScalarModel, rows: Sequences) -> Tensor:
    return scores(model(rows), rows.mask)


@families
def test_no_padding_on_either_side_changes_a_scalar(family: str) -> None:
    model = scalar_model(family)
    with torch.no_grad():
        expected = model(ROWS)
        for left, right, fill in [(1, 0, tiny.EOS), (7, 0, tiny.PAD), (0, 5, tiny.EOS), (7, 5, 50)]:
            got = model(tiny.padded(ROWS, left, right, fill))[:, left : left + ROWS.ids.shape[1]]
            assert float((got - expected)[ROWS.mask].abs().max()) < SCORE


@families
def test_padding_changes_no_gradient(family: str) -> None:
    model = scalar_model(family)

    def gradients(rows: Sequences) -> list[Tensor]:
        return list(
            torch.autograd.grad(scores(model(rows), rows.mask).sum(), list(model.parameters()), allow_unused=True)
        )

    require_gradients(gradients(tiny.padded(ROWS, 7, 5)), gradients(ROWS))


def require_gradients(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """All together."""
    assert [each is None for each in actual] == [each is None for each in expected]
    got, want = (torch.cat([each.flatten() for each in one if each is not None]) for one in (actual, expected))
    assert float((got - want).norm()) < GRADIENT * float(want.norm())


@families
def test_the_score_is_that_of_the_row_alone_at_its_last_token(family: str) -> None:
    model = scalar_model(family)
    ids = ROWS.ids.clone()
    ids[:, 5] = tiny.EOS  # inside the prompt of one row, in the middle of the others
    ids[1, 19] = tiny.EOS
    score_joined = scored(model, tiny.padded(Sequences(ids, ROWS.mask, ROWS.loss_mask), 3, 4))
    for b, length in enumerate(ROWS.lengths.tolist()):
        with torch.no_grad():
            hidden = model.backbone(input_ids=ids[b : b + 1, :length]).last_hidden_state
            alone = (hidden[0, -1].double() @ model.score.weight[0].double()).item()
        assert score_joined[b].item() == pytest.approx(alone, rel=0, abs=SCORE)


@families
def test_bf16_scalars_are_near_fp32_and_padding_changes_little(family: str) -> None:
    model = scalar_model(family)
    with torch.no_grad():
        exact = model(ROWS)[ROWS.mask]
        model.to(torch.bfloat16)
        rounded = model(ROWS)[ROWS.mask]
        moved = model(tiny.padded(ROWS, 7, 5))[:, 7:-5][ROWS.mask]
    assert rounded.dtype == torch.float32
    # About 50 weights and states in a row are rounded, each by 2^-8 / sqrt(3) in the root of the mean square: 0.016.
    assert float((rounded - exact).norm() / exact.norm()) < 3 * math.sqrt(50 / 3) * 2**-8
    # Sums in fp32 in another order: a last state now and then is rounded to its other neighbour.
    assert float((moved - rounded).norm() / exact.norm()) < 2**-8


def test_values_are_read_one_token_before_the_one_they_judge() -> None:
    """P = 3, T = 2: the state of the first response token ends at column 2, of the second at column 3."""
    scalars = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])
    assert state_values(scalars, 3).tolist() == [[2.0, 3.0]]
    mask = torch.tensor([[True, True, True, True, False]])
    assert scores(scalars, mask).tolist() == [3.0]


# --- stored and loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a saved reward model of every family."""
    folder = tmp_path_factory.mktemp("rewards")
    with tiny.one_rank():
        for family in tiny.FAMILIES:
            engine = Engine(scalar_model(family), TrainingOptions(dtype="fp32"), 1)
            (folder / family).mkdir()
            save_scalar(engine, None, tiny.tokenizer(), folder / family)
        yield folder


@families
def test_saved_and_loaded_it_gives_the_same_bits(saved: Path, family: str) -> None:
    loaded = load_scalar_model(str(saved / family), torch.float32, tiny.VOCAB)
    assert torch.equal(scored(tiny.unpacked(loaded), ROWS), scored(scalar_model(family), ROWS))
    assert not loaded.training


@families
def test_transformers_own_classifier_pools_the_same_score(saved: Path, family: str) -> None:
    """It pools at the last id that is not its pad token and looks at no mask."""
    attention = attention_options(tiny.config_of(family))
    theirs = AutoModelForSequenceClassification.from_pretrained(saved / family, num_labels=1, **attention).eval()
    pad = AutoTokenizer.from_pretrained(saved / family).pad_token_id
    assert theirs.config.pad_token_id == pad != theirs.config.eos_token_id
    assert theirs.config.architectures == [type(theirs).__name__]
    ids = ROWS.ids.clone()
    ids[1, 19] = tiny.EOS
    ids = ids.masked_fill(~ROWS.mask, pad)
    with torch.no_grad():
        pooled = theirs(input_ids=ids, attention_mask=ROWS.mask.long()).logits.squeeze(1)
    assert float((pooled - scored(scalar_model(family), Sequences(ids, *ROWS.tensors()[1:]))).abs().max()) < SCORE


@pytest.mark.usefixtures("saved")  # which holds the process group
@pytest.mark.parametrize("stage", [0, 3])
def test_the_head_of_a_bf16_model_stays_fp32_in_its_file(stage: Any, tmp_path: Path) -> None:
    weight = 3.0 * torch.randn(1, tiny.WIDTH, generator=torch.Generator().manual_seed(0))
    model = ScalarModel(tiny.backbone().to(torch.bfloat16), ScoreHead(weight, torch.bfloat16))
    engine = Engine(model, TrainingOptions(dtype="bf16", zero_stage=stage), 1)
    save_scalar(engine, None, tiny.tokenizer(), tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")[HEAD], weight)
    ours = tiny.unpacked(load_scalar_model(str(tmp_path), torch.bfloat16, tiny.VOCAB))
    assert torch.equal(ours.score.exact, weight)
    # The classifier of transformers takes the dtype of the config for all weights: equal but for bf16's rounding of the
    # weight, of the product, and of states that it computes in another order.
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert {weight.dtype for weight in theirs.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        pooled = theirs(input_ids=ROWS.ids.masked_fill(~ROWS.mask, tiny.PAD), attention_mask=ROWS.mask.long()).logits
        states = ours.backbone(input_ids=ROWS.ids).last_hidden_state[range(3), ROWS.lengths - 1]
    assert ((pooled.squeeze(1) - scored(ours, ROWS)).abs() <= 2**-7 * (states.abs().float() @ weight[0].abs())).all()


@families
def test_a_new_one_has_the_language_model_s_backbone(tmp_path: Path, family: str) -> None:
    lm = tiny.causal_lm(family)
    lm.save_pretrained(tmp_path)
    model = new_scalar_model(str(tmp_path), torch.float32, tiny.VOCAB)
    with torch.no_grad():
        states = lm(input_ids=ROWS.ids, output_hidden_states=True).hidden_states[-1]
        ours = model.backbone(input_ids=ROWS.ids).last_hidden_state
    # OPT's head projects down first, outside of what transformers calls its hidden states.
    if states.shape == ours.shape:
        torch.testing.assert_close(ours, states)
    assert {name: weight.shape for name, weight in model.score.named_parameters()} == {"weight": (1, ours.shape[-1])}


def test_a_new_head_is_small_noise_of_its_seed(tmp_path: Path) -> None:
    """N(0, 1 / sqrt(d + 1)): with d = 4096 the standard deviation is known to 1 / sqrt(2 d), about 1 %."""
    tiny.causal_lm("opt", word_embed_proj_dim=4096).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    weights = [
        new_scalar_model(str(tmp_path), torch.float32, tiny.VOCAB, Loading(seed)).score.weight for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert weights[0].std().item() * math.sqrt(4097) == pytest.approx(1.0, abs=0.05)
    assert abs(weights[0].mean().item()) < 4 / 4096


# --- refused


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_scalar_model(str(path), torch.float32, tiny.VOCAB)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def edited(saved: Path, tmp_path: Path, **changes: Tensor | None) -> Path:
    """A copy of the Llama reward model with some weights replaced, or (None) left out."""
    source = saved / "llama"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    state = {**load_file(copy / "model.safetensors"), **{name.replace("__", "."): x for name, x in changes.items()}}
    weights = {name: value for name, value in state.items() if value is not None}
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny.config_of("llama")).save_pretrained(tmp_path)
    assert "no trained head" in refusal(tmp_path) and "score.weight" in refusal(tmp_path)


def test_several_labels_are_refused(saved: Path, tmp_path: Path) -> None:
    path = edited(saved, tmp_path, score__weight=torch.ones(3, tiny.WIDTH))
    assert "3 labels, expected 1" in refusal(path) and f"classifier,model={path},label=NAME" in refusal(path)


def test_a_head_of_another_width_is_refused(saved: Path, tmp_path: Path) -> None:
    path = edited(saved, tmp_path, score__weight=torch.ones(1, 8))
    assert HEAD in refusal(path) and "8" in refusal(path) and "32" in refusal(path)


def test_a_head_with_nan_is_refused(saved: Path, tmp_path: Path) -> None:
    path = edited(saved, tmp_path, score__weight=torch.full((1, tiny.WIDTH), math.nan))
    assert HEAD in refusal(path) and "not finite" in refusal(path)


def test_a_model_of_the_hub_has_its_head_read_from_the_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, whatever proxies and certificates there are: nothing of the network is touched."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    close_session()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    repository = tmp_path / "models--someone--reward"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(saved / "llama", repository / "snapshots" / "abc")
    assert torch.equal(read_head("someone/reward"), read_head(str(saved / "llama")))
    with pytest.raises(UserError, match="someone/else"):
        read_head("someone/else")


# --- pairs in one row

LENGTHS = [(3, 5, 2), (9, 1, 7), (1, 4, 4), (0, 6, 3), (2, 1, 1), (20, 3, 9)]
"""tokens that both sides begin with, and of each side alone"""


def pairs() -> Pairs:
    draw = torch.Generator().manual_seed(0)
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for common, *own in LENGTHS:
        start = torch.randint(4, tiny.VOCAB, (common,), generator=draw)
        for side, length in zip(sides, own, strict=True):
            side.append(torch.cat([start, torch.randint(4, tiny.VOCAB, (length,), generator=draw)]))
    sides[0].append(sides[0][0])  # equal sides
    sides[1].append(sides[0][0])
    sides[0].append(sides[0][1])  # one side begins the other
    sides[1].append(sides[0][1][:-2])
    return Pairs(*(right_padded(side) for side in sides))


def right_padded(rows: list[Tensor]) -> Sequences:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return Sequences(ids, mask, mask)


@families
def test_pairs_in_one_row_have_the_scores_and_gradients_of_two(family: str) -> None:
    """Or the model is one that is known not to keep the sides apart: no positions, a window shorter than the rows."""
    model, rows = scalar_model(family), pairs()
    able = can_join(model, rows, int(rows.lengths.max()))
    assert able == (family not in ("bloom", "gpt_neo", "mistral", "gemma2"))
    if not able:
        return
    results = {}
    for pair_scores in (score_separately, score_joined):
        scored = pair_scores(model, rows).scores
        loss = pairwise_logistic(*scored.unbind(1))
        results[pair_scores] = (scored, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert float((results[score_joined][0] - results[score_separately][0]).abs().max()) < SCORE
    require_gradients(results[score_joined][1], results[score_separately][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_second_side_sees_the_first_takes_no_pairs_in_one_row(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of the first sides are right: over both, the error is that of this very mistake over sqrt(2)."""
    model, forward = scalar_model("llama").to(dtype), ScalarModel.forward

    def seeing(self: ScalarModel, rows: Sequences | JoinedPairs) -> Tensor:
        joined = isinstance(rows, JoinedPairs)
        return forward(self, replace(rows, branch=torch.zeros_like(rows.branch)) if joined else rows)

    assert can_join(model, pairs(), 64)
    monkeypatch.setattr(ScalarModel, "forward", seeing)
    assert not can_join(model, pairs(), 64)


def test_a_window_as_long_as_the_longest_side_cuts_no_pair_in_one_row() -> None:
    rows = pairs()
    longest = int(rows.lengths.max())
    model = scalar_model("mistral", sliding_window=longest)
    kernels.install(model.backbone)
    packing.detect_support(model.backbone, unsharded=True)
    joined = rows.joined()
    assert joined.lengths.tolist() == rows.lengths.tolist() and joined.mask.sum(1).max() > longest
    assert can_join(model, rows, longest) and packing.packs_rows(model.backbone, joined)
    with torch.no_grad():
        gap = score_joined(model, rows).scores - score_separately(model, rows).scores
    assert float(gap.abs().max()) < SCORE
    assert not can_join(model, rows, longest + 1)


def test_what_pairs_begin_with_stands_once() -> None:
    rows = pairs()
    joined = rows.joined()
    alone = [sum(lengths) for lengths in LENGTHS] + [8 + 1, 10 + 1]
    assert joined.mask.sum(1).tolist() == alone
    assert int(joined.positions.max()) < max(rows.chosen.ids.shape[1], rows.rejected.ids.shape[1])
    for b, (common, first, second) in enumerate(LENGTHS):
        assert joined.branch[b, : alone[b]].tolist() == [0] * common + [1] * first + [2] * second
        assert joined.positions[b, common + first] == common

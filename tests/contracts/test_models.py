"""Every family of language model, seen as a policy: what pads it, stores it or shares its batch changes nothing.

The oracle is the plain transformers model: a forward pass over one unpadded row, its own loss, a fresh process.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from rlhf.config.options import TrainingOptions
from rlhf.engine.export import save_policy
from rlhf.engine.training import Engine
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from rlhf.types import Sequences
from tests.support import forked, tiny

ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
families = pytest.mark.parametrize("family", tiny.FAMILIES)


@torch.no_grad()
def logprobs(policy: Policy, rows: Sequences, temperature: float = 1.0) -> Tensor:
    return policy(rows, temperature).logprobs


def greatest(difference: Tensor) -> float:
    return float(difference.abs().max())


@families
def test_no_padding_on_either_side_changes_anything(family: str) -> None:
    policy = Policy(tiny.causal_lm(family))
    with torch.no_grad():
        expected = policy(ROWS, entropy="watched")
        for left, right, fill in [(1, 0, tiny.EOS), (7, 0, tiny.PAD), (0, 5, tiny.EOS), (7, 5, 50)]:
            got = policy(tiny.padded(ROWS, left, right, fill), entropy="watched")
            for value, wanted in zip(got[:2], expected[:2], strict=True):  # log-probs and entropies
                inside = value[:, left : left + ROWS.ids.shape[1]]
                assert greatest(inside - wanted) < 1e-5
                assert value.count_nonzero() == inside.count_nonzero() == ROWS.loss_mask.sum()


@families
def test_a_row_does_not_see_its_neighbours(family: str) -> None:
    policy = Policy(tiny.causal_lm(family))
    together = logprobs(policy, ROWS)
    for b in range(len(ROWS)):
        alone = logprobs(policy, ROWS[b : b + 1].trimmed())
        torch.testing.assert_close(together[b, : alone.shape[1]], alone[0], rtol=1e-6, atol=1e-6)


@families
def test_logprobs_are_the_negative_cross_entropy_of_the_plain_model(family: str) -> None:
    model = tiny.causal_lm(family)
    got = logprobs(Policy(model), ROWS)
    with torch.no_grad():
        for b, length in enumerate(ROWS.lengths.tolist()):
            ids, loss_mask = ROWS.ids[b : b + 1, :length], ROWS.loss_mask[b : b + 1, :length]
            output = model(input_ids=ids, labels=ids.masked_fill(~loss_mask, -100))
            assert got[b].sum() / loss_mask.sum() == pytest.approx(-output.loss.item(), abs=1e-5)
            each = -F.cross_entropy(output.logits[0, :-1].double(), ids[0, 1:], reduction="none")
            assert greatest(got[b, 1:length] - each * loss_mask[0, 1:]) < 1e-5


def gradients(policy: Policy, rows: Sequences) -> dict[str, Tensor]:
    policy.zero_grad()
    policy(rows).logprobs.sum().backward()
    return {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}


@families
def test_padding_changes_no_gradient(family: str) -> None:
    policy = Policy(tiny.causal_lm(family))
    expected, got = gradients(policy, ROWS), gradients(policy, tiny.padded(ROWS, 7, 5))
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-4, msg=name)


@families
def test_rows_without_a_token_that_counts_give_zeros(family: str) -> None:
    policy = Policy(tiny.causal_lm(family))
    nothing = Sequences(ROWS.ids, ROWS.mask, torch.zeros_like(ROWS.mask))
    assert not logprobs(policy, nothing).any()
    assert not any(gradient.any() for gradient in gradients(policy, nothing).values())


@families
def test_temperature_divides_the_logits(family: str) -> None:
    model = tiny.causal_lm(family)
    rows = ROWS[1:2]
    with torch.no_grad():
        exact = (model(input_ids=rows.ids).logits.double() / 0.7).log_softmax(-1)
        outputs = [Policy(model)(rows, 0.7, entropy=kind) for kind in ("none", "watched", "trained")]
    mask = rows.loss_mask[:, 1:]
    expected = exact[:, :-1].gather(-1, rows.ids[:, 1:, None]).squeeze(-1)
    for got, entropy, _ in outputs:
        assert greatest((got[:, 1:] - expected)[mask]) < 1e-5
        assert entropy is None or greatest((entropy[:, 1:] + (exact.exp() * exact).sum(-1)[:, :-1])[mask]) < 1e-5
    assert [entropy is None for _, entropy, _ in outputs] == [True, False, False]


@families
def test_bf16_is_near_fp32_and_padding_still_changes_little(family: str) -> None:
    policy = Policy(tiny.causal_lm(family))
    exact = logprobs(policy, ROWS)
    policy.to(torch.bfloat16)
    rounded = logprobs(policy, ROWS)
    assert rounded.dtype == torch.float32
    assert float((rounded - exact).abs().sum() / ROWS.loss_mask.sum()) < 5e-2
    assert greatest(logprobs(policy, tiny.padded(ROWS, 7, 5))[:, 7:-5] - rounded) < 5e-3


# --- out of an engine, into a directory, and back


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a saved policy of every family, and beside each what its engine said."""
    folder = tmp_path_factory.mktemp("families")
    tokenizer = tiny.tokenizer()
    with tiny.one_rank():
        for family in tiny.FAMILIES:
            policy = Policy(tiny.causal_lm(family, eos_token_id=5))  # the tokenizer knows better
            policy.lm.generation_config.top_p = 0.6  # without do_sample, as Llama 2 has it: not savable
            engine = Engine(policy, TrainingOptions(dtype="fp32"), 1)
            save_policy(engine, None, tokenizer, folder / family)
            with engine.inference() as policy:
                logits = policy.lm(input_ids=ROWS.ids).logits
            torch.save({"logits": logits, "logprobs": logprobs(policy, ROWS)}, folder / f"{family}.pt")
        yield folder


IN_A_FRESH_PROCESS = """
import sys
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, ids = Path(sys.argv[1]), torch.load(sys.argv[2])
for saved in sorted(folder.glob("*.pt")):
    capped = {"attn_implementation": "eager"} if saved.stem == "gemma2" else {}  # as transformers chooses from 5.24 on
    model = AutoModelForCausalLM.from_pretrained(saved.with_suffix(""), **capped)
    tokenizer = AutoTokenizer.from_pretrained(saved.with_suffix(""))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    ends = (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id)
    dialogues = [[{"role": "user", "content": text}] for text in ("w5 w6 w7 w8 w9", "w10")]
    options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    batch = tokenizer.apply_chat_template(dialogues, padding=True, **options)
    alone = tokenizer.apply_chat_template(dialogues[1], **options)
    torch.manual_seed(0)
    rows = model.generate(**batch, do_sample=True, max_new_tokens=30, num_return_sequences=32)[:, 6:]
    first = model.generate(**batch, do_sample=False, max_new_tokens=1)[1, -1]
    ended = (rows == 2).cumsum(1) - (rows == 2).long() > 0  # after the first EOS
    right = [bool(ended.any()), bool((rows[ended] == 0).all())]
    right.append(bool(first == model.generate(**alone, do_sample=False, max_new_tokens=1)[0, -1]))
    print(saved.stem, model.dtype, torch.equal(logits, torch.load(saved)["logits"]), *ends, *right)
"""


def test_a_fresh_process_without_this_project_gives_the_same_bits(saved: Path, tmp_path: Path) -> None:
    """The directory alone: same logits; `generate` ends at EOS, fills with padding, and pads prompts on the left."""
    torch.save(ROWS.ids, tmp_path / "ids.pt")
    done = forked.python("-c", IN_A_FRESH_PROCESS, str(saved), str(tmp_path / "ids.pt"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = {f"{family} torch.float32 True 2 2 2 True True True" for family in tiny.FAMILIES}
    assert set(done.stdout.splitlines()) == expected


@families
def test_the_next_stage_loads_the_same_policy(saved: Path, family: str) -> None:
    model = load_causal_lm(str(saved / family), torch.float32, len(tiny.tokenizer()))
    assert torch.equal(logprobs(Policy(tiny.unpacked(model)), ROWS), torch.load(saved / f"{family}.pt")["logprobs"])
    dropouts = {name: value for name, value in model.config.to_dict().items() if "drop" in name and value}
    assert not dropouts


@families
def test_tied_weights_are_stored_once(saved: Path, family: str) -> None:
    model = tiny.causal_lm(family)
    with safe_open(saved / family / "model.safetensors", framework="pt") as file:
        count = sum(file.get_tensor(name).numel() for name in set(file.keys()))
    assert count == sum(weight.numel() for weight in model.parameters())

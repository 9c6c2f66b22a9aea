"""Where a reward model is read: the oracle is transformers' classifier on `apply_chat_template` of the dialogue."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AddedToken, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from data.batches import pair_batch
from data.config import DataOptions
from data.prepare.encode import Preference, Recipe, RowEncoder
from rlhf import rewards
from rlhf.models import reading
from rlhf.models.scalar import ScalarModel, load_scalar_model, score_joined, score_separately
from rlhf.text.dialogues import Template
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.types import Message, Row, SampledRollout
from step2_reward.pair_scores import Reader
from tests.support import texts, tiny

TURN = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
START = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
TEMPLATES = {
    "chatml": TURN + "{{ '\\n' }}{% endfor %}" + START,
    "phi": TURN
    + "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + "{% else %}{{ eos_token }}{% endif %}",
    "llama_3": TURN + "{% endfor %}" + START,
    "llama_2": "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] }}"
    "{{ ' [/INST]' }}{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}",
    "glm": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}{% endfor %}" + START,
}
"""in the shape of each family's"""
ROWS = tuple(
    Row((Message("user", f"the {word} the"),), chosen, rejected=rejected)
    for word, chosen, rejected in (("a", "yes the", "no"), ("bc", "the", "the the"), ("d", "x y z", "the."))
)
EXACT = 1e-5
"""some hundred operations in fp32 of numbers of the order of 1"""


def tokenizer_of(template: str, pad: str = "<pad>", rstrip: bool = False) -> PreTrainedTokenizerBase:
    tokenizer = texts.byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token=pad)
    added = [AddedToken(text, special=True, rstrip=rstrip) for text in ("<|im_end|>", "<|im_start|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def made_elsewhere(folder: Path, tokenizer: PreTrainedTokenizerBase, **values: Any) -> str:
    """A classifier as transformers saves it, with random weights."""
    config = tiny.config_of("llama", vocab_size=len(tokenizer) + 1, num_labels=1, **values)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, 0.0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def plain_score(path: str, prompt: tuple[Message, ...], response: str | None) -> float:
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [{"role": m.role, "content": m.content} for m in (*prompt, Message("assistant", response or ""))]
    ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")["input_ids"]
    return float(AutoModelForSequenceClassification.from_pretrained(path).eval()(input_ids=ids).logits)


def plain_scores(path: str) -> Tensor:
    """[N, 2]"""
    return torch.tensor([[plain_score(path, r.prompt, side) for side in (r.response, r.rejected)] for r in ROWS])


def pairs_of(template: Template) -> list[Preference]:
    encoded = RowEncoder(Recipe("reward"), template, DataOptions(data_path=("none",)))(ROWS)
    return [each[0] for each in encoded if isinstance(each[0], Preference)]


def prepared(path: str) -> tuple[Template, ScalarModel]:
    tokenizer = prepare_tokenizer(load_tokenizer(path), "auto")
    return Template(tokenizer), load_scalar_model(path, torch.float32, id_count(tokenizer))


def rollout(template: Template, ended: bool = True, end: int | None = None) -> SampledRollout:
    """The chosen responses, sampled as a policy would: with the end token, and nothing after it."""
    prompts = [template.prompt_ids(row.prompt) for row in ROWS]
    answers = [template.response_ids(row.response or "")[:-1] for row in ROWS]
    last = [template.tokenizer.eos_token_id if end is None else end] if ended else []
    answers = [answer + last for answer in answers]
    width, length = max(map(len, prompts)), max(map(len, answers))
    left = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    right = torch.tensor([ids + [0] * (length - len(ids)) for ids in answers])
    prompt_mask = torch.arange(width) >= width - torch.tensor([len(ids) for ids in prompts])[:, None]
    mask = torch.arange(length) < torch.tensor([len(ids) for ids in answers])[:, None]
    return SampledRollout(left, prompt_mask, right, mask, torch.zeros(mask.shape), torch.tensor([ended] * 3), ROWS)


# --- made elsewhere


PADDING: list[dict[str, Any]] = [{}, {"pad_token_id": None}, {"pad": "</s>"}]
FRAMES = list(itertools.product(TEMPLATES, (False, True)))


@pytest.mark.parametrize(
    ("template", "rstrip", "values"),
    [(*frame, PADDING[(i + i // len(TEMPLATES)) % len(PADDING)]) for i, frame in enumerate(FRAMES)],
)
def test_a_model_from_elsewhere_is_read_where_transformers_reads_it(
    template: str, rstrip: bool, values: dict[str, Any], tmp_path: Path
) -> None:
    """With padding that is the end token, transformers reads the token before it."""
    raw = tokenizer_of(template, values.get("pad", "<pad>"), rstrip)
    path = made_elsewhere(tmp_path, raw, pad_token_id=values.get("pad_token_id", raw.pad_token_id))
    own, model = prepared(path)
    expected = plain_scores(path)
    how = reading.reading_of(path, own)
    assert how.foreign
    got = Reader(model, how, own).scores(pairs_of(own), 8)
    torch.testing.assert_close(got, expected.double(), rtol=0, atol=EXACT)
    # as a score source of step 3, with the policy's tokenizer and with another one
    for policy in (own, Template(prepare_tokenizer(texts.with_chat_tokens(texts.byte_tokenizer()), "chatml"))):
        context = rewards.Context(policy.tokenizer, torch.device("cpu"), torch.float32, path, 8)
        scores = rewards.open_source("learned", context)(rewards.as_samples(rollout(policy), policy.tokenizer))
        torch.testing.assert_close(scores, expected[:, 0], rtol=0, atol=EXACT)


def test_a_response_with_another_end_is_read_as_the_template_ends_it(tmp_path: Path) -> None:
    path = made_elsewhere(tmp_path, tokenizer_of("chatml"), pad_token_id=None)
    own, _ = prepared(path)
    context = rewards.Context(own.tokenizer, torch.device("cpu"), torch.float32, path, 8)
    other = own.tokenizer.convert_tokens_to_ids("</s>")
    scores = rewards.open_source("learned", context)(rewards.as_samples(rollout(own, end=other), own.tokenizer))
    torch.testing.assert_close(scores, plain_scores(path)[:, 0], rtol=0, atol=EXACT)


def test_the_line_has_both_scores_and_a_difference_is_a_warning(tmp_path: Path) -> None:
    path = made_elsewhere(tmp_path, tokenizer_of("chatml"), pad_token_id=None)
    own, model = prepared(path)
    how = reading.reading_of(path, own)
    line = reading.compare("it", path, model, how, own)
    assert "warning" not in line and line.count(f"{plain_score(path, reading.PROBE[:1], 'It is four.'):.4g}") == 2
    assert "warning" in reading.compare("it", path, model, reading.Reading(own.ending[:1]), own)
    line = reading.describe("it", how, own.tokenizer)
    assert line is not None and "read at '\\n'" in line


# --- ours


@pytest.mark.parametrize("template", ["chatml", "phi", "llama_3", "llama_2"])
def test_ours_are_trained_where_transformers_reads_them(template: str, tmp_path: Path) -> None:
    """The rows of training, joined or each by itself, packed or padded, score as in a plain classifier."""
    tokenizer = prepare_tokenizer(tokenizer_of(template), "auto")
    path = made_elsewhere(tmp_path, tokenizer, pad_token_id=tokenizer.pad_token_id)
    own, model = prepared(path)
    reading.set_reading(model.backbone.config, own)
    content = json.loads((tmp_path / "config.json").read_text()) | {reading.KEY: model.backbone.config.score_ending}
    (tmp_path / "config.json").write_text(json.dumps(content))
    how = reading.reading_of(path, own)
    assert (how.ending, how.foreign) == (own.ending, False)
    pairs = pair_batch(pairs_of(own), tokenizer.pad_token_id)
    expected = plain_scores(path)
    with torch.no_grad():
        for way in (score_separately, score_joined):
            torch.testing.assert_close(way(model, pairs).scores, expected, rtol=0, atol=EXACT)
        torch.testing.assert_close(score_separately(tiny.unpacked(model), pairs).scores, expected, rtol=0, atol=EXACT)
    context = rewards.Context(own.tokenizer, torch.device("cpu"), torch.float32, path, 8)
    scores = rewards.open_source("learned", context)(rewards.as_samples(rollout(own), own.tokenizer))
    torch.testing.assert_close(scores, expected[:, 0], rtol=0, atol=EXACT)


@pytest.mark.parametrize("template", ["human_assistant", "plain"])
def test_a_template_without_an_end_gets_ours(template: str, tmp_path: Path) -> None:
    tokenizer = prepare_tokenizer(texts.byte_tokenizer(), template)
    assert Template(tokenizer).ending == (tokenizer.eos_token_id,)
    how = reading.reading_of(made_elsewhere(tmp_path, tokenizer), Template(tokenizer))
    assert how == reading.Reading((tokenizer.eos_token_id,))


def test_a_cut_response_has_no_ending(tmp_path: Path) -> None:
    path = made_elsewhere(tmp_path, tokenizer_of("chatml"), pad_token_id=None)
    own, _ = prepared(path)
    context = rewards.Context(own.tokenizer, torch.device("cpu"), torch.float32, path, 8)
    cut = rollout(own, ended=False)
    scores = rewards.open_source("learned", context)(rewards.as_samples(cut, own.tokenizer))
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    for b, score in enumerate(scores.tolist()):
        ids = [*cut.prompt_ids[b][cut.prompt_mask[b]].tolist(), *cut.response_tokens()[b]]
        with torch.no_grad():
            assert score == pytest.approx(float(plain(input_ids=torch.tensor([ids])).logits), abs=EXACT)

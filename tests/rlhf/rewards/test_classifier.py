"""A text classifier as a source. The oracle is the model of transformers itself, asked about one text at a time."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from rlhf import rewards
from rlhf.errors import UserError
from rlhf.rewards import classifier
from rlhf.types import Samples
from tests.rlhf.rewards.responses import context, reward_model, rollout, samples
from tests.support import tiny

TEXTS = ("w4 w5 w6", "w9", "w7 w8 w9 w10 w11 w12")


def encoder(path: Path, labels: int = 2, **changes: Any) -> PreTrainedModel:
    """A tiny BERT of two labels, whose tokenizer wraps a text in special tokens and has no BOS or EOS."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <unk>", special_tokens=[("<s>", 1), ("<unk>", 3)]
    )
    wrapping_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", unk_token="<unk>", cls_token="<s>"
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    words = {"vocab_size": tiny.VOCAB, "max_position_embeddings": 16, "pad_token_id": 0}
    config = AutoConfig.for_model("bert", **sizes, **words, num_labels=labels, initializer_range=0.5, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(path)
    wrapping_tokenizer.save_pretrained(path)
    return model


def scores_from(spec: str, folder: Path, responses: tuple[str, ...] = TEXTS, micro_batch_size: int = 2) -> list[float]:
    s: Samples = replace(samples(rollout()), responses=responses, answers=responses)
    source = rewards.open_source(f"classifier,model={folder}{spec}", context(folder, micro_batch_size))
    scores: list[float] = source(s).tolist()
    return scores


@torch.no_grad()
def alone(model: PreTrainedModel, text: str, wrapped: Callable[[list[int]], list[int]]) -> list[float]:
    ids = wrapped([int(word[1:]) for word in text.split()])
    logits: list[float] = model(input_ids=torch.tensor([ids])).logits[0].double().tolist()
    return logits


def bert(ids: list[int]) -> list[int]:
    return [1, *ids, 3]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_log_odds_of_one_of_two(tmp_path: Path, micro_batch_size: int) -> None:
    model = encoder(tmp_path)
    scores = scores_from(",label=1", tmp_path, micro_batch_size=micro_batch_size)
    for text, score in zip(TEXTS, scores, strict=True):
        no, yes = alone(model, text, bert)
        assert score == pytest.approx(yes - no, abs=1e-5)


def test_log_odds_of_one_of_three_and_its_logit(tmp_path: Path) -> None:
    model = encoder(tmp_path, labels=3)
    odds, logits = scores_from(",label=2", tmp_path), scores_from(",label=2,output=logit", tmp_path)
    for text, score, logit in zip(TEXTS, odds, logits, strict=True):
        z = alone(model, text, bert)
        p = math.exp(z[2]) / sum(map(math.exp, z))
        assert score == pytest.approx(math.log(p / (1 - p)), abs=1e-5) and logit == pytest.approx(z[2], abs=1e-5)


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (3, "multi_label_classification")])
def test_labels_that_do_not_exclude_each_other_are_their_own_odds(
    labels: int, problem: str | None, tmp_path: Path
) -> None:
    """sigmoid(z) = p, so log(p / (1 - p)) = z."""
    model = encoder(tmp_path, labels=labels, problem_type=problem)
    scores = scores_from(",label=0" if labels > 1 else "", tmp_path)
    assert scores == pytest.approx([alone(model, text, bert)[0] for text in TEXTS], abs=1e-5)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_in_bf16_the_head_is_in_fp32(kind: str, tmp_path: Path) -> None:
    """The fp64 product of the same bf16 states and the file's weight, to n eps sum |w_i h_i|."""
    model = encoder(tmp_path) if kind == "encoder" else reward_model(tmp_path, tiny.tokenizer(), labels=2)
    linear, name = (model.classifier, "classifier") if kind == "encoder" else (model.score, "score")
    loaded = classifier.load(str(tmp_path), narrow := replace(context(tmp_path), dtype=torch.bfloat16))
    assert {weight.dtype for weight in loaded.model.base_model.parameters()} == {torch.bfloat16}
    passes: list[tuple[Tensor, Tensor]] = []
    getattr(loaded.model, name).register_forward_hook(lambda _, inputs, outputs: passes.append((inputs[0], outputs)))
    assert classifier.all_logits(loaded, [("", text) for text in TEXTS], narrow).dtype == torch.float32
    for states, logits in passes:
        weight = linear.weight.detach().double()
        bias = torch.zeros(2) if linear.bias is None else linear.bias.detach()
        exact = states.double() @ weight.mT + bias
        size = states.double().abs() @ weight.mT.abs() + bias.abs()
        bound = (weight.shape[1] + 1) * torch.finfo(torch.float32).eps * size
        assert torch.equal(states, states.to(torch.bfloat16).float())
        assert ((logits - exact).abs() <= bound).all()
        assert (exact.to(torch.bfloat16) - exact).abs().max() > 10 * bound.max()


def test_a_label_by_its_name(tmp_path: Path) -> None:
    encoder(tmp_path, id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1})
    assert scores_from(",label=POSITIVE", tmp_path) == scores_from(",label=1", tmp_path)
    negative = scores_from(",label=NEGATIVE", tmp_path)
    assert negative == pytest.approx([-score for score in scores_from(",label=1", tmp_path)])


@pytest.mark.parametrize("pad", [tiny.PAD, tiny.EOS, None])
def test_a_decoder_that_looks_for_padding_by_id(pad: int | None, tmp_path: Path) -> None:
    """Without an id for padding it could not tell where a padded text ends."""
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None if pad is None else tokenizer.convert_ids_to_tokens(pad)
    model = reward_model(tmp_path, tokenizer, labels=2, pad_token_id=pad)
    for text, score in zip(TEXTS, scores_from(",label=1", tmp_path, micro_batch_size=8), strict=True):
        no, yes = alone(model, text, lambda ids: ids)
        assert score == pytest.approx(yes - no, abs=1e-5)


def test_an_empty_response_is_read_too(tmp_path: Path) -> None:
    model = reward_model(tmp_path / "decoder", tiny.tokenizer(), labels=2, pad_token_id=tiny.PAD)
    no, yes = alone(model, "", lambda ids: [tiny.BOS])
    assert scores_from(",label=1", tmp_path / "decoder", ("", "", ""))[0] == pytest.approx(yes - no, abs=1e-5)
    model = encoder(tmp_path / "encoder")
    no, yes = alone(model, "", bert)
    assert scores_from(",label=1", tmp_path / "encoder", ("", "w4", ""))[0] == pytest.approx(yes - no, abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("", ["got no label", "0=LABEL_0, 1=LABEL_1"]),
        (",label=2", ["label 2", "0=LABEL_0, 1=LABEL_1"]),
        (",label=-1", ["label -1"]),
        (",label=LABEL_3", ["label 'LABEL_3'", "did you mean 'LABEL_"]),
        (",label=yes", ["label", "valid string, got True"]),
        (",label=1,output=odds", ["output", "log_odds"]),
    ],
)
def test_mistakes_are_one_line(spec: str, parts: list[str], tmp_path: Path) -> None:
    encoder(tmp_path)
    with pytest.raises(UserError) as caught:
        scores_from(spec, tmp_path)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


def test_a_text_beyond_the_context_is_refused(tmp_path: Path) -> None:
    encoder(tmp_path)
    with pytest.raises(UserError, match=r"has 17 tokens, expected 1 to 16.*--response-length"):
        scores_from(",label=1", tmp_path, ("w4", "w4", "w4 " * 15))


def test_a_prompt_beyond_the_context_loses_its_first_words(tmp_path: Path) -> None:
    """Of 16 tokens two are special, and three are the response's."""
    model = encoder(tmp_path)
    prompt = " ".join(f"w{i}" for i in range(4, 40)) + " "
    s = replace(samples(rollout()), prompts=(prompt,) * 3, responses=TEXTS, answers=TEXTS)
    source = rewards.open_source(f"classifier,model={tmp_path},label=1,with_prompt=true", context(tmp_path))
    for text, score in zip(TEXTS, source(s).tolist(), strict=True):
        no, yes = alone(model, " ".join((prompt + text).split()[-14:]), bert)
        assert score == pytest.approx(yes - no, abs=1e-5)


def test_a_language_model_has_no_trained_labels(tmp_path: Path) -> None:
    tiny.causal_lm("gpt2").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no weights score\.weight; expected a trained sequence classifier"):
        scores_from(",label=1", tmp_path)


def test_a_place_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        scores_from(",label=1", tmp_path / "no" / "thing")
    with pytest.raises(UserError, match="model: Field required"):
        rewards.open_source("classifier", context(tmp_path))

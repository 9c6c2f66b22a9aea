"""New tokens: which ones, their rows, what a stage trains and saves of them. A tiny corpus of Chinese proverbs."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlhf import adapters
from rlhf.chain import command, planning
from rlhf.engine.export import full_state
from rlhf.errors import UserError
from rlhf.models import new_rows
from rlhf.models.load import Loading, load_backbone, load_causal_lm
from rlhf.plan.forecast import whole_size
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer
from step1_sft import vocabulary
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING
from tests.support import tiny

ENGLISH = ["the quick brown fox jumps over the lazy dog", "a journey of a thousand miles begins with one step"] * 4
CHINESE = ["千里之行始于足下", "学而不思则罔思而不学则殆", "三人行必有我师", "温故而知新可以为师矣", "己所不欲勿施于人"]


def bpe(texts: list[str], size: int) -> Tokenizer:
    """Byte-level BPE: every text has ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An English model with tied weights and one with a head of its own, a Chinese tokenizer and corpus, and a list."""
    path = tmp_path_factory.mktemp("vocabulary")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe(ENGLISH, 300), eos_token="</s>")
    for name, tied in (("tied", True), ("untied", False)):
        changes = {
            "vocab_size": len(tokenizer) + 3,
            "tie_word_embeddings": tied,
            "eos_token_id": 0,
            "pad_token_id": None,
        }
        tiny.causal_lm("llama", **changes).save_pretrained(path / name)  # three rows have no token
        tokenizer.save_pretrained(path / name)
    bpe(CHINESE * 4, 400).save(str(path / "chinese.json"))
    texts = ({"text": "".join(three)} for three in itertools.product(CHINESE, repeat=3))
    (path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (path / "list.txt").write_text("千里\n学而\n</s>\nthe\n足下\n")
    return path


def with_both(before: Any, folder: Path) -> Any:
    listed = vocabulary.with_list(before, str(folder / "list.txt"))
    return vocabulary.with_tokens_of(listed, str(folder / "chinese.json"))


def test_only_what_the_tokenizer_divides_is_added_and_words_match_whole(folder: Path) -> None:
    before = load_tokenizer(str(folder / "tied"))
    listed = vocabulary.with_list(before, str(folder / "list.txt"))
    assert listed.convert_ids_to_tokens(list(range(len(before), len(listed)))) == ["千里", "学而", "足下"]
    both = with_both(before, folder)
    assert len(both) > len(listed) + 10
    for text in [*CHINESE, *ENGLISH, "other therein 千里 the"]:
        assert both.decode(both(text)["input_ids"]) == text
    old, new = vocabulary.tokens_per_character(before, both, CHINESE)
    assert old == pytest.approx(3) and new < 1  # three bytes a character
    english = vocabulary.tokens_per_character(before, both, ENGLISH)
    assert english[0] == english[1]
    words = Tokenizer(models.WordLevel({"cat": 0, "dog": 1}))
    words.save(str(folder / "words.json"))
    with_words = vocabulary.with_tokens_of(before, str(folder / "words.json"))
    cat = with_words.convert_tokens_to_ids("cat")
    assert cat >= len(before) and cat in with_words("a cat .")["input_ids"]
    assert cat not in with_words("concatenate")["input_ids"]
    with pytest.raises(UserError, match="every token is a token of the model already"):
        vocabulary.with_list(listed, str(folder / "list.txt"))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_new_row_is_the_mean_of_the_rows_of_its_pieces(folder: Path, name: str) -> None:
    before = load_tokenizer(str(folder / name))
    after = with_both(before, folder)
    pieces = vocabulary.pieces(before, after)
    assert sorted(pieces) == list(range(len(before), len(after))) and len(after) > 1.1 * len(before)
    start = AutoModelForCausalLM.from_pretrained(folder / name)
    model = load_causal_lm(str(folder / name), torch.float32, id_count(after), Loading(new_tokens=pieces))
    for layer, old in (
        (model.get_input_embeddings(), start.get_input_embeddings()),
        (model.get_output_embeddings(), start.get_output_embeddings()),
    ):
        assert torch.equal(layer.weight[: len(before)], old.weight[: len(before)])
        for new in (min(pieces), max(pieces)):
            ids = before(after.decode([new]))["input_ids"]
            torch.testing.assert_close(layer.weight[new], old.weight[ids].mean(0))
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (name == "tied")
    logits = model(input_ids=torch.tensor([[1, max(pieces)]])).logits
    assert logits[..., : len(after)].isfinite().all()


def with_trained_rows(folder: Path, name: str, adapter: str) -> tuple[Any, Any, vocabulary.Pieces]:
    """(a model with new rows, a copy of it with an adapter beside which they train, their pieces)."""
    before = load_tokenizer(str(folder / name))
    after = vocabulary.with_list(before, str(folder / "list.txt"))
    pieces = vocabulary.pieces(before, after)
    plain = load_causal_lm(str(folder / name), torch.float32, id_count(after), Loading(new_tokens=pieces))
    model = adapters.wrap(copy.deepcopy(plain), adapter)
    new_rows.train(model, pieces)
    return plain, model, pieces


def disturb(model: Any) -> None:
    """Move every trained weight."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_beside_an_adapter_only_the_new_rows_train(folder: Path, name: str) -> None:
    plain, model, pieces = with_trained_rows(folder, name, "lora,r=2")
    config = SFTConfig(model=str(folder / name), adapter="lora,r=2", add_tokens=str(folder / "list.txt"), dtype="fp32")
    planned = whole_size(FINE_TUNING.roles(config)[0])
    counts = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    assert planned.total == sum(n for n, _ in counts) and planned.trained == sum(n for n, trains in counts if trains)
    ids = torch.tensor([[5, max(pieces), 7, min(pieces)]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        disturb(model)
        expected = model(input_ids=ids).logits
    trained = {n.split(".")[-2] for n, w in model.named_parameters() if w.requires_grad and "lora" not in n}
    assert trained == {"trainable_tokens_delta"}
    state: dict[str, Tensor] = full_state(model, "lora,r=2")
    assert set(state) == set(plain.state_dict())
    changed = (state["model.embed_tokens.weight"] != plain.get_input_embeddings().weight).any(1).nonzero().flatten()
    assert changed.tolist() == sorted(pieces)
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_rows_beside_learned_scales_are_merged(folder: Path, name: str) -> None:
    plain, model, pieces = with_trained_rows(folder, name, "ia3")
    disturb(model)
    ids = torch.tensor([[5, max(pieces), 7, min(pieces)]])
    expected = model(input_ids=ids).logits
    plain.load_state_dict(full_state(model, "ia3"))
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=0, atol=1e-5)


def test_no_row_is_added_beside_an_adapter_of_rows(folder: Path) -> None:
    adapter = "trainable_tokens,token_indices=[5]"
    config = SFTConfig(model=str(folder / "tied"), adapter=adapter, add_tokens=str(folder / "list.txt"))
    words = "--add-tokens, --extend-tokenizer: got --adapter .*the new rows are trained with every adapter"
    with pytest.raises(UserError, match=words):
        vocabulary.extended_tokenizer(config, load_tokenizer(str(folder / "tied")))


@pytest.mark.parametrize("changes", [{}, {"adapter": "lora,r=4"}], ids=["full", "lora"])
def test_a_stage_trains_them_and_what_it_saves_is_whole(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "model": str(folder / "untied"), "data_path": [str(folder / "corpus.jsonl")], "objective": "text",
        "extend_tokenizer": str(folder / "chinese.json"), "output_dir": str(tmp_path), "dtype": "fp32",
        "max_length": 16, "batch_size": 4, "micro_batch_size": 4, "num_train_epochs": 3, "max_eval_rows": 16,
        "learning_rate": 3e-3,
        "max_prompt_length": 8, "sample_rows": 0, "data_split": (1, 0, 0), **changes,
    }  # fmt: skip
    FINE_TUNING.run(SFTConfig(**options))
    assert "tokens a character before" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "step1_sft/manifest.json").read_text())["metrics"]
    assert metrics["eval_perplexity"] < metrics["eval_perplexity_before"] / 2
    model = str(tmp_path / "step1_sft/model")
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    rows = plain.get_input_embeddings().num_embeddings
    assert rows == plain.config.vocab_size == plain.lm_head.out_features >= len(tokenizer)
    assert tokenizer.decode(tokenizer(CHINESE[0])["input_ids"]) == CHINESE[0]
    assert len(tokenizer(CHINESE[0])["input_ids"]) < len(CHINESE[0])
    assert (
        load_backbone(model, torch.float32, id_count(load_tokenizer(model))).get_input_embeddings().num_embeddings
        == rows
    )


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_plan_of_later_steps_has_the_new_rows(folder: Path, name: str, tmp_path: Path) -> None:
    """By hand: "千里", "学而" and "足下" are new, and the model has three rows without a token, so one row to add."""
    (folder / "four.txt").write_text("千里\n学而\n足下\n千里之行\n")
    model, output = str(folder / name), str(tmp_path)
    words = ["--actor-model", model, "--output-dir", output, "--sft.add-tokens", str(folder / "four.txt"),
             "--ppo.algorithm", "ppo", "--ppo.reward", "learned", "--steps", "1", "2", "3"]  # fmt: skip

    def totals(reward_model: str) -> dict[str, int]:
        argv = [*words, "--reward-model", reward_model]
        planned = [workload(options, "cpu") for options, workload in planning.workloads(command.read(argv)).values()]
        return {role.part.name: whole_size(role).total for each in planned for role in each.models}

    alone = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(model).parameters())
    matrices = 1 if name == "tied" else 2
    extended = alone + matrices * tiny.WIDTH
    own_head = 0 if name == "tied" else 303 * tiny.WIDTH  # a scalar model has one output in its place
    scalar = alone - own_head + tiny.WIDTH
    parameters = totals(model)
    assert parameters == {
        "policy": extended, "actor": extended, "reference": extended, "reward model": scalar,
        "critic": scalar + tiny.WIDTH,  # it reads the actor's ids, so it starts from the actor
    }  # fmt: skip
    assert totals(f"{output}/step1_sft/model") == parameters | {"reward model": scalar + tiny.WIDTH}

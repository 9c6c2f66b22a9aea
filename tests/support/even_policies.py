"""Small policies that differ in how often they sample words with even numbers, and a score source that counts those."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support import tiny

EVEN = (
    "def score(prompts, responses, **columns):\n"
    "    return [float(sum(int(w[1:]) % 2 == 0 for w in r.split() if w[1:].isdigit())) for r in responses]\n"
)


def write(folder: Path, gains: Mapping[str, float], rows: Iterable[Mapping[str, Any]]) -> None:
    """A model of each name, p.jsonl with the rows, and judge.py. Each gain multiplies the head's even rows again."""
    model = tiny.causal_lm()
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[tiny.EOS] *= 3
    for name, gain in gains.items():
        with torch.no_grad():
            head[4::2] *= gain
        model.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judge.py").write_text(EVEN)

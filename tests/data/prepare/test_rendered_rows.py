"""Rows that someone has rendered already are the rows of their messages, in every column where they stand."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.dataset import Recipe, open_datasets
from data.read.records import Phase
from rlhf.errors import UserError
from rlhf.text.tokenizer import prepare_tokenizer
from tests.support.texts import byte_tokenizer, with_chat_tokens

COUNT = 40
ASKED = [[{"role": "user", "content": f"Name the fox number {n % 20}."}] for n in range(COUNT)]
"""each twice, with two answers: one prompt is in one split, however it is written"""
ANSWERS = [f"It is {n} </b>." for n in range(COUNT)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return prepare_tokenizer(with_chat_tokens(byte_tokenizer()), "chatml")


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    ask = messages[-1]["role"] == "user"
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))


def opened(tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], recipe: Recipe, **options: Any) -> Any:
    path = Path(f"rows{len(list(Path().glob('rows*')))}.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares: dict[Phase, tuple[float, float, float]] = {"sft": (1, 0, 0), "reward": (0, 1, 0), "ppo": (0, 0, 1)}
    settings = {"data_split": shares[recipe.phase], "eval_fraction": 0.3, "data_cache": "cache"} | options
    data = open_datasets(DataOptions(data_path=(str(path),), **settings), recipe, tokenizer)
    return [list(data.train), list(data.evaluation)]


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.usefixtures("here")
def test_demonstrations(tokenizer: PreTrainedTokenizerBase) -> None:
    dialogues = [[*asked, says(answer)] for asked, answer in zip(ASKED, ANSWERS, strict=True)]
    expected = opened(tokenizer, [{"messages": dialogue} for dialogue in dialogues], Recipe("sft"))
    assert min(map(len, expected)) > 0
    assert (
        opened(tokenizer, [{"text": rendered(tokenizer, dialogue)} for dialogue in dialogues], Recipe("sft"))
        == expected
    )
    split = [
        {"prompt": rendered(tokenizer, asked), "completion": answer + "<|im_end|>"}
        for asked, answer in zip(ASKED, ANSWERS, strict=True)
    ]
    assert opened(tokenizer, split, Recipe("sft")) == expected


@pytest.mark.usefixtures("here")
def test_pairs_and_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [(asked, answer, "No.") for asked, answer in zip(ASKED, ANSWERS, strict=True)]
    expected = opened(tokenizer, [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in pairs], Recipe("reward"))
    whole = [
        {"chosen": rendered(tokenizer, [*p, says(c)]), "rejected": rendered(tokenizer, [*p, says(r)])}
        for p, c, r in pairs
    ]
    assert opened(tokenizer, whole, Recipe("reward")) == expected
    beside = [{"prompt": rendered(tokenizer, p), "chosen": c, "rejected": r} for p, c, r in pairs]
    assert opened(tokenizer, beside, Recipe("reward")) == expected
    prompts = [[item.ids for item in part] for part in opened(tokenizer, [{"prompt": p} for p in ASKED], Recipe("ppo"))]
    texts = [{"prompt": rendered(tokenizer, p)} for p in ASKED]
    assert [[item.ids for item in part] for part in opened(tokenizer, texts, Recipe("ppo"))] == prompts


@pytest.mark.usefixtures("here")
def test_what_cannot_be_divided_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    text = rendered(tokenizer, [*ASKED[0], {"role": "tool", "content": "4"}, says("It is 4.")])
    with pytest.raises(UserError, match=r"rows0.jsonl:1: got a text with the chat template's markers.*messages"):
        opened(tokenizer, [{"text": text}], Recipe("sft"))


@pytest.mark.usefixtures("here")
def test_plain_text_takes_no_dialogue(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [
        {"text": rendered(tokenizer, [*ASKED[0], says("It is 4.")])},
        {"text": "ChatML ends a turn with <|im_end|>."},
    ]
    [items, _] = opened(tokenizer, rows, Recipe("sft", objective="text"), eval_fraction=0.0, max_dropped=0.5)
    assert len(items) == 1

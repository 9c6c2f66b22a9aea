"""A reward model of another family than the policy's reads the text, and says of it what it says of it alone.

The policy here spells letter by letter and has no template to speak of; the reward model knows words and wraps a
dialogue in its own. The oracle renders the text with the reward model's own tokenizer and asks transformers.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf import rewards
from rlhf.rewards import Context, as_samples
from rlhf.text.templates import BUILT_IN
from rlhf.types import Message, Row, SampledRollout
from tests.rlhf.rewards.responses import reward_model
from tests.support import tiny

LETTERS = " 0123456789w"
DIALOGUES = (
    (Message("user", "w10 w11"),),
    (Message("user", "w4"), Message("assistant", "w5 w6"), Message("user", "w7 w8")),
    (Message("user", "w9"),),
)
RESPONSES = ("w20 w21", "w5", "w90 w8 w7")
CHAT = (
    "{% for m in messages %}{{ 'w94' if m['role'] == 'user' else 'w95' }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w95 {% endif %}"
)
ENDED = CHAT.replace("['content'] }} ", "['content'] }}{% if m['role'] == 'assistant' %} </s>{% endif %} ")


def letters() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *LETTERS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = BUILT_IN["plain"]
    return tokenizer


def spelled(responses: tuple[str, ...], ended: tuple[bool, ...]) -> SampledRollout:
    """The responses as the policy would have sampled them, letter by letter."""
    rows = [[4 + LETTERS.index(c) for c in text] + [tiny.EOS] * end for text, end in zip(responses, ended, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tiny.PAD] * (width - len(row)) for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    prompts = torch.full((len(rows), 1), tiny.BOS)
    dialogues = tuple(Row(prompt) for prompt in DIALOGUES)
    return SampledRollout(prompts, prompts > 0, ids, mask, torch.zeros(ids.shape), torch.tensor(ended), dialogues)


@torch.no_grad()
@pytest.mark.parametrize("ended", [(True, True, True), (True, False, False)])
@pytest.mark.parametrize("template", [CHAT, ENDED])
def test_it_says_of_a_text_what_it_says_of_it_alone(ended: tuple[bool, ...], template: str, tmp_path: Path) -> None:
    theirs = tiny.tokenizer(reverse=True)
    theirs.chat_template = template
    model = reward_model(tmp_path, theirs, "llama", pad_token_id=theirs.pad_token_id)
    context = Context(letters(), torch.device("cpu"), torch.float32, str(tmp_path), 2)
    s = as_samples(spelled(RESPONSES, ended), letters())
    assert s.responses == RESPONSES
    scores = rewards.open_source("learned", context)(s)
    for dialogue, response, end, score in zip(DIALOGUES, RESPONSES, ended, scores.tolist(), strict=True):
        messages = [{"role": m.role, "content": m.content} for m in (*dialogue, Message("assistant", response))]
        text = str(theirs.apply_chat_template(messages, tokenize=False)).rstrip()
        ids = theirs(text if end else text.removesuffix(" </s>"), return_tensors="pt")["input_ids"]
        assert score == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("context_length", [6, 9, 12, 15])
def test_a_text_beyond_its_context_loses_the_oldest_of_the_prompt_then_the_end(
    context_length: int, tmp_path: Path
) -> None:
    """Of two turns `w94 .. w95 .. w94 .. w95 `, with a response of three words and EOS, by hand."""
    theirs = tiny.tokenizer(reverse=True)
    theirs.chat_template = ENDED
    model = reward_model(
        tmp_path, theirs, "llama", pad_token_id=theirs.pad_token_id, max_position_embeddings=context_length
    )
    turns = (Message("user", "w4 w5"), Message("assistant", "w6"), Message("user", "w7 w8 w9 w10 w11 w12"))
    remaining = {
        6: "w94 w11 w12 w95 w90 w8",  # the least of a prompt: 1 of the template and a fourth, 2
        9: "w94 w10 w11 w12 w95 w90 w8 w7 </s>",
        12: "w94 w7 w8 w9 w10 w11 w12 w95 w90 w8 w7 </s>",
        15: "w94 w7 w8 w9 w10 w11 w12 w95 w90 w8 w7 </s>",  # whole turns go first
    }
    rollout = replace(spelled(("w90 w8 w7",), (True,)), rows=(Row(turns),))
    score = rewards.open_source("learned", Context(letters(), torch.device("cpu"), torch.float32, str(tmp_path), 2))
    ids = theirs(remaining[context_length], return_tensors="pt")["input_ids"]
    expected = model(input_ids=ids).logits.item()
    assert score(as_samples(rollout, letters())).item() == pytest.approx(expected, abs=1e-5)

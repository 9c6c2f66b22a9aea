"""Three responses as a rollout, reward models to score them, and what a source is opened with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from rlhf.rewards import Context, as_samples
from rlhf.types import SampledRollout, Samples
from tests.support import tiny


def rollout() -> SampledRollout:
    """Three responses: 5 tokens and EOS, EOS alone, and one cut at 8 tokens, the last 4 as the first.

    The first ends in the number that its row has as answer.
    """
    prompts = tiny.prompts([3, 9, 8])
    ids = torch.randint(4, tiny.VOCAB, (3, 8), generator=torch.Generator().manual_seed(1))
    ids[2, 4:] = ids[2, :4]
    lengths = torch.tensor([6, 1, 8])
    mask = torch.arange(8) < lengths[:, None]
    ended = torch.tensor([True, True, False])
    ids[ended, lengths[ended] - 1] = tiny.EOS
    ids = ids.masked_fill(~mask, tiny.PAD)
    answers = (f"so\n#### {ids[0, 4]}", "0", "0")
    rows = tuple(replace(row, columns={"answer": text}) for row, text in zip(prompts.rows, answers, strict=True))
    return SampledRollout(prompts.ids, prompts.mask, ids, mask, torch.zeros(3, 8), ended, rows)


def padded(r: SampledRollout) -> SampledRollout:
    """The same with 7 more columns before the prompts and 5 after the responses."""
    pad = torch.nn.functional.pad
    return replace(
        r,
        prompt_ids=pad(r.prompt_ids, (7, 0), value=tiny.EOS),
        prompt_mask=pad(r.prompt_mask, (7, 0)),
        response_ids=pad(r.response_ids, (0, 5), value=tiny.EOS),
        mask=pad(r.mask, (0, 5)),
        sampled_logprobs=pad(r.sampled_logprobs, (0, 5)),
    )


def reward_model(
    path: Path, tokenizer: PreTrainedTokenizerFast, family: str = "gpt2", labels: int = 1, **changes: Any
) -> PreTrainedModel:
    """A classifier of one label (or more) as transformers makes and saves it, with `tokenizer` beside it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(
            tiny.config_of(family, num_labels=labels, **changes)
        ).eval()
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


def other_tokenizer() -> PreTrainedTokenizerFast:
    """The same words under other ids, and another template."""
    tokenizer = tiny.tokenizer(reverse=True)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}w4 w5 {{ m['content'] }} w6{% endfor %}"
    return tokenizer


def context(path: Path, micro_batch_size: int = 2) -> Context:
    return Context(tiny.tokenizer(), torch.device("cpu"), torch.float32, str(path), micro_batch_size)


def samples(r: SampledRollout) -> Samples:
    return as_samples(r, tiny.tokenizer())

"""`python -m benchmarks.stories`: the data of a small world in which a language model learns to tell happy stories.

A base model (stories260k, a Llama of 260,000 weights that writes English children's stories) writes everything:

    opening    the first words of a story
    response   what follows, to the first end of a sentence after four words

sft.jsonl has one response to each opening, pairs.jsonl two of them with a preference, and prompts.jsonl openings alone.
No opening is in two files. The preference is that of a noisy reader (Bradley & Terry 1952):

    P(a is chosen) = sigmoid(beta (v(a) - v(b))),   v = VADER's compound score of the response, in [-1, 1]

So the stages learn of VADER through the noisy reader only; its own score is the true score of this world. The same seed
writes the same bytes: the base samples in float64 from numbered random streams, whatever the number of threads.
"""

import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rlhf import errors
from rlhf.config import Config, parser
from rlhf.errors import UserError
from rlhf.storage import disk

SENTENCE_END = re.compile(r'[.!?]"?(?= |$)')
STORIES, LABELS, RESPONSES = range(3)
"""random streams; RESPONSES and all above it are of responses"""


class Options(Config):
    """The base model, and the size of the data."""

    model: str = "models/stories260k"
    """base model: a directory or hub id; any causal language model that writes English"""
    output_dir: str = "build/stories"
    """directory of sft.jsonl, pairs.jsonl and prompts.jsonl"""
    seed: int = Field(0, ge=0)
    """seed of the stories, responses and labels"""
    stories: int = Field(4500, ge=1)
    """stories that the base writes; the openings are theirs, each once"""
    sft: int = Field(800, ge=1)
    """openings for sft.jsonl"""
    prompts: int = Field(800, ge=1)
    """openings for prompts.jsonl; all others are for pairs.jsonl"""
    responses: int = Field(4, ge=2)
    """responses to each opening of pairs.jsonl"""
    opening_words: int = Field(12, ge=1)
    """words of an opening"""
    response_tokens: int = Field(32, ge=1)
    """tokens of the longest response; longer ones are left out"""
    response_words: int = Field(4, ge=1)
    """words after which a response ends with its sentence"""
    beta: float = Field(4.0, gt=0)
    """how well the reader sees a difference of true scores; large: no noise"""


def continuations(options: Options, prompts: Sequence[str], tokens: int, stream: int) -> list[str]:
    """The text of `tokens` tokens that the base writes after each prompt. stream: which of the seed's random streams"""
    import torch

    from rlhf.config.options import PromptFileOptions
    from rlhf.evaluation.batch_generation import PromptSet, common_tokenizer
    from rlhf.generation import loop
    from rlhf.hub.short_names import resolve
    from rlhf.text.dialogues import Template
    from rlhf.types import Message, Row

    path = resolve(options.model)
    tokenizer = common_tokenizer([path], "plain")
    rows = tuple(Row((Message("user", prompt),)) for prompt in prompts)
    sampling = PromptFileOptions(seed=options.seed, response_length=tokens, dtype="fp32", rollout_batch_size=256)
    template, eos = Template(tokenizer), tokenizer.eos_token_id
    prompt_set = PromptSet(sampling, tokenizer, rows, tuple(template.prompt_ids_many(rows)))
    lm = prompt_set.load(path).double().lm
    config = loop.Config(eos_token_id=eos, pad_token_id=eos)
    texts: list[str] = []
    for batch, uniforms in prompt_set.batches(stream):
        sampled = torch.full((len(batch), tokens), eos)
        for t, step in enumerate(loop.steps(lm, batch, sampling, uniforms, config)):
            sampled[:, t] = step.tokens
        texts += map(template.response_text, sampled.tolist())
    return texts


def whole_sentences(text: str, words: int) -> str | None:
    """The text up to the first end of a sentence after `words` words; None without one, or with a line break before."""
    for match in SENTENCE_END.finditer(text):
        if len(text[: match.end()].split()) >= words:
            return None if "\n" in text[: match.end()] else text[: match.end()]
    return None


def openings(texts: Sequence[str], words: int) -> list[str]:
    """The first `words` words of each story, every opening once, in the order of the stories."""
    starts = (text.split()[:words] for text in texts)
    return list(dict.fromkeys(" ".join(start) for start in starts if len(start) == words))


def prefers_first(first: float, second: float, beta: float, uniform: float) -> bool:
    """Whether the noisy reader chooses the response with true score `first`. uniform: a random number in [0, 1)."""
    return uniform < 1 / (1 + math.exp(-beta * (first - second)))


@functools.cache
def vader() -> Callable[[str], float]:
    """VADER's compound score of a response, in [-1, 1]."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return lambda response: float(analyzer.polarity_scores(response)["compound"])


def pairs(prompts: Sequence[str], sides: Sequence[Sequence[str | None]], options: Options) -> Iterator[dict[str, Any]]:
    """Labelled pairs of whole, different responses to one opening, each response in one pair.

    sides: [--responses, N] responses, None if one has not ended
    """
    from rlhf.maths.uniforms import uniforms

    for i, prompt in enumerate(prompts):
        whole = list(dict.fromkeys(side[i] for side in sides if side[i] is not None))
        labels = uniforms([(options.seed, LABELS, i)], len(sides))[0].tolist()
        for both, label in zip(zip(whole[::2], whole[1::2], strict=False), labels, strict=False):
            scores = [vader()(response) for response in both]
            chosen, rejected = both if prefers_first(*scores, options.beta, label) else both[::-1]
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def make(options: Options) -> dict[str, list[dict[str, Any]]]:
    """The rows of each file, by its name. Raises: UserError if the base has written too few openings."""
    texts = continuations(options, [""] * options.stories, 5 * options.opening_words // 2, STORIES)
    starts = openings(texts, options.opening_words)
    if len(starts) <= options.sft + options.prompts:
        raise UserError(
            f"--stories {options.stories}: got {len(starts)} different openings, expected more than "
            f"{options.sft + options.prompts} for --sft and --prompts; raise --stories or --opening-words"
        )
    sft, prompts = starts[: options.sft], starts[options.sft : options.sft + options.prompts]
    compared = starts[options.sft + options.prompts :]

    def responses(prompts: Sequence[str], stream: int) -> list[str | None]:
        texts = continuations(options, prompts, options.response_tokens, stream)
        return [whole_sentences(text, options.response_words) for text in texts]

    demonstrations = zip(sft, responses(sft, RESPONSES), strict=True)
    sides = [responses(compared, RESPONSES + 1 + i) for i in range(options.responses)]
    return {
        "sft": [{"prompt": p, "response": r} for p, r in demonstrations if r is not None],
        "pairs": [*pairs(compared, sides, options)],
        "prompts": [{"prompt": prompt} for prompt in prompts],
    }


def main() -> int:
    """Write the files, one line printed for each."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.stories", "Data of the world of stories.")
    directory = Path(options.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in make(options).items():
        path = directory / f"{name}.jsonl"
        disk.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

"""Pairs of responses for the next reward model, as in iterated online RLHF (arXiv 2204.05862, section 4.5)."""

import gc
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf import console, rewards
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import (
    Questions,
    check_reward,
    policy_place,
    questions,
    require_writable,
    respondents,
)
from rlhf.evaluation.options import PairsConfig
from rlhf.text.prompt_file import read_prompts, written_prompt
from rlhf.types import Message

CUT, EQUAL, TIE = "cut at --response-length", "equal responses", "tie"
"""why a pair is dropped"""


@dataclass(frozen=True, slots=True)
class Side:
    """One response, and what the score source says of it."""

    text: str
    ended: bool
    score: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two independent draws to one prompt."""

    prompt: tuple[Message, ...]
    sides: tuple[Side, Side]


def run(options: PairsConfig) -> None:
    """Sample, label, write, and say what became of every prompt.

    Raises: UserError; nothing is written then.
    """
    places, asked = check(options)
    kept, dropped = rows_of(pairs(asked, places, options), options)
    said = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    if not kept:
        raise UserError(f"--prompts {options.prompts}: no pair is left ({said}); raise --temperature, or add prompts")
    shown = [tuple(_shown(value) for value in list(row.values())[:3]) for row in kept[: options.sample_rows]]
    console.show_table("pairs", tuple(kept[0])[:3], shown)
    _write(Path(str(options.output)), kept)
    doing = "labelled" if options.reward is not None else "to fill in: preference a, b or tie"
    console.say(f"wrote {len(kept)} pairs, {doing}, to {options.output}" + (f"; dropped {said}" if said else ""))


def check(options: PairsConfig) -> tuple[list[str], Questions]:
    """The places of the policies, and the prompts as often as each responds to them.

    Raises: UserError for what cannot work, before a model is loaded.
    """
    if options.reward is not None:
        check_reward(options.reward)
    prompts = read_prompts(str(options.prompts))
    if not prompts:
        raise UserError(f"--prompts {options.prompts}: got no prompt, expected one or more")
    places = [policy_place(place) for place in options.policies]
    asked = questions(prompts, places, options, 2 // len(places))
    output = Path(str(options.output))
    if output.exists() and not options.overwrite:
        raise UserError(f"--output {output}: is there already; name another, or add --overwrite")
    require_writable(output.parent, f"--output {output}")
    return places, asked


def pairs(asked: Questions, places: Sequence[str], options: PairsConfig) -> list[Pair]:
    """Two draws to each prompt: both of one policy, or one of each of two, which have random streams of their own."""
    with_all = respondents(asked)
    source = None if options.reward is None else with_all.source(options.rollout_batch_size)
    by_policy: list[list[Side]] = []
    with console.bar("responses", len(places) * len(asked.rows)) as bar:
        for stream, place in enumerate(places):
            policy, backend, sides = with_all.load(place), with_all.backend(), []
            for prompts, draw in asked.batches(with_all.device, stream):
                samples = rewards.as_samples(backend(policy.lm, prompts, options, draw), asked.tokenizer)
                scores = [None] * len(prompts) if source is None else source(samples).tolist()
                ended = samples.rollout.ended.tolist()
                sides += [Side(*said) for said in zip(samples.responses, ended, scores, strict=True)]
                bar.advance(len(prompts))
            by_policy.append(sides)
            del policy
            gc.collect()  # before the next one is loaded: modules with hooks are circles
    one, other = by_policy if len(by_policy) == 2 else (by_policy[0][::2], by_policy[0][1::2])
    prompts_once = [row.prompt for row in asked.rows[:: 2 // len(places)]]
    return [Pair(prompt, sides) for prompt, sides in zip(prompts_once, zip(one, other, strict=True), strict=True)]


def rows_of(found: Sequence[Pair], options: PairsConfig) -> tuple[list[dict[str, Any]], Counter[str]]:
    """(the rows to write, how many pairs were dropped by reason).

    With scores the columns are prompt, chosen, rejected, score_chosen, score_rejected, margin; without them prompt,
    response_a, response_b in random order, and an empty preference.
    """
    kept: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    order = random.Random(options.seed)
    for pair in found:
        reason = useless(pair, options.tie)
        if reason:
            dropped[reason] += 1
        elif options.reward is None:
            # At random, so that where two policies respond the place does not tell which one it is.
            one, other = order.sample(pair.sides, 2)
            sides = {"response_a": one.text, "response_b": other.text, "preference": ""}
            kept.append({"prompt": written_prompt(pair.prompt)} | sides)
        else:
            kept.append({"prompt": written_prompt(pair.prompt)} | _labelled(pair, options.margin))
    return kept, dropped


def useless(pair: Pair, tie: float) -> str:
    """Why a pair teaches a reward model nothing, or something wrong; an empty string if it is of use.

    A response that was cut is not one that ends there, and a reward model reads every response with its end.
    """
    one, other = pair.sides
    if not (one.ended and other.ended):
        return CUT
    if one.text == other.text:
        return EQUAL
    return TIE if one.score is not None and other.score is not None and abs(one.score - other.score) <= tie else ""


def _labelled(pair: Pair, margin: bool) -> dict[str, Any]:
    (low, worse), (high, better) = sorted(((side.score or 0.0, side) for side in pair.sides), key=lambda side: side[0])
    row = {"chosen": better.text, "rejected": worse.text, "score_chosen": high, "score_rejected": low}
    return row | ({"margin": high - low} if margin else {})


def _shown(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _write(output: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The whole file or nothing. Raises: UserError if it cannot be written."""
    staging = output.with_name(f".tmp-{output.name}")
    try:
        with staging.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(staging, output)
    except OSError as error:
        raise UserError(
            f"--output {output}: cannot be written ({error.strerror}); make room there and run again"
        ) from None

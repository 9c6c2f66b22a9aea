"""Pairs of responses for the next reward model, as in iterated online RLHF (arXiv 2204.05862, section 4.5)."""

import gc
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlhf import console, rewards
from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import (
    PromptSet,
    check_reward_spec,
    encode_prompts,
    policy_path,
    read_prompts,
    require_writable,
)
from rlhf.evaluation.options import PairsConfig
from rlhf.maths.preferences import position_bias
from rlhf.rewards import NO_SCORE
from rlhf.storage import disk
from rlhf.text.messages import format_prompt, prompt_text, variable_columns
from rlhf.types import Row

CUT, EQUAL, TIE, NONE = "cut at --response-length", "equal responses", "tie", "no score"
"""reasons to drop a pair"""
CURES = {
    CUT: "raise --response-length",
    EQUAL: "raise --temperature",
    TIE: "lower --tie, or name another --reward",
    NONE: "change the question to the judge, or what --reward returns",
}
"""what the user can do against each reason"""


@dataclass(frozen=True, slots=True)
class Side:
    """One response of a pair, and its score if there is a score source."""

    text: str
    ended: bool
    score: float | None
    answer: str = ""
    """the text without its thought"""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two independent responses to one prompt."""

    row: Row
    """the prompt"""
    sides: tuple[Side, Side]


def run(options: PairsConfig) -> None:
    """Sample, label and write pairs, and print how many were written and dropped.

    Raises: UserError; then nothing is written.
    """
    model_paths, prompt_set = check(options)
    rows, dropped = to_rows(sample_pairs(prompt_set, model_paths, options), options)
    drop_counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    cure = CURES[dropped.most_common(1)[0][0]] if dropped else ""
    if not rows:
        raise UserError(f"--prompts {options.prompts}: no pair is left ({drop_counts}); {cure}, or add prompts")
    samples = [tuple(prompt_text(value) for value in list(row.values())[:3]) for row in rows[: options.sample_rows]]
    console.show_table("pairs", tuple(rows[0])[:3], samples)
    if collectives.is_main():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        disk.write_text(Path(str(options.output)), "".join(lines))  # the whole file or nothing
    labels = "labelled" if options.reward is not None else "to fill in: preference a, b or tie"
    dropped_note = f"; dropped {drop_counts}" if drop_counts else ""
    dropped_note += f"; {cure} to drop fewer" if dropped.total() > len(rows) else ""
    console.say(f"wrote {len(rows)} pairs, {labels}, to {options.output}{dropped_note}")


def check(options: PairsConfig) -> tuple[list[str], PromptSet]:
    """(paths of the policies' models, prompts repeated for each response of a policy), before any model is loaded.

    Raises: UserError.
    """
    prompts = read_prompts(str(options.prompts))
    if options.reward is not None:
        check_reward_spec(options.reward, [row for _, row in prompts])
    if not prompts:
        raise UserError(f"--prompts {options.prompts}: got no prompt, expected one or more")
    model_paths = [policy_path(policy) for policy in options.policies]
    prompt_set = encode_prompts(prompts, model_paths, options, 2 // len(model_paths))
    output = Path(str(options.output))
    if output.exists() and not options.overwrite:
        raise UserError(f"--output {output}: the file exists already; name another file, or add --overwrite")
    require_writable(output.parent, f"--output {output}")
    return model_paths, prompt_set


def sample_pairs(prompt_set: PromptSet, model_paths: Sequence[str], options: PairsConfig) -> list[Pair]:
    """Two responses to each prompt: both of one policy, or one of each of two policies.

    Two policies sample with different random numbers.
    """
    judge, folder = None, Path(str(options.output)).with_suffix(f".{rewards.ANSWERS}")
    if options.reward is not None:
        judge = prompt_set.source(options.reward, options.rollout_batch_size, folder)
    scores_each = judge is not None and judge.compare is None
    by_policy: list[list[Side]] = []
    total = len(model_paths) * -(-len(prompt_set.rows) // collectives.world_size())
    with console.bar("responses", total) as bar:
        for stream, model_path in enumerate(model_paths):
            policy, backend = prompt_set.load(model_path), prompt_set.backend()
            batches: list[list[Side]] = []
            for prompts, uniforms in prompt_set.batches(stream):
                samples = rewards.as_samples(backend(policy.lm, prompts, options, uniforms), prompt_set.tokenizer)
                backend.release()
                scores = judge(samples).tolist() if judge is not None and scores_each else [None] * len(prompts)
                sides = zip(samples.responses, samples.rollout.ended.tolist(), scores, samples.answers, strict=True)
                batches.append([Side(*side) for side in sides])
                bar.advance(len(prompts))
            by_policy.append([side for sides in collectives.of_all_ranks(batches) for side in sides])
            del policy
            gc.collect()  # before the next policy is loaded: modules with hooks are reference cycles
    first, second = by_policy if len(by_policy) == 2 else (by_policy[0][::2], by_policy[0][1::2])
    rows = prompt_set.rows[:: 2 // len(model_paths)]
    pairs = [Pair(row, sides) for row, sides in zip(rows, zip(first, second, strict=True), strict=True)]
    if judge is not None:
        pairs = pairs if judge.compare is None else compared(pairs, judge.compare)
        rewards.say_counts([judge])
    return pairs


def compared(pairs: Sequence[Pair], compare: rewards.Compare) -> list[Pair]:
    """The pairs with scores by a judge of pairs, which add up to 1: the share of the two orders that a response wins.
    What is dropped anyway is not asked. Says how much the order decides."""
    usable = [i for i, pair in enumerate(pairs) if not drop_reason(pair, 0.0)]
    mine = [pairs[usable[i]] for i in collectives.rows_of_rank(len(usable))]
    first, second = ([pair.sides[i].answer for pair in mine] for i in (0, 1))
    verdicts = torch.tensor(collectives.of_all_ranks(compare([pair.row for pair in mine], first, second).tolist()))
    console.say(f"judge: {console.metrics_line(position_bias(verdicts.view(-1, 2))) or 'no verdict in both orders'}")
    scored = list(pairs)
    for i, share in zip(usable, verdicts.view(-1, 2).mean(1).tolist(), strict=True):
        one, two = pairs[i].sides
        scores = (share if share == NO_SCORE else 1 - share), share
        scored[i] = replace(pairs[i], sides=(replace(one, score=scores[0]), replace(two, score=scores[1])))
    return scored


def to_rows(pairs: Sequence[Pair], options: PairsConfig) -> tuple[list[Tree], Counter[str]]:
    """(rows to write, number of dropped pairs by reason).

    With scores the columns are prompt, chosen, rejected, score_chosen, score_rejected and, if `margin` is set, margin.
    Without scores they are prompt, response_a and response_b in random order, and an empty preference. What the chat
    template gets beside a prompt follows.
    """
    rows: list[Tree] = []
    dropped: Counter[str] = Counter()
    order = random.Random(options.seed)
    for pair in pairs:
        reason, prompt = drop_reason(pair, options.tie), {"prompt": format_prompt(pair.row.prompt)}
        if reason:
            dropped[reason] += 1
        elif options.reward is None:
            # In random order, so that the column does not reveal which policy wrote the response.
            first, second = order.sample(pair.sides, 2)
            columns = {"response_a": first.text, "response_b": second.text, "preference": ""}
            rows.append(prompt | columns | variable_columns(pair.row))
        else:
            rows.append(prompt | _labelled(pair, options.margin) | variable_columns(pair.row))
    return rows, dropped


def drop_reason(pair: Pair, tie: float) -> str:
    """Why a pair must not train a reward model; an empty string if it may.

    A response that was cut has no EOS token, but reward-model training ends every response in one.
    """
    first, second = pair.sides
    if not (first.ended and second.ended):
        return CUT
    if first.text == second.text:
        return EQUAL
    if first.score is None or second.score is None:
        return ""
    if NO_SCORE in (first.score, second.score):
        return NONE
    return TIE if abs(first.score - second.score) <= tie else ""


def _labelled(pair: Pair, margin: bool) -> Tree:
    (low, worse), (high, better) = sorted(((side.score or 0.0, side) for side in pair.sides), key=lambda side: side[0])
    row = {"chosen": better.text, "rejected": worse.text, "score_chosen": high, "score_rejected": low}
    return row | ({"margin": high - low} if margin else {})

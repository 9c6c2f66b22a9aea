"""What the policy does on held-out prompts: scores, KL, length, and whether it still writes language."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import console
from rlhf.distributed import collectives
from rlhf.evaluation.results_table import distinct
from rlhf.maths import ops
from rlhf.maths.intervals import mean_interval
from rlhf.rewards import Source, as_samples
from rlhf.types import Message, Metrics, Rollout, Samples


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One look at the policy: N sampled responses of all ranks, in the order of their prompts, with a number each."""

    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    scores: Tensor
    judged: Tensor | None
    kl: Tensor
    ref_nll: Tensor
    lengths: Tensor
    ended: Tensor
    distinct_2: float
    by_source: dict[str, Tensor] = field(default_factory=dict)
    """what each of several reward sources says"""
    questions: tuple[str, ...] = ()
    """what the user says last in each prompt"""


def look(
    rollout: Rollout, judge: Source | None, tokenizer: PreTrainedTokenizerBase, sources: Mapping[str, Tensor]
) -> Evaluation:
    """Gather what a scored rollout says from every rank. sources: scores [B] of each reward source by its name.

    The KL is the mean of log pi_s(y|x) - log ref(y|x), pi_s being the policy as it sampled y: no rounding makes its
    expectation negative. A second pass over the same weights gives another pi_t in bf16, and with log pi_t in its place
    the mean is too small by KL(pi_s, pi_t).
    """
    assert rollout.logprobs is not None and rollout.ref_logprobs is not None and rollout.scores is not None
    samples = as_samples(rollout, tokenizer)
    judged = None if judge is None else _all(judge(samples))
    return Evaluation(
        prompts=tuple(_of_all_ranks(samples.prompts)),
        responses=tuple(_of_all_ranks(samples.responses)),
        scores=_all(rollout.scores),
        judged=judged,
        kl=_all(ops.zero_off_mask(rollout.sampled_logprobs - rollout.ref_logprobs, rollout.mask).sum(1)),
        ref_nll=_all(-rollout.ref_logprobs.sum(1)),
        lengths=_all(rollout.lengths),
        ended=_all(rollout.ended),
        distinct_2=distinct(_of_all_ranks(rollout.response_tokens()), 2),
        by_source={name: _all(scores) for name, scores in sources.items()} if len(sources) > 1 else {},
        questions=tuple(_of_all_ranks([_question(row.prompt) for row in rollout.rows])),
    )


def _question(prompt: Sequence[Message]) -> str:
    return next((message.content for message in reversed(prompt) if message.role == "user"), "")


def collapse(before: Evaluation, after: Evaluation) -> str | None:
    """What to say of a policy whose held-out responses have lost nine tenths of their distinct pairs of tokens."""
    if 10 * after.distinct_2 >= before.distinct_2:
        return None
    return (
        f"the policy has collapsed: its held-out responses are all alike (eval_distinct_2 was {before.distinct_2:.3g}, "
        f"now {after.distinct_2:.3g}; eval_kl {after.kl.mean().item():.3g}); lower --learning-rate or raise --kl-coef"
    )


def flaw(seen: Evaluation) -> str | None:
    """What is not a finite number for which held-out response, the same on every rank; None where all are."""
    for what, values in {"score": seen.scores, "judge": seen.judged, **seen.by_source}.items():
        bad = [] if values is None else (~values.isfinite()).nonzero().flatten().tolist()
        if bad:
            return (
                f"{what} is not a finite number for {len(bad)} of {len(seen.scores)} held-out responses, the first of "
                f"them to prompt {seen.prompts[bad[0]][-60:]!r}; look at what --reward and --judge make of it"
            )
    return None


def _all(values: Tensor) -> Tensor:
    return torch.tensor(_of_all_ranks(values.float().tolist()))


def _of_all_ranks(values: Sequence[Any]) -> list[Any]:
    """One value a response of each rank, in the order in which their prompts were dealt out."""
    shares = collectives.gather_shares(list(values))
    return [share[i] for i in range(len(shares[0])) for share in shares if i < len(share)]


def compare(before: Evaluation, after: Evaluation) -> Metrics:
    """Final numbers of a run: the policy after against before, on the same prompts. KL in nats per response."""
    metrics = {
        "eval_score_before": before.scores.mean().item(),
        "eval_score": after.scores.mean().item(),
        "eval_score_ci95": _ci95(after.scores),
        "eval_kl": after.kl.mean().item(),
        "eval_kl_ci95": _ci95(after.kl),
        "eval_kl_floor": before.kl.mean().item(),  # the weights were the reference's: what remains is rounding
        "eval_response_length": after.lengths.mean().item(),
        "eval_ended": after.ended.mean().item(),
        "eval_ref_nll_before": (before.ref_nll.sum() / before.lengths.sum()).item(),
        "eval_ref_nll": (after.ref_nll.sum() / after.lengths.sum()).item(),
        "eval_distinct_2_before": before.distinct_2,
        "eval_distinct_2": after.distinct_2,
    }
    for name, scores in after.by_source.items():
        metrics[f"eval_score_{name}_before"] = before.by_source[name].mean().item()
        metrics[f"eval_score_{name}"] = scores.mean().item()
    if before.judged is not None and after.judged is not None:
        metrics |= {
            "eval_judge_before": before.judged.mean().item(),
            "eval_judge": after.judged.mean().item(),
            "eval_judge_ci95": _ci95(after.judged),
            "eval_judge_gain_ci95": _ci95(after.judged - before.judged),
        }
    return metrics


def at_start(before: Evaluation) -> Metrics:
    """The same numbers of the policy that the run starts from."""
    return {name: value for name, value in compare(before, before).items() if not name.endswith("_before")}


def _ci95(values: Tensor) -> float:
    """Half the width of the 95 % interval of the mean, [N] values."""
    return mean_interval(values).high - values.double().mean().item() if len(values) > 1 else float("nan")


@dataclass(frozen=True, slots=True)
class Turns:
    """Iterations whose policy is looked at: each `every`th (0: none) and the last of `total`; `done` are past."""

    every: int
    total: int
    done: int = 0


def looked_at(
    steps: Iterable[Metrics], turns: Turns, look: Callable[[int], Metrics], best: "Best | None" = None
) -> Iterator[Metrics]:
    """The iterations that are left, those whose turn it is with the numbers of `look(iteration)` besides.

    They end early where `best` has waited long enough.
    """
    if best is not None and best.is_over:  # gone on from the look that ended it
        return
    for iteration, metrics in enumerate(steps, start=turns.done + 1):
        if iteration != turns.total and (not turns.every or iteration % turns.every):
            yield metrics
            continue
        seen = look(iteration)
        if best is not None:
            best.note(seen)
        yield {**metrics, **seen}
        if best is not None and best.is_over and iteration != turns.total:
            console.say(
                f"iteration {iteration}: {best.name} has not risen above {best.value:.4g} for {best.waited} looks"
            )
            return


class Best:
    """Keeps the policy with the highest of a held-out number, and says when there was no better one for too long."""

    def __init__(self, name: str, patience: int | None, keep: Callable[[], None]) -> None:
        self.name, self.value, self.waited = name, float("-inf"), 0
        self._patience, self._keep = patience, keep

    def note(self, seen: Metrics) -> None:
        """Take note of a look."""
        self.waited += 1
        if seen[self.name] > self.value:
            self.value, self.waited = seen[self.name], 0
            self._keep()

    @property
    def is_over(self) -> bool:
        """Whether to stop."""
        return self._patience is not None and self.waited >= self._patience

    def state_dict(self) -> dict[str, float]:
        """The best so far, and the looks since."""
        return {"value": self.value, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.waited = state["value"], int(state["waited"])


def write_samples(path: Path, iteration: int, before: Evaluation, after: Evaluation) -> None:
    """Append a line for each held-out prompt of all ranks: both responses and their numbers. Rank 0 writes."""
    if not collectives.is_main():
        return
    texts = zip(after.prompts, before.responses, after.responses, strict=True)
    with path.open("a", encoding="utf-8") as file:
        for i, (prompt, old, new) in enumerate(texts):
            row = {"iteration": iteration, "prompt": prompt, "before": old, "after": new}
            row |= {"score_before": before.scores[i].item(), "score": after.scores[i].item(), "kl": after.kl[i].item()}
            if before.judged is not None and after.judged is not None:
                row |= {"judge_before": before.judged[i].item(), "judge": after.judged[i].item()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_rollout(path: Path, iteration: int, rollout: Rollout, names: Sequence[str], samples: Samples) -> None:
    """Append a line for each response of this rank: its text, what each source in `names` says, its KL and length."""
    assert rollout.scores is not None and rollout.source_scores is not None
    assert rollout.logprobs is not None and rollout.ref_logprobs is not None
    numbers = {
        "score": rollout.scores,
        "kl": (rollout.logprobs - rollout.ref_logprobs).sum(1),
        "tokens": rollout.lengths,
    }
    numbers |= {"ended": rollout.ended} | dict(zip(names, rollout.source_scores.unbind(1), strict=True))
    columns = {name: values.tolist() for name, values in numbers.items()}
    with path.open("a", encoding="utf-8") as file:
        for i, (prompt, response) in enumerate(zip(samples.prompts, samples.responses, strict=True)):
            row = {"iteration": iteration, "prompt": prompt, "response": response}
            row |= {name: values[i] for name, values in columns.items()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def show_samples(before: Evaluation, after: Evaluation, count: int) -> None:
    """What users said last, with the response before and after side by side."""
    rows = [
        (question, f"{old}\n[{old_score:.2f}]", f"{new}\n[{new_score:.2f}]")
        for question, old, new, old_score, new_score in zip(
            after.questions,
            before.responses,
            after.responses,
            before.scores.tolist(),
            after.scores.tolist(),
            strict=True,
        )
    ]
    console.show_table("held-out prompts [score]", ("the user's last words", "before", "after"), rows[:count])

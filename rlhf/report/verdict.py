"""The result of a stage in numbers, and the verdict: did the policy get better, by which judge, at what KL."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlhf import plugins
from rlhf.config import Tree
from rlhf.config.declaration import Declaration, Result
from rlhf.hub import short_names
from rlhf.maths import best_of_n
from rlhf.maths.intervals import POWER, Interval, mean_interval, power, student_t, win_rate_interval
from rlhf.maths.length_control import win_rate_at_equal_length
from rlhf.pages.numbers import UNKNOWN, short, with_half_width
from rlhf.report.records import Row, RunRecord, StageRecord, before_and_after, number, read_stage

NEAR = 0.8
"""of the gain of best-of-n at the same KL; with less a run is told what comes closer (docs/results/efficiency.md)"""


@dataclass(frozen=True, slots=True)
class Change:
    """A held-out number before and after a stage."""

    result: Result
    source: str
    """the value of the option that names its source"""
    before: float | None
    after: float | None
    half_width: float | None
    """half the 95 % interval of `after`"""
    gain: Interval | None
    """of the mean over prompts; None without the numbers of each response"""
    prompts: int
    wins: int
    """prompts whose response has a higher number than before; `losses`: a lower one"""
    losses: int
    baselines: tuple[tuple[str, float], ...] = ()
    """(name, number) of simple rules"""

    def shown(self, value: float | None) -> str:
        """The value as text, with the decimals of the interval if there is one."""
        if value is None:
            return UNKNOWN
        factor = 100 if self.result.share else 1
        text = short(factor * value)
        if self.half_width:
            text, _ = with_half_width(factor * value, factor * self.half_width)
        return f"{text} %" if self.result.share else text

    @property
    def shown_half_width(self) -> str:
        """`± 0.04`, or nothing."""
        factor = 100 if self.result.share else 1
        return f"± {with_half_width(0.0, factor * self.half_width)[1]}" if self.half_width else ""

    @property
    def shown_gain(self) -> str:
        """The mean gain, with half its interval."""
        if self.gain is None:
            return ""
        mean, half = with_half_width(self.gain.mean, self.gain.half_width)
        return f"{'+' if self.gain.mean >= 0 else ''}{mean} ± {half}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence, the evidence for it, and what weakens it."""

    headline: str
    tone: str
    """good, bad or unsure"""
    evidence: tuple[str, ...]
    cautions: tuple[str, ...]
    worth: tuple[str, ...] = ()
    """what best-of-n before training needs for the same, which the page has below its table"""

    @property
    def sentence(self) -> str:
        """The headline, the first evidence and the samples that a response is worth, for the end of a run."""
        return " ".join((self.headline, *self.evidence[:1], *self.worth[:1]))


def changes(stage: StageRecord) -> list[Change]:
    """The results that the stage has recorded. A judge that is also a source of the reward is not independent."""
    results = stage.declaration.report.results
    sources = [spec for r in results if r.option and not r.independent for spec in stage.config.get(r.option) or ()]
    trained = [_source(source) for weight, source in map(plugins.split_weight, sources) if weight]
    changed = [change for change in (_change(stage, r) for r in results) if change is not None]
    return [
        replace(c, result=replace(c.result, independent=c.result.independent and _source(c.source) not in trained))
        for c in changed
    ]


def _source(spec: str) -> tuple[Path, Tree]:
    """What a score source is, however its file, module, function and model are spelled."""
    (name, function), (_, options) = plugins.function_of(spec), plugins.parse_spec(spec)
    if function and not name.endswith(".py"):
        name = f"{name.replace('.', '/')}.py"
    if "model" in options:
        options["model"] = Path(short_names.resolve(str(options["model"]))).resolve()
    return Path(name).resolve(), options | {"function": function or "score"}


def _named(stage: StageRecord, result: Result) -> object:
    """The value of the option that names the result's source."""
    value = stage.config.get(result.option) if result.option else None
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _change(stage: StageRecord, result: Result) -> Change | None:
    evaluations = stage.values(result.metric)
    if not evaluations:
        return None
    last = evaluations[-1]
    before = number(last, f"{result.metric}_before")
    trained = last.get("step") != 0 or before is not None
    if before is None and evaluations[0].get("step") == 0:
        before = number(evaluations[0], result.metric)
    pairs = before_and_after(stage.samples, result.sample) if last.get("step") != 0 else []
    differences = [after - old for old, after in pairs]
    half_width = number(last, f"{result.metric}_ci95") if trained else None
    if trained and half_width is None and result.share and stage.pair_scores is not None:
        half_width = _accuracy_half_width(stage.pair_scores)
    return Change(
        result=result,
        source=str(_named(stage, result) or ""),
        before=before,
        after=number(last, result.metric) if trained else None,
        half_width=half_width,
        gain=mean_interval(torch.tensor(differences, dtype=torch.float64)) if len(differences) > 1 else None,
        prompts=len(pairs),
        wins=sum(difference > 0 for difference in differences),
        losses=sum(difference < 0 for difference in differences),
        baselines=tuple((rule, last[name]) for name, rule in result.baselines if number(last, name) is not None),
    )


def _accuracy_half_width(scores: Tree) -> float | None:
    """Half the 95 % interval of the share of pairs in the right order; None if pairs have different weights."""
    if len({*scores.get("weight", [])}) > 1 or len(scores.get("chosen", [])) < 2:
        return None
    difference = torch.tensor(scores["chosen"]) - torch.tensor(scores["rejected"])
    return win_rate_interval((difference.sign() + 1) / 2).half_width


def judge(run: RunRecord) -> Verdict:
    """The verdict on a run: of the last stage that compares responses before and after, else of its last stage; of
    stages that are not stale."""
    stale = _stale(run)
    fresh = [stage for stage in run.stages if stage.directory.name not in stale] or [*run.stages]
    compared = [stage for stage in fresh if stage.declaration.report.samples]
    stage = (compared or fresh)[-1]
    results = changes(stage)
    by_samples = [change for change in results if change.gain is not None]
    rules = _words_alone(run)
    cautions = (*rules, *_unfinished(run))
    if not by_samples:
        name = stage.directory.name
        headline = f"{name}: " + "; ".join(f"{c.result.label} {_from_to(c)}" for c in results[:2]) + "."
        if compared and any(change.prompts for change in results):
            headline = f"{name} held out one prompt, and a verdict needs two or more: give it more rows."
        elif compared:
            headline = f"{name} has no evaluation after training yet."
        return Verdict(headline, "unsure" if compared else "", tuple(stale.values()), cautions)
    first = by_samples[0]
    assert first.gain is not None
    tone = "good" if first.gain.low > 0 else "bad" if first.gain.high < 0 else "unsure"
    length = _length_alone(stage, first)
    if (length or (rules and not first.result.independent)) and tone == "good":
        tone = "unsure"
    headline = {"good": "The policy got better.", "bad": "The policy got worse."}.get(
        tone, "No difference is shown between the policy before and after."
    )
    if tone == "unsure" and first.gain.low > 0:
        headline = f"The {first.result.label} rose, but {'length' if length else 'a simple rule'} may explain it."
    if not first.result.independent and tone == "good":
        headline = f"The policy got better by the {first.result.label} that it was trained on."
    alarms = _alarms(stage)
    if alarms and tone == "good":
        tone = "unsure"
    cautions = (*length, *_spent_on_noise(stage, by_samples), *_cautions(by_samples), *alarms, *cautions)
    return Verdict(headline, tone, tuple(_evidence(stage, by_samples)), cautions, tuple(_worth(stage, by_samples)))


def stage_verdict(directory: Path, declaration: Declaration) -> str:
    """The verdict on one finished stage in words: the headline, the evidence, and what weakens it."""
    stage = read_stage(directory, declaration)
    verdict = judge(RunRecord(directory.parent.name, directory.parent, (stage,)))
    sentences = (verdict.headline, *verdict.evidence, *verdict.worth)
    return "\n\n".join([*sentences, *(f"But: {caution}" for caution in verdict.cautions)])


def _evidence(stage: StageRecord, compared: Sequence[Change]) -> list[str]:
    """A sentence for each number that each response has, and one for the KL."""
    sentences = []
    for change in compared:
        trained = "no stage trained on it" if change.result.independent else "the policy was trained on it"
        source = f" `{change.source}`" if change.source else ""
        ties = change.prompts - change.wins - change.losses
        sentences.append(
            f"By the {change.result.label}{source} ({trained}): {_from_to(change)} on {change.prompts} held-out "
            f"prompts, a mean gain of {change.shown_gain}. Higher on {change.wins}, equal on {ties}, "
            f"lower on {change.losses}."
        )
        if len(sentences) == 1 and change.gain is not None and change.gain.half_width > 0:
            deviation = change.gain.half_width / student_t(change.prompts - 1) * change.prompts**0.5
            sentences.append(f"{power(change.prompts, deviation)}.")
    row, kl, half = _distance(stage)
    if row is not None:
        sentences.append(f"KL from the reference: {_with_half(kl, half)} nats per response.")
    costs = [_cost(stage, change) for change in changes(stage) if change.result.cost and change.before is not None]
    return sentences + ([f"Cost: {'; '.join(costs)}."] if costs else [])


def _cost(stage: StageRecord, change: Change) -> str:
    """A number before and after, and of a share its paired change with its interval."""
    half = number(stage.values(change.result.metric)[-1], f"{change.result.metric}_gain_ci95")
    if half is None or change.before is None or change.after is None:
        return f"{change.result.label} {_from_to(change)}"
    moved, width = with_half_width(100 * (change.after - change.before), 100 * half)
    return f"{change.result.label} {_from_to(change)} (a change of {moved} ± {width} %)"


def _worth(stage: StageRecord, compared: Sequence[Change]) -> list[str]:
    """A sentence on how many samples before training one response is worth, first by what it was trained on; and one
    on the KL of the best of so many."""
    parts: list[str] = []
    for change in sorted(compared, key=lambda each: each.result.independent):
        metric = change.result.metric
        row = stage.values(metric)[-1]
        n, low, high = (number(row, f"{metric}_worth_{name}") or 0.0 for name in ("best_of", "low", "high"))
        most = number(row, "eval_best_of")
        if n and most:
            samples = "one" if n == 1 else _number(n) + " or more" * (n >= most)
            interval = f"95 %: {_number(low)} to {_number(high)}" if high < most else f"95 %: {_number(low)} or more"
            interval = f"lower 95 % bound {_number(low)}" if n >= most else interval
            shown = "" if low == high else f" ({interval})"
            parts.append(f"{samples}{shown} by the {change.result.label}")
    last, kl, _ = _distance(stage)
    enough = [_enough(last or {}, x.result.metric, kl) for x in compared if not x.result.independent]
    drawn = "draw several from the policy before training and keep the one with the best score"
    worth = [f"To match one response of the tuned policy, {drawn}: {'; '.join(parts)}."] if parts else []
    return [*worth, *filter(None, enough)]


def _number(n: float) -> str:
    """The n of best-of-n."""
    return f"{n:.0f}" if n >= 10 else f"{n:.1f}".removesuffix(".0")


def _enough(row: Row, metric: str, kl: float) -> str:
    """A sentence on the KL that best-of-n needs for the same score, and on the gain at the same KL."""
    names = f"{metric}_worth_best_of", "eval_best_of", f"{metric}_efficiency", f"{metric}_efficiency_ci95"
    n, most, efficiency, half = (number(row, name) for name in names)
    if efficiency is None or not n or not most or n == 1:
        return ""
    more = " or more" if n >= most else ""
    ratio = _with_half(efficiency, half or 0.0)
    far = efficiency + (half or 0.0) < NEAR
    closer = " Half the learning rate and four times the episodes come closer." if far else ""
    needed = f"Best-of-n needs a KL of {short(best_of_n.kl(n))} nats{more} for this score."
    if kl > best_of_n.kl(most):
        drawn = f"best-of-{most:.0f} (KL {short(best_of_n.kl(most))} nats)"
        return (
            f"{needed} The tuned policy has {ratio} times the gain of {drawn}; at equal KL the ratio is lower.{closer}"
        )
    return f"{needed} At the same KL, the tuned policy has {ratio} times the gain of best-of-n.{closer}"


def _distance(stage: StageRecord) -> tuple[Row | None, float, float]:
    """The newest evaluation after training with a KL; the KL, nats per response, and half its interval."""
    name = f"eval_{stage.declaration.report.distance}"
    rows = [row for row in stage.values(name) if row.get("step") != 0]
    kl, half = (number(rows[-1], f"{name}{end}") or 0.0 if rows else 0.0 for end in ("", "_ci95"))
    return rows[-1] if rows else None, kl, half


def _with_half(value: float, half: float) -> str:
    return " ± ".join(with_half_width(value, half)) if half else short(value)


def _spent_on_noise(stage: StageRecord, compared: Sequence[Change]) -> list[str]:
    """A sentence if the policy has moved and has gained nothing, where a gain would have been seen.

    A policy with the KL D, in nats, can raise a normal number, of which the responses to a prompt have the deviation s,
    by s sqrt(2 D). Two responses to a prompt differ by sqrt(2) s. So N prompts show what D can buy if D >= POWER^2 / N.
    """
    row, kl, half = _distance(stage)
    gains = [change.gain for change in compared if change.gain is not None]
    prompts = max(change.prompts for change in compared)
    if row is None or kl - half < POWER**2 / prompts or any(gain.low > 0 or gain.high < 0 for gain in gains):
        return []
    names = " or ".join(f"the {change.result.label}" for change in compared)
    moved = f"the policy moved by {_with_half(kl, half)} nats per response"
    return [f"The KL was spent on noise: {moved}, and no rise of {names} is shown."]


def _length_alone(stage: StageRecord, change: Change) -> list[str]:
    """A sentence if the responses have become longer or shorter, and at equal length no gain is shown."""
    name = change.result.sample
    rows = [row for row in stage.samples if number(row, name) is not None and number(row, f"{name}_before") is not None]
    words = [[len(str(row.get(side)).split()) for side in ("before", "after")] for row in rows]
    longer = torch.tensor([float(after - before) for before, after in words])
    wins = torch.tensor([after - old for old, after in before_and_after(rows, name)]).sign() / 2 + 0.5
    rate, grown = win_rate_at_equal_length(wins, longer), mean_interval(longer)
    if rate is None or rate.low > 0.5 or grown.low <= 0 <= grown.high:
        return []
    low, mean, high = (short(100 * share) for share in (rate.low, rate.mean, rate.high))
    return [
        f"The responses have {short(abs(grown.mean))} words {'more' if grown.mean > 0 else 'fewer'}; at equal length "
        f"the win rate is {mean} %, between {low} and {high}."
    ]


def _words_alone(run: RunRecord) -> list[str]:
    """A sentence for each number that is no better than a simple rule's."""
    return [
        f"`{stage.directory.name}`: {change.result.label} {change.shown(change.after)} {change.shown_half_width}, by "
        f"{rule} {change.shown(value)}: it is not shown that the network knows more."
        for stage in run.stages
        for change in changes(stage)
        for rule, value in change.baselines
        if (change.after or 0.0) - (change.half_width or 0.0) <= value
    ]


def _alarms(stage: StageRecord) -> list[str]:
    """A sentence for each warning that a higher reward may not be a better model."""
    return [
        f"Warning `{row['name']}` at step {row.get('step')}: {row.get('advice', '')}."
        for row in stage.of_kind("warning")
        if row.get("name") in stage.declaration.report.alarms
    ]


def _cautions(compared: Sequence[Change]) -> list[str]:
    """What the numbers of the result say against it."""
    independent = [change for change in compared if change.result.independent]
    trained = [change for change in compared if not change.result.independent]
    cautions = []
    if not independent:
        cautions.append(
            "No independent judge was used. A reward that is optimised rises even where responses get worse; name a "
            "`--judge`, or read the samples."
        )
    fell = [change for change in independent if change.gain is not None and change.gain.high < 0]
    rose = [change for change in trained if change.gain is not None and change.gain.low > 0]
    if fell and rose:
        cautions.append("The score rose while the judge fell: the policy exploits its reward (over-optimisation).")
    elif rose and independent and ((gain := independent[0].gain) is None or gain.low <= 0):
        cautions.append(
            "The score that the policy was trained on rose, and the judge shows no gain: what the reward model has "
            "learned may not be what the judge measures. Read the samples."
        )
    return cautions


def _stale(run: RunRecord) -> dict[str, str]:
    """A sentence for each stage that started from another stage's output than the run has now, by its name."""
    now = {str(stage.directory.resolve()): stage for stage in run.stages}
    return {
        stage.directory.name: f"`{stage.directory.name}` is stale: `{now[path].directory.name}`, from which it "
        "started, was made again since; --overwrite runs the stale stage again."
        for stage in run.stages
        for entry in (stage.manifest or {}).get("inputs", {}).values()
        for path in (str(Path(entry["path"]).resolve()), str(Path(entry["path"]).resolve().parent))
        if path in now and entry["manifest_sha256"] != (now[path].manifest or {}).get("sha256")
    }


def _unfinished(run: RunRecord) -> list[str]:
    return [
        f"`{stage.directory.name}` is unfinished: {stage.steps} steps are recorded. The command that started it "
        "resumes it."
        for stage in run.stages
        if stage.manifest is None
    ]


def _from_to(change: Change) -> str:
    if change.before is None:
        return change.shown(change.after)
    return f"{change.shown(change.before)} → {change.shown(change.after)}"

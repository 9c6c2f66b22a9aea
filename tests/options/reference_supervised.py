"""What steps 1 and 2 must make of the batches they trained on: the losses of their papers in float64."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.options import reference
from tests.options.comparison import Comparison
from tests.options.harness import Ids, Observed
from tests.options.reference import Network, Trainer
from tests.options.rows import ASSISTANT, HUMAN


def rows_of_steps(o: dict[str, Any], observed: Observed, sizes: dict[Any, tuple[int, ...]]) -> list[list[Any]]:
    """The rows of each optimizer step: as many as batch_size or batch_tokens asks for, fewer in the last one of an
    epoch. Every row is in every epoch.

    sizes: of all rows there are, the tokens (of a pair those of its longer side), and other numbers that the rows of a
    batch may have in common where they are grouped by length.
    """
    steps = [[row for micro in micros for row in micro] for _, micros in observed.batches]
    for rows, (_, micros) in zip(steps, observed.batches, strict=True):
        require_micro_batches(o, micros, len(rows), observed.ranks)
    an_epoch = len(steps) // o["num_train_epochs"] if o["batch_tokens"] else math.ceil(len(sizes) / o["batch_size"])
    assert an_epoch and len(steps) <= an_epoch * o["num_train_epochs"]
    epochs = [steps[start : start + an_epoch] for start in range(0, len(steps), an_epoch)]
    for epoch in epochs:
        rows = [row for step in epoch for row in step]
        assert len(set(rows)) == len(rows) and set(rows) <= set(sizes)
        assert len(rows) == len(sizes) or (epoch is epochs[-1] and len(epoch) < an_epoch)
    assert len(epochs) == 1 or epochs[0] != epochs[1]
    if o["batch_tokens"]:
        most = max(sum(sizes[row][0] for row in step) for step in steps)
        more = (observed.ranks - 1) * max(size[0] for size in sizes.values())
        assert most - more <= o["batch_tokens"] < 2 * most
    else:
        whole, rest = divmod(len(sizes), o["batch_size"])
        for epoch in epochs:
            numbers = [*[o["batch_size"]] * whole, *[rest][: rest > 0]]
            assert [len(step) for step in epoch] == numbers[: len(epoch)]
        epochs[0] = epochs[0][:whole]  # the rows of a smaller last step are of any length
    measures = range(len(next(iter(sizes.values()))))
    grouped = any(apart([[sizes[row][measure] for row in step] for step in epochs[0]]) for measure in measures)
    if observed.ranks == 1 or not o["batch_tokens"]:  # else a batch may have a row of the next, to be even
        assert grouped == bool(o["group_by_length"] or o["batch_tokens"])
    return steps


class Watch:
    """The evaluations of a run: when they are due, the best network, and when patience ends."""

    def __init__(
        self, o: dict[str, Any], network: Network, total: int, evaluate: Callable[[Network], dict[str, float]]
    ):
        self.o, self.network, self.total, self.evaluate = o, network, total, evaluate
        self.best, self.values, self.best_step = network.copy(), list[float](), 0
        number, epochs, _ = (o["eval_every"] or "1epochs").partition("epoch")
        self.every = round(float(number) * (total / o["num_train_epochs"] if epochs else 1))

    def after(self, step: int) -> dict[str, float]:
        """The metrics that are added to those of a step."""
        name = self.o["keep_best"]
        if not (self.every and step % self.every == 0 and step < self.total) and not (name and step == self.total):
            return {}
        metrics = self.evaluate(self.network)
        if name:
            self.values.append(metrics[name] if name == "eval_accuracy" else -metrics[name])
            if self.values.index(max(self.values)) == len(self.values) - 1:
                self.best, self.best_step = self.network.copy(), step
        return metrics

    @property
    def is_over(self) -> bool:
        patience, values = self.o["patience"], self.values
        return patience is not None and len(values) - 1 - values.index(max(values)) >= patience if values else False

    def end(self, run: Comparison, title: str, metrics: dict[str, float]) -> None:
        """The last metrics and weights: of the best network if it is kept."""
        if not self.o["keep_best"]:
            return run.end(metrics | self.evaluate(self.network), {title: self.network})
        metrics |= self.evaluate(self.best) | {"eval_best_step": float(self.best_step)}
        run.end(metrics, {title: self.best, "best": self.best})


def require_micro_batches(o: dict[str, Any], micros: Sequence[Sequence[Any]], rows: int, ranks: int) -> None:
    """The `rows` of a step, dealt evenly to `ranks`, are in as few micro-batches as micro_batch_size allows."""
    sizes = [len(micro) for micro in micros]
    assert sum(sizes) == rows and max(sizes) <= o["micro_batch_size"]
    assert len(sizes) == ranks * math.ceil(rows / ranks / o["micro_batch_size"])


def apart(sizes: list[list[int]]) -> bool:
    """Whether no two batches overlap in size."""
    ranges = sorted((min(batch), max(batch)) for batch in sizes)
    return all(one[1] <= other[0] for one, other in pairwise(ranges))


def learned(o: dict[str, Any], ids: Ids) -> list[int]:
    """The positions of a dialogue, or of a text, that are learned."""
    if o.get("objective", o.get("ptx_objective")) == "text" or o.get("loss_on") == "all":
        return list(range(1, len(ids)))
    names = [s for s, token in enumerate(ids) if token in (HUMAN, ASSISTANT)]
    if o.get("loss_on", "last") == "last":
        return list(range(names[-1] + 1, len(ids)))
    turns = pairwise([*names, len(ids)])
    return [s for start, end in turns if ids[start] == ASSISTANT for s in range(start + 1, end)]


def token_loss(network: Network, o: dict[str, Any], rows: Sequence[Ids]) -> Tensor:
    """The mean over the tokens that are learned of -log pi(token | tokens before it)."""
    logprobs, _ = network.logprobs(rows)
    return -torch.cat([logprobs[b, learned(o, ids)] for b, ids in enumerate(rows)]).mean()


def fine_tuning(o: dict[str, Any], run: Comparison, train: Sequence[Ids], held_out: Sequence[Ids]) -> None:
    steps = rows_of_steps(o, run.observed, {ids: (len(ids),) for ids in train})
    total = steps_of(o, len(train), steps)
    policy = Trainer(reference.load(o["model"]), o, o["learning_rate"], total)

    def perplexity(network: Network) -> dict[str, float]:
        return {"eval_perplexity": math.exp(token_loss(network, o, held_out))}

    watch = Watch(o, policy.network, total, perplexity)
    before = perplexity(policy.network)["eval_perplexity"]
    for number, rows in enumerate(steps, start=1):
        assert not watch.is_over, "the run went on"

        def loss(network: Network, rows: list[Any] = rows) -> tuple[Tensor, dict[str, Tensor]]:
            nll = token_loss(network, o, rows)
            return nll, {"nll": nll}

        run.step(policy.take_step(loss) | watch.after(number))
    assert watch.is_over or len(steps) == total
    watch.end(run, "policy", {"eval_perplexity_before": before})


def steps_of(o: dict[str, Any], rows: int, steps: list[Any]) -> int:
    """The optimizer steps of a whole run."""
    return len(steps) if o["batch_tokens"] else math.ceil(rows / o["batch_size"]) * o["num_train_epochs"]


Pair = tuple[Ids, Ids, int, float]
"""chosen, rejected, tokens of the prompt, margin"""


def reward_model(o: dict[str, Any], run: Comparison, train: Sequence[Pair], held_out: Sequence[Pair]) -> None:
    """loss = mean of -log sigmoid(chosen - rejected - margin) + centering * (chosen + rejected)^2, and more terms."""
    objective, *given = o["objective"].split(",")
    token_coef = 0.5 if objective == "every_token" else 0.0
    pairs = (option.split("=") for option in given)
    o = o | {"centering": 0.0, "label_smoothing": 0.0, "token_coef": token_coef} | {name: float(x) for name, x in pairs}
    margins = {(chosen, rejected): margin for chosen, rejected, _, margin in train}
    prompts = {(chosen, rejected): prompt for chosen, rejected, prompt, _ in train}
    sizes = {(c, r): (max(len(c), len(r)), min(len(c), len(r)), len(c) + len(r) - prompt) for c, r, prompt, _ in train}
    steps = rows_of_steps(o, run.observed, sizes)
    start = reference.with_new_head(reference.load(o["model"]), o["seed"])
    total = steps_of(o, len(train), steps)
    reward = Trainer(start, o, o["learning_rate"], total, o["head_learning_rate"])

    def scores(network: Network, rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
        return network.scores([row[0] for row in rows]), network.scores([row[1] for row in rows])

    def held_out_metrics(network: Network) -> dict[str, float]:
        chosen, rejected = scores(network, held_out)
        both = torch.cat([chosen, rejected])
        return {
            "eval_accuracy": (chosen > rejected).double().mean().item(),
            "eval_loss": torch.log1p(torch.exp(rejected - chosen)).mean().item(),
            "eval_margin": (chosen - rejected).mean().item(),
            "eval_score_mean": both.mean().item(),
            "eval_score_std": both.std(correction=0).item(),
        }

    watch = Watch(o, reward.network, total, held_out_metrics)
    for number, rows in enumerate(steps, start=1):
        assert not watch.is_over, "the run went on"

        def loss(network: Network, rows: list[Any] = rows) -> tuple[Tensor, dict[str, Tensor]]:
            chosen, rejected = scores(network, rows)
            gap, margin = chosen - rejected, torch.tensor([margins[row] for row in rows], dtype=torch.float64)
            right, swapped = torch.log1p(torch.exp(margin - gap)), torch.log1p(torch.exp(gap - margin))
            value = (1 - o["label_smoothing"]) * right + o["label_smoothing"] * swapped
            value = (value + o["centering"] * (chosen + rejected) ** 2).mean()
            metrics = {"accuracy": (gap > 0).double().mean(), "margin": gap.mean()}
            if o["token_coef"]:
                each = [token_losses(o, network, row, prompts[row]) for row in rows]
                metrics["token_loss"] = torch.stack(each).mean()
                value = value + o["token_coef"] * metrics["token_loss"]
            return value, metrics

        run.step(reward.take_step(loss) | watch.after(number))
    assert watch.is_over or len(steps) == total
    watch.end(run, "reward", {})


def token_losses(o: dict[str, Any], network: Network, row: tuple[Any, Any], prompt: int) -> Tensor:
    """The mean loss over the pairs of tokens from the first one that differs to the end of the shorter response."""
    sides, end = list(map(list, row)), min(map(len, row))
    first = next((t for t in range(prompt, end) if sides[0][t] != sides[1][t]), end)
    chosen, rejected = network.scalars(sides)[:, first:end]
    gaps = chosen - rejected
    right, swapped = torch.log1p(torch.exp(-gaps)), torch.log1p(torch.exp(gaps))
    each = (1 - o["label_smoothing"]) * right + o["label_smoothing"] * swapped
    return (each + o["centering"] * (chosen + rejected) ** 2).sum() / max(1, end - first)

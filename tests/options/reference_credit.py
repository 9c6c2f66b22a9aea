"""Scores, rewards, credit and losses of step 3 in float64, row by row from the papers' equations."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Row = list[float]


def kl(estimator: str, d: Any) -> Any:
    """Of d = log policy - log reference (Schulman 2020)."""
    if estimator == "k1":
        return d
    return d * d / 2 if estimator == "k2" else (torch.exp(-d) if isinstance(d, Tensor) else math.exp(-d)) - 1 + d


@dataclass
class Scored:
    """A rollout as an algorithm gets it: of each response its score, and of each of its tokens three numbers."""

    scores: Row
    old: list[Row]
    ref: list[Row]
    values: list[Row]


class Scaling:
    """score' = clip((score [- mean]) / std), mean and biased std over all scores of the run so far."""

    def __init__(self, o: dict[str, Any]) -> None:
        self.o, self.past = o, torch.zeros(0, dtype=torch.float64)

    def __call__(self, scores: Row) -> Row:
        now = torch.tensor(scores, dtype=torch.float64)
        if self.o["use_score_scaling"]:
            self.past = torch.cat([self.past, now])
            now = (now - (self.past.mean() if self.o["use_score_norm"] else 0)) / self.past.std(correction=0)
        clip = self.o["score_clip"] or math.inf
        return [min(max(score, -clip), clip) for score in now.tolist()]


def rewards(o: dict[str, Any], scored: Scored, kl_coef: float) -> list[Row]:
    """reward_t = -kl_coef * kl_t, and the score at the last token."""
    rows = [
        [-kl_coef * (p - q) for p, q in zip(*pair, strict=True)] for pair in zip(scored.old, scored.ref, strict=True)
    ]
    return [[*row[:-1], row[-1] + score] for row, score in zip(rows, scored.scores, strict=True)]


def gae(rows: list[Row], values: list[Row], gamma: float, lam: float) -> tuple[list[Row], list[Row]]:
    """advantage_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t; return_t = adv_t + V_t."""
    advantages, returns = [], []
    for reward, value in zip(rows, values, strict=True):
        delta = [r + gamma * after - v for r, v, after in zip(reward, value, [*value[1:], 0.0], strict=True)]
        sums = [sum((gamma * lam) ** i * d for i, d in enumerate(delta[t:])) for t in range(len(delta))]
        advantages.append(sums)
        returns.append([a + v for a, v in zip(sums, value, strict=True)])
    return advantages, returns


def white(rows: list[Row]) -> list[Row]:
    """Mean 0 and variance 1 over all tokens."""
    every = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    mean, deviation = every.mean().item(), every.var(correction=0).add(1e-8).sqrt().item()
    return [[(x - mean) / deviation for x in row] for row in rows]


def on_tokens(numbers: Row, rows: list[Row]) -> list[Row]:
    return [[x] * len(row) for x, row in zip(numbers, rows, strict=True)]


def credit(o: dict[str, Any], scored: Scored, kl_coef: float) -> tuple[list[Row], list[Row]]:
    """Advantages and returns of every token."""
    name, group, scores = o["algorithm"], o["num_generations"], scored.scores
    groups = [range(i - i % group, i - i % group + group) for i in range(len(scores))]
    if name == "best_of_n":
        best = {max(rows, key=lambda j: (scores[j], -j)) for rows in groups}
        return on_tokens([float(i in best) for i in range(len(scores))], scored.old), on_tokens(scores, scored.old)
    if name == "grpo":
        means = [sum(scores[j] for j in rows) / group for rows in groups]
        squares = [sum((scores[j] - m) ** 2 for j in rows) for rows, m in zip(groups, means, strict=True)]
        over = [math.sqrt(s / (group - 1)) + 1e-4 if o["scale_rewards"] else 1.0 for s in squares]
        if o["scale_rewards"] and o["scale_rewards_by"] == "batch":
            over = [torch.tensor(scores, dtype=torch.float64).std(correction=0).item() + 1e-4] * len(groups)
        centred = [(s - m) / d for s, m, d in zip(scores, means, over, strict=True)]
        return on_tokens(centred, scored.old), on_tokens(scores, scored.old)
    rows = rewards(o, scored, kl_coef)
    if name == "rloo":
        totals = [sum(row) for row in rows]
        baselines = [sum(totals[j] for j in rows if j != i) / (group - 1) for i, rows in enumerate(groups)]
        advantages = on_tokens([t - x for t, x in zip(totals, baselines, strict=True)], scored.old)
        return (white(advantages) if o["whiten_advantages"] else advantages), on_tokens(totals, scored.old)
    if name == "reinforce":
        returns = [[sum(o["gamma"] ** i * r for i, r in enumerate(row[t:])) for t in range(len(row))] for row in rows]
        return white(returns), returns
    advantages, returns = gae(rows, scored.values, o["gamma"], o["lam"])
    return (white(advantages) if o["whiten_advantages"] else advantages), returns


@dataclass
class Tokens:
    """N response tokens of an optimizer step, [N] each; `old`, `ref`, `advantage`, `value`, `target` are constants."""

    old: Tensor
    ref: Tensor
    advantage: Tensor
    value: Tensor
    target: Tensor
    lengths: list[int]
    """of each response"""


def weights(o: dict[str, Any], lengths: list[int]) -> Tensor:
    """What each token's loss is multiplied by before the sum: alike for every token of the step, for every response, or
    whatever there is in the step."""
    each = {
        "token": [1 / sum(lengths) for _ in lengths],
        "sequence": [1 / (len(lengths) * n) for n in lengths],
        "constant": [1 / (len(lengths) * o["response_length"]) for _ in lengths],
    }[o["loss_aggregation"]]
    return torch.tensor([w for w, n in zip(each, lengths, strict=True) for _ in range(n)], dtype=torch.float64)


def policy_loss(o: dict[str, Any], new: Tensor, t: Tokens, kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over tokens of the algorithm's loss. new [N]"""
    name, ratio = o["algorithm"], torch.exp(new - t.old)
    if o.get("importance_sampling_level") == "sequence":
        means = [torch.exp(d.mean()).expand(len(d)) for d in (new - t.old).split(t.lengths)]
        ratio = torch.cat(means)
    metrics = {"approx_kl": kl("k3", t.old - new).mean()}
    if name == "best_of_n":
        return -new.mean(), metrics | {"nll": -new.mean()}
    free = -t.advantage * ratio
    metrics |= {"ratio_mean": ratio.mean(), "ratio_square": (ratio - 1).square().mean()}
    if name == "a2c":
        return free.mean(), metrics | {"clip_fraction": torch.zeros(())}
    high = o["cliprange"] if o["cliprange_high"] is None else o["cliprange_high"]
    clipped = -t.advantage * ratio.clamp(1 - o["cliprange"], 1 + high)
    loss = torch.maximum(free, clipped)
    metrics["clip_fraction"] = (clipped > free).double().mean()
    if o["dual_clip"] is not None:
        most = torch.where(t.advantage < 0, -t.advantage * o["dual_clip"], math.inf)
        metrics["dual_clip_fraction"] = (most < loss).double().mean()
        loss = torch.minimum(loss, most)
    weight, cap = weights(o, t.lengths), o["tis_cap"]
    if cap is not None:  # the sampler has the log-probs of the trainer
        metrics |= {"tis_weight": torch.tensor(min(1.0, cap)), "tis_capped": torch.tensor(float(cap < 1))}
        loss = min(1.0, cap) * loss
    if name == "grpo":
        penalty = (weight * kl(o["kl_estimator"], new - t.ref)).sum()
        return (weight * loss).sum() + kl_coef * penalty, metrics | {"kl_loss": penalty}
    return (weight * loss).sum(), metrics


def value_loss(o: dict[str, Any], new: Tensor, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 * mean of max((V - R)^2, (clip(V) - R)^2); A2C does not clip. new [N]"""
    reach = math.inf if o["algorithm"] == "a2c" else o["cliprange_value"]
    near = t.value + (new - t.value).clamp(-reach, reach)
    free, clipped = (new - t.target).square(), (near - t.target).square()
    binds = (clipped > free) & ((new - t.value).abs() > reach)
    return 0.5 * torch.maximum(free, clipped).mean(), {"value_clip_fraction": binds.double().mean()}


class Steering:
    """The KL coefficient of each iteration from its own rollout, by the closed form of its controller.

    log kl_coef = log kl_coef_1 + sum_i min(1, g_i/N) e_i + 2 e_n, with e = log of (KL + B/10) / (wanted + B/10), within
    +-1, for a budget B, and g = 12 if e < 0 or KL > B, else 0. kl_coef_1 is 0.4 deviation / sqrt(2 B). After n of N
    iterations all KLs from (1 - (1 - n/N)^2)^2 B to (1 - (1 - n/N)^4) B are wanted.
    """

    def __init__(self, o: dict[str, Any]) -> None:
        self.o, self.lasting, self.errors = o, list[float](), list[float]()
        self.first: float = 0.0 if o.get("kl_budget") is not None else o.get("kl_coef", 0.0)
        self.iterations = o["total_episodes"] // o["batch_size"] - o["critic_warmup_iterations"]

    def coef(self) -> float:
        if not self.errors:
            return self.first
        return self.first * math.exp(math.fsum(self.lasting) + 2 * self.errors[-1])

    def observe(self, kl_of_responses: float, scores: Row) -> None:
        budget, done = self.o.get("kl_budget"), len(self.errors)
        if budget is None:
            return
        left = 1 - done / self.iterations
        wanted = sorted([budget * (1 - left**2) ** 2, kl_of_responses, budget * (1 - left**4)])[1]
        if not self.errors:
            deviation = torch.tensor(scores, dtype=torch.float64).std(correction=0).item()
            self.first = 0.4 * deviation / math.sqrt(2 * budget)
        ratio = (kl_of_responses + budget / 10) / (wanted + budget / 10)
        error = min(1.0, max(-1.0, math.log(ratio))) if ratio > 0 else -1.0
        self.errors.append(error)
        lasts = error < 0 or kl_of_responses > budget
        self.lasting.append(error * min(1.0, 12 / self.iterations) if lasts else 0.0)

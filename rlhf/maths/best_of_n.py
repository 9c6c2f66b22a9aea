"""Best-of-n sampling: of n responses to a prompt, the one with the highest score of a selector. Pure functions.

At equal KL no policy has a higher mean score than the Gibbs policy, and best-of-n comes close to it (Beirami et al.
2024, arXiv 2401.01879; Yang et al. 2024, arXiv 2404.01730). So best-of-n of the policy that a run starts from says how
much of the possible gain the run has reached: `worth` at equal score, `efficiency` at equal KL.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.maths.intervals import Interval, student_t


def expected_scores(selector: Tensor, scores: Tensor) -> Tensor:
    """The mean of `scores` of the response that `selector` chooses among n, over all subsets of n of the K responses.

        sum_i C(i - 1, n - 1) / C(K, n) score_(i),   i = 1, ..., K in the order of the selector
    (WebGPT, arXiv 2112.09332, appendix I: unbiased). Equal responses of the selector keep their order, which is random.
    selector, scores [P, K]: of K responses to each of P prompts -> float64 [P, K], of n = 1, ..., K.
    """
    k = scores.shape[1]
    n = torch.arange(1, k + 1, dtype=torch.float64)
    i = n[:, None]
    log_weights = _log_choose(i - 1, (n - 1).minimum(i - 1)) - _log_choose(n.new_tensor(k), n)
    in_order = scores.double().gather(1, selector.argsort(dim=1, stable=True))
    return in_order @ log_weights.exp().masked_fill(i < n, 0.0)


def expected_gains(selector: Tensor, scores: Tensor) -> Tensor:
    """`expected_scores` less the mean score of a response to the prompt: float64 [P, K], of n = 1, ..., K."""
    return expected_scores(selector, scores) - scores.double().mean(1, keepdim=True)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def kl(n: float) -> float:
    """KL of best-of-n to the policy that is sampled, nats per response: ln n - (n - 1) / n (arXiv 2210.10760).

    Exact if no two responses are equal, else an upper bound (Beirami et al. 2024, arXiv 2401.01879).
    n between two integers is the mixture of both that has the mean size n; then it is an upper bound, too.
    """
    return math.log(n) - (n - 1) / n


def size_at(nats: float) -> float:
    """The n >= 1 with kl(n) = nats >= 0: ln n lies between nats and nats + 1."""
    return math.exp(_bisect(lambda log_n: kl(math.exp(log_n)) - nats, nats, nats + 1))


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0, to the last bits."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def sizes(k: int) -> list[int]:
    """1, 2, 4, ... and k itself."""
    return [2**power for power in range(k.bit_length()) if 2**power < k] + [k]


def worth(gains: Tensor, best: Tensor) -> Interval:
    """The n whose best-of-n has a policy's mean gain, with its 95 % interval over prompts.

    gains [N]: of the policy over the policy that it started from, of each prompt
    best [P, K]: gain of best-of-n, n = 1, ..., K, for the first P <= N of these prompts, P >= 2
    Linear between two n. K stands for K or more: nothing is extrapolated. The interval has every n at which the mean
    difference of the two gains may be 0, by Student's t with P - 1 degrees of freedom.
    """
    curve, gain = best.mean(0), gains.mean().item()
    half_width = student_t(len(best) - 1) * _standard_error(gains, best)
    reached = [_first_at(bound, gain) for bound in (curve, curve + half_width, curve - half_width)]
    return Interval(reached[0], min(reached[0], reached[1]), max(reached[0], reached[2]))


def efficiency(gains: Tensor, best: Tensor, nats: Tensor) -> Interval | None:
    """A policy's mean gain divided by that of best-of-n at the policy's KL, with its 95 % interval by the delta method.

    gains, best: as in `worth`. nats [N]: log pi(y|x) - log ref(y|x) of the policy's responses, whose mean is the KL.
    Where the KL is above kl(K), it is the ratio to best-of-K: the efficiency is at most that. None: best-of-n has no
    gain there.
    """
    mean_kl, k = nats.double().mean().item(), best.shape[1]
    n = min(float(k), size_at(max(0.0, mean_kl)))
    at, slope = _at(best, n), 0.0
    most = at.mean().item()
    if n <= 1 or most <= 0:
        return None
    if n < k:  # d gain / d KL, as d KL / d n = (n - 1) / n^2
        step = best[:, min(k - 1, int(n))] - best[:, int(n) - 1]
        slope = step.mean().item() * n**2 / (n - 1)
    ratio = gains.mean().item() / most
    error = _standard_error(gains.double() - ratio * slope * nats.double(), ratio * at[:, None]).item()
    half_width = student_t(len(best) - 1) * error / most
    return Interval(ratio, ratio - half_width, ratio + half_width)


def gibbs(scores: Tensor, nats: float) -> tuple[float, float] | None:
    """(gain, effective sample size) of the Gibbs policy pi_ref(y|x) exp(score / beta) / Z(x) whose KL is `nats`.

        w_ij = exp(s_ij / beta) / sum_j exp(s_ij / beta);   KL = mean_i sum_j w_ij ln(K w_ij)
        gain = mean_i sum_j (w_ij - 1 / K) s_ij;            size = mean_i 1 / sum_j w_ij^2
    At this KL no policy gains more. scores [P, K]: of K responses of pi_ref to each of P prompts. The weights are
    normalised over the K responses, so a small effective sample size makes the gain too small.
    None: K responses do not reach this KL.
    """
    scores, k = scores.double(), scores.shape[1]
    spread = scores.std().item()

    def weights(log_scale: float) -> Tensor:
        return torch.softmax(scores * (math.exp(log_scale) / spread), dim=1)

    def distance(w: Tensor) -> float:
        return (torch.special.entr(w).sum(1).mean().neg() + math.log(k)).item()

    if spread == 0 or distance(weights(10.0)) < nats:
        return None
    w = weights(_bisect(lambda log_scale: distance(weights(log_scale)) - nats, -10.0, 10.0))
    return ((w - 1 / k) * scores).sum(1).mean().item(), (1 / w.square().sum(1)).mean().item()


def _standard_error(gains: Tensor, best: Tensor) -> Tensor:
    """Standard errors [K] of mean(best) - mean(gains); `best` has the first P of the N prompts of `gains`."""
    n, p = len(gains), len(best)
    parts = (gains.mean() - gains).double()[:, None].repeat(1, best.shape[1])
    parts[:p] += (best - best.mean(0)) * (n / p)
    return (parts.square().sum(0) / (n * (n - 1))).sqrt()


def _first_at(curve: Tensor, level: float) -> float:
    """The smallest n at which the curve [K] of n = 1, ..., K reaches `level`, linear between two n; else K."""
    values = curve.tolist()
    reached = next((i for i, value in enumerate(values) if value >= level), None)
    if reached is None or reached == 0:
        return float(len(values) if reached is None else 1)
    return reached + (level - values[reached - 1]) / (values[reached] - values[reached - 1])


def _at(best: Tensor, n: float) -> Tensor:
    """The curves [P, K] at n, linear between two n: [P]."""
    low = min(int(n), best.shape[1] - 1)
    return best[:, low - 1] + (n - low) * (best[:, low] - best[:, low - 1])

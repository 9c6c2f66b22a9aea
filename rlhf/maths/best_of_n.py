"""Best-of-n sampling: of n responses to a prompt, the one with the highest score of a selector. Pure functions."""

import math

import torch
from torch import Tensor


def expected_score(selector: Tensor, scores: Tensor, n: int) -> Tensor:
    """The mean of `scores` of the response that `selector` chooses among n, over all subsets of n of the K responses.

        sum_i C(i - 1, n - 1) / C(K, n) score_(i),   i = 1, ..., K in the order of the selector
    (WebGPT, arXiv 2112.09332, appendix I: unbiased). Equal responses of the selector keep their order, which is random.
    selector, scores [P, K]: of K responses to each of P prompts; 1 <= n <= K -> float64 [P].
    """
    k = scores.shape[1]
    weights = [math.comb(i - 1, n - 1) / math.comb(k, n) for i in range(1, k + 1)]
    in_order = scores.double().gather(1, selector.argsort(dim=1, stable=True))
    return in_order @ torch.tensor(weights, dtype=torch.float64)


def kl(n: int) -> float:
    """KL of best-of-n to the policy that is sampled, nats per response: ln n - (n - 1) / n (arXiv 2210.10760).

    Exact if no two responses are equal, else an upper bound (Beirami et al. 2024, arXiv 2401.01879).
    """
    return math.log(n) - (n - 1) / n


def sizes(k: int) -> list[int]:
    """1, 2, 4, ... and k itself."""
    return [2**power for power in range(k.bit_length()) if 2**power < k] + [k]

"""The words-only baseline against Newton's method on the whole matrix."""

import torch

from rlhf.maths.bag_of_words import preference_gaps


def test_the_weights_are_those_of_newtons_method() -> None:
    draw = torch.Generator().manual_seed(0)
    sides = torch.randint(0, 12, (30, 2, 6), generator=draw).tolist()
    train = [(chosen, rejected) for chosen, rejected in sides]
    x = torch.zeros(30, 12, dtype=torch.float64)
    for row, (chosen, rejected) in enumerate(train):
        for v in range(12):
            x[row, v] = (v in chosen) - (v in rejected)
    w = torch.zeros(12, dtype=torch.float64)
    for _ in range(20):
        p = torch.sigmoid(-(x @ w))
        w = w + torch.linalg.solve(x.T @ (x * (p * (1 - p))[:, None]) + torch.eye(12), x.T @ p - w)
    weights = preference_gaps(train, [([v], []) for v in range(12)])
    torch.testing.assert_close(weights, w, rtol=0, atol=1e-5)
    torch.testing.assert_close(preference_gaps(train, train), x @ w, rtol=0, atol=1e-4)
    assert preference_gaps(train, [([40, 3], [3, 41])]).tolist() == [0.0], "words that training has not seen"
    assert preference_gaps([([1], [1])], [([1], [2])]).tolist() == [0.0]

"""Reward functions of a user's: what a response's words are worth, and the same about a score that fp32 cannot hold."""


def score(prompts: list[str], responses: list[str]) -> list[float]:
    return [sum(0.137 * (int(word[1:]) % 5 - 2.3) for word in r.split() if word[0] == "w") for r in responses]


def far(prompts: list[str], responses: list[str]) -> list[float]:
    return [1000.1 + worth for worth in score(prompts, responses)]

"""Directories of runs as the stages write them, without training: metrics and samples by the writers of the product."""

import json
from pathlib import Path
from typing import Any

import torch

from rlhf.training.record import MetricsFile
from step3_ppo.heldout import Evaluation, at_start, compare, write_samples

HALF = "\uf8ff"
"""stands for half of a surrogate pair, which a file can only have as an escape"""
HOSTILE = (
    "<script>document.title = 'run'</script>", "</script></style><img src=x onerror=alert(1)>", "\"quotes\" & 'more'",
    "שלום עולם", f"half of a pair: {HALF}.", "turned \u202e around", "{{ 7 * 7 }} {% raw %}", 
    "bell \x07 and escape \x1b[31m",
)  # fmt: skip
"""texts that models and datasets may have"""


def evaluation(scores: list[float], judged: list[float] | None, kl: float, responses: list[str]) -> Evaluation:
    n = len(scores)
    return Evaluation(
        prompts=tuple(f"<s>Human: question {i}" for i in range(n)),
        responses=tuple(responses),
        tokens=tuple([i] for i in range(n)),
        scores=torch.tensor(scores),
        judge_scores=None if judged is None else torch.tensor(judged),
        kl=torch.tensor([kl + 0.01 * i for i in range(n)]),
        ref_nll=torch.full((n,), 2.0),
        lengths=torch.full((n,), 4.0),
        ended=torch.ones(n),
        distinct_2=0.5,
        questions=tuple(f"question {i}" for i in range(n)),
    )


def finish(directory: Path, **manifest: Any) -> None:
    versions = {"python": "3.11", "torch": "2.13"}
    content = {
        "hardware": {"device": "a CPU, 2 cores", "processes": 2},
        "versions": versions,
        "inputs": {"model": {"path": str(directory.resolve().parent / "step0/model"), "manifest_sha256": None}},
        "models": ["model"],
        "metrics": {"eval_best_step": 40.0},
    }
    (directory / "manifest.json").write_text(json.dumps(content | manifest))


def supervised(
    directory: Path, metrics: dict[str, float], steps: int = 80, before: bool = True, objective: str = "response"
) -> None:
    """A finished step 1 or 2, whose loss falls as 1/step."""
    directory.mkdir(parents=True)
    file = MetricsFile(directory / "metrics.jsonl")
    if before:
        file.write("eval", 0, {name: 2 * value for name, value in metrics.items()})
    for step in range(1, steps + 1):
        file.write(
            "train",
            step,
            {"loss": 1 / step + 0.1 * (step % 2), "grad_norm": float(step % 7), "accuracy": 0.5, "peak_memory_gb": 1.5},
        )
    end = {f"{name}_before": 2 * value for name, value in metrics.items()} if before else {}
    file.write("eval", steps, end | metrics)
    file.close()
    (directory / "config.yaml").write_text(
        f"learning_rate: 0.001\ndata_path: [my <data>.jsonl]\nobjective: {objective}\n"
    )
    outcomes = {"train": 70, "evaluation": 10, "empty response": 15, "of another phase's share": 5}
    train = {"rows": 70, "shortened": 3, "rows_by_source": [70], "tokens_by_source": [700]}
    sources = [{"data_path": "my <data>.jsonl", "rows": 100, "outcomes": outcomes, "bad": []}]
    (directory / "data.json").write_text(json.dumps({"train": train, "sources": sources}))
    finish(directory)


def reinforcement(
    directory: Path, gains: tuple[float, float | None], responses: list[str] | None = None, iterations: int = 6
) -> None:
    """A finished step 3. gains: mean rise of the score and of the judge (None: no judge), each with a spread of 0.1."""
    directory.mkdir(parents=True)
    texts = responses or [f"answer {i}" for i in range(8)]
    base, score_gain, judge_gain = [0.1 * i for i in range(len(texts))], *gains
    judged = None if judge_gain is None else base

    def at(share: float) -> Evaluation:
        def raised(gain: float) -> list[float]:
            return [x + share * (gain + (0.1 if i % 2 else -0.1)) for i, x in enumerate(base)]

        return evaluation(raised(score_gain), None if judge_gain is None else raised(judge_gain), 3 * share, texts)

    before = evaluation(base, judged, 0.0, [f"before {i}" for i in range(len(texts))])
    file = MetricsFile(directory / "metrics.jsonl")
    file.write("eval", 0, at_start(before))
    for step in range(1, iterations + 1):
        file.write("train", step, {"score": step / 7, "kl": step / 2, "response_length": 4.0, "entropy": 1 / step})
        file.write("eval", step, compare(before, at(step / iterations)))
    samples = directory / "samples.jsonl"
    write_samples(samples, iterations, before, at(1.0))
    samples.write_text(samples.read_text(encoding="utf-8").replace(HALF, "\\ud83d"), encoding="utf-8")
    file.close()
    judge = "null" if judge_gain is None else "my_judge.py:score"
    (directory / "config.yaml").write_text(f"reward: [learned]\njudge: {judge}\nlearning_rate: 1.0e-06\n")
    finish(directory)


def run(directory: Path, gains: tuple[float, float | None] = (1.0, 0.5), responses: list[str] | None = None) -> Path:
    """The three stages."""
    supervised(directory / "step1_sft", {"eval_perplexity": 4.0})
    pairwise = {"eval_accuracy": 0.75, "eval_loss": 0.5}
    supervised(directory / "step2_reward", pairwise, before=False, objective="pairwise")
    pairs = {"chosen": [2.0, 1.0, 0.5, 3.0], "rejected": [0.0, 2.0, 0.0, -1.0], "weight": [1.0] * 4}
    (directory / "step2_reward/heldout_scores.json").write_text(json.dumps(pairs))
    reinforcement(directory / "step3_ppo", gains, responses)
    return directory

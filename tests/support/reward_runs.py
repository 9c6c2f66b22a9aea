"""Steps of a tiny reward model on ranked lists and pairs with margins, the same for one process and for two."""

import json
import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.dataset import PromptDataset, Recipe, open_datasets
from rlhf.distributed import collectives
from rlhf.engine.training import Engine
from rlhf.models.scalar import ScalarModel
from rlhf.supervised.runner import batches_for
from rlhf.text.tokenizer import prepare_tokenizer
from step2_reward import heldout, objectives, stage
from step2_reward.config import RewardConfig
from tests.support import tiny

LONGEST = 24
"""tokens of a row; one response has more"""
CENTERING = 0.1


def records() -> list[dict[str, Any]]:
    """Lists of 2, 3 and 4 responses: with a tie, with two equal texts, with a response that is too long, with a margin;
    and pairs, most of them with a margin."""
    draw = random.Random(5)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(tiny.WORDS, k=draw.randint(least, most)))

    def ranked(*scores: float, **more: Any) -> dict[str, Any]:
        return {"prompt": words(2, 6), "responses": [words(1, 9) for _ in scores], "scores": scores, **more}

    lists = [ranked(2, 1), ranked(1, 3, 2), ranked(4, 1, 2, 3), ranked(1, 1, 0, 2), ranked(3, 2, 1), ranked(0, 2, 5)]
    lists += [ranked(7, 8, 9, margin=0.5), ranked(1, 2, 3, 4)]
    lists[4]["responses"][1] = lists[4]["responses"][0]
    lists[5]["responses"][2] = words(LONGEST, LONGEST)
    pairs = [{"prompt": words(2, 6), "chosen": words(1, 9), "rejected": words(1, 9)} for _ in range(5)]
    return lists + [pair | ({"margin": 1.5 - i} if i else {}) for i, pair in enumerate(pairs)]


def comparisons(record: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(better response, worse response, margin) of every comparison of one record, by its definition."""
    if "chosen" in record:
        yield record["chosen"], record["rejected"], record.get("margin", 0.0)
        return
    scored = zip(record["responses"], record["scores"], strict=True)
    short = [(text, score) for text, score in scored if len(text.split()) < LONGEST - 2]
    for (one, high), (other, low) in combinations(sorted(short, key=lambda pair: -pair[1]), 2):
        if high > low and one != other:
            yield one, other, record.get("margin", 0.0)


def config_of(folder: Path, **options: Any) -> RewardConfig:
    folder.mkdir(exist_ok=True)
    for name, shape in (("ranked", "responses"), ("pairs", "chosen")):
        rows = [json.dumps(record) for record in records() if shape in record]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    defaults: dict[str, Any] = {
        "data_path": (f"{folder}/ranked.jsonl", f"{folder}/pairs.jsonl"),
        "data_split": (0, 1, 0),
        "eval_fraction": 0.0,
        "data_cache": str(folder / "cache"),
        "max_length": LONGEST,
        "dtype": "fp32",
        "adam_epsilon": 1e-3,  # so that rounding in a gradient of nearly nothing makes no step
        "learning_rate": 1e-2,
        "objective": f"pairwise,centering={CENTERING}",
        "batch_size": len(records()),
    }
    return RewardConfig(**defaults | options)


def rows_of(config: RewardConfig) -> PromptDataset:
    return open_datasets(config, Recipe("reward"), prepare_tokenizer(tiny.tokenizer(), "plain")).train


def scalar_model(family: str = "llama") -> ScalarModel:
    head = nn.Linear(tiny.WIDTH, 1, bias=False)
    with torch.no_grad():
        head.weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    return ScalarModel(tiny.backbone(family, std=0.1), head).eval()


def run(folder: Path, pair_scores: Any = stage.score_separately, **options: Any) -> dict[str, Any]:
    """The metrics of every step and of the evaluation after them, and the weights then."""
    config = config_of(folder, **options)
    dataset = rows_of(config)
    batches = batches_for(dataset, config, (collectives.dp_rank(), collectives.dp_size()))
    reward = Engine(scalar_model(), config, batches.steps(config.num_train_epochs))
    scored = heldout.score_pairs(reward, dataset, config.eval_rows, tiny.PAD, pair_scores)
    before = heldout.evaluate(scored, config.learning_rate)
    steps = stage.steps_of(dataset, batches, config, tiny.PAD)
    metrics = list(stage.train(reward, objectives.load(config), steps, pair_scores))
    return {"before": before, "metrics": metrics, "weights": {n: w.clone() for n, w in reward.fp32_weights()}}


def scores_of(model: ScalarModel, record: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, float]]:
    """(score of the better response, of the worse one, margin) of every comparison of one record, row by row."""

    def score(response: str) -> Tensor:
        words = f"{record['prompt']} {response}".split()
        ids = torch.tensor([[tiny.BOS, *(int(word[1:]) for word in words), tiny.EOS]])
        return model.score(model.backbone(input_ids=ids).last_hidden_state[0, -1]).squeeze()

    for better, worse, margin in comparisons(record):
        yield score(better), score(worse), margin

"""Ratings by attribute: their scale, the mistakes of users, and the model that is saved. Its numbers: tests/options."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from data.build.encode import Preference
from rlhf.errors import UserError
from step2_reward.config import RewardConfig
from step2_reward.ratings import rating_scale
from step2_reward.stage import REWARD_MODELLING
from tests.support import tiny

SIDES = ((1, 4, 2), (1, 5, 2), 1)


def test_the_scale_of_ratings_by_hand() -> None:
    """Attribute a has 1, 3, 5, 7: mean 4 and variance 5; b has 0 and 10."""
    pairs = [
        Preference(*SIDES, ratings=(("a", 1.0, 3.0), ("b", 0.0, 10.0))),
        Preference(*SIDES),
        Preference(*SIDES, ratings=(("a", 5.0, 7.0),)),
    ]
    scale = rating_scale(pairs, ("b", "a"))
    assert scale(torch.tensor([[0.0, 4.0], [5.0, 4 + 5**0.5]])).flatten().tolist() == pytest.approx([-1, 0, 0, 1])


@pytest.mark.parametrize(
    ("ratings", "message"),
    [
        ((("kind", 1.0, 2.0),), r"--attributes long: no training pair has this rating, got kind; expected a column"),
        ((), r"--attributes long: no training pair has this rating, got no ratings at all; expected a column"),
        ((("long", 2.0, 2.0),), r"--attributes long: all ratings are 2, expected different ones; remove it"),
    ],
)
def test_ratings_that_teach_nothing(ratings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rating_scale([Preference(*SIDES, ratings=ratings)] * 3, ("long",))


@pytest.mark.parametrize("other", [{"sft_coef": 0.1}, {"tensor_parallel_size": 2}, {"share_trunk": True}])
def test_a_model_has_one_second_head(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"two heads on one model|the place of the second head"):
        RewardConfig(attributes=("kind",), **other)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_second_head_is_not_saved(tmp_path: Path, dtype: str) -> None:
    """The saved model is a classifier with one label, and has learned ratings that the pairs do not tell.

    All rows have the same two sides, in both orders equally often, so that scores have nothing to learn.
    """
    rows = [
        {
            "prompt": f"w{i} w{i % 3}",
            "chosen": side,
            "rejected": other,
            "attribute_ratings": {"kind": [rating, 1 - rating]},
        }
        for side, other, rating in (("w2 w3", "w4", 1), ("w4", "w2 w3", 0))
        for i in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    config = RewardConfig(
        model=str(tmp_path / "model"),
        data_path=(str(tmp_path / "pairs.jsonl"),),
        data_split=(0, 1, 0),
        eval_fraction=0.25,
        data_cache=str(tmp_path / "cache"),
        output_dir=str(tmp_path / "out"),
        chat_template="plain",
        dtype=dtype,
        max_length=16,
        max_prompt_length=8,
        attributes=("kind",),
        attribute_coef=1.0,
        num_train_epochs=8,
        learning_rate=1e-2,
        batch_size=8,
    )
    REWARD_MODELLING.run(config)
    model = tmp_path / "out/step2_reward/model"
    assert not [name for name in load_file(model / "model.safetensors") if "attributes" in name]
    assert AutoModelForSequenceClassification.from_pretrained(model).config.num_labels == 1
    metrics = map(json.loads, (tmp_path / "out/step2_reward/metrics.jsonl").read_text().splitlines())
    errors = [row["rating_error"] for row in metrics if "rating_error" in row]
    assert errors[0] == pytest.approx(1.0) and errors[-1] < 0.1

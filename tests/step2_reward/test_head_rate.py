"""A head that learns at a rate of its own, on a backbone that stays as it is."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from step2_reward.config import RewardConfig
from step2_reward.stage import REWARD_MODELLING
from tests.support import tiny

STEPS, RATE, PAIRS = 5, 0.02, 12


def test_a_frozen_backbone_is_saved_as_it_was_and_the_head_is_that_of_logistic_regression(tmp_path: Path) -> None:
    """The oracle: AdamW on the head alone, on the last hidden states that transformers computes."""
    for name, first in (("pairs", 0), ("held_out", PAIRS)):
        numbers = range(first, first + PAIRS)
        rows = [{"prompt": f"w{i}", "chosen": f"w{i % 4} w5", "rejected": f"w{i % 3} w6 w7"} for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = tiny.causal_lm()
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    config = RewardConfig(
        model=str(tmp_path / "model"),
        data_path=(str(tmp_path / "pairs.jsonl"),),
        data_split=(0, 1, 0),
        eval_data_path=(str(tmp_path / "held_out.jsonl"),),
        data_cache=str(tmp_path / "cache"),
        output_dir=str(tmp_path / "out"),
        chat_template="plain",
        dtype="fp32",
        max_length=16,
        batch_size=PAIRS,
        micro_batch_size=4,
        num_train_epochs=STEPS,
        learning_rate=0.0,
        head_learning_rate=RATE,
        lr_scheduler_type="constant",
    )
    _, data = REWARD_MODELLING.open_data(config, config.model)
    pairs = [data.train[i] for i in range(len(data.train))]

    def last_state(ids: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]

    differences = torch.stack([last_state(pair.chosen) - last_state(pair.rejected) for pair in pairs])
    width = differences.shape[1]
    head = torch.randn(width, generator=torch.Generator().manual_seed(config.seed)) * (width + 1) ** -0.5
    head.requires_grad_()
    settings = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    adam = torch.optim.AdamW([head], lr=RATE, weight_decay=config.weight_decay, **settings)
    for _ in range(STEPS):
        adam.zero_grad()
        torch.nn.functional.softplus(-differences @ head).mean().backward()
        torch.nn.utils.clip_grad_norm_([head], config.max_grad_norm)
        adam.step()

    REWARD_MODELLING.run(config)
    saved = load_file(tmp_path / "out/step2_reward/model/model.safetensors")
    start = load_file(tmp_path / "model/model.safetensors")
    assert saved["score.weight"].flatten().tolist() == pytest.approx(head.tolist(), abs=1e-5)
    backbone = {name.rpartition("transformer.")[2]: weight for name, weight in saved.items() if "score" not in name}
    for name, weight in start.items():
        if "lm_head" not in name:
            assert torch.equal(backbone[name.rpartition("transformer.")[2]], weight), name

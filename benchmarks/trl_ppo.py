"""TRL's PPOTrainer in the place of step 3, for benchmarks/efficiency.py.

`train` writes the settings of a step 3, and `python -m benchmarks.trl_ppo SETTINGS.json` trains with them in a process
of its own, with TRL 1.12 in PYTHONPATH. TRL's code is not changed. Its batches are given, so that both systems respond
to the same prompts in the same order.

Differences between the libraries: TRL has no gradient clipping (ours: norm 1), changes its learning rate once an
iteration (to the mean of ours), has one loss for both models (vf_coef 0.1, which AdamW's normalisation cancels), and
computes in fp32, its best case: it takes old log-probs from generation, and rounding to bf16 would add noise to its
ratios.
"""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers, trl_trainers

TRAINER = (
    "seed", "num_mini_batches", "num_ppo_epochs", "temperature", "missing_eos_penalty", "kl_coef", "cliprange",
    "cliprange_value", "gamma", "lam", "learning_rate",
)  # fmt: skip
"""options of step 3 that PPOConfig has under the same names"""
SHARED = (
    *TRAINER, "batch_size", "rollout_batch_size", "response_length", "critic_learning_rate", "adam_beta1",
    "adam_beta2", "adam_epsilon", "weight_decay",
)  # fmt: skip
"""options that TRL gets unchanged"""


# --- our process


def train(ppo: Any) -> None:
    """PPOTrainer with the models, prompts and options of a step 3; its policy is then where step 3 has one."""
    folder, stage = Path(ppo.output_dir) / "trl", Path(ppo.output_dir) / "step3_ppo"
    stage.mkdir(parents=True)
    folder.mkdir()
    peers.run("trl_ppo", peers.PPO, settings_of(ppo, folder), folder)
    (folder / "model").rename(stage / "actor")


def settings_of(ppo: Any, folder: Path) -> dict[str, Any]:
    """The settings of TRL's process, with the prompts and the learning rate of every iteration."""
    from rlhf.storage.manifests import resolve_model_path

    prompts, factors = plan(ppo)
    return {name: getattr(ppo, name) for name in SHARED} | {
        "actor_model": str(Path(resolve_model_path(ppo.actor_model, "model")).resolve()),
        "reward_model": str(Path(resolve_model_path(ppo.reward_model, "model")).resolve()),
        "output_dir": str(folder.resolve()),
        "learning_rate_factors": factors,
        "prompts": prompts,
    }


def plan(ppo: Any) -> tuple[list[list[list[int]]], list[float]]:
    """(ids of the prompts of each iteration of step 3 on one device, factors of the peak learning rate: of each
    iteration the mean over its optimizer steps)."""
    from data.batches import Batches
    from rlhf.engine.adamw import schedule
    from step3_ppo.inputs import check
    from step3_ppo.schedule import iterations

    data = check(ppo).prompts
    batches = Batches(len(data.train), ppo.batch_size, ppo.seed)
    count, steps = iterations(ppo), ppo.num_ppo_epochs * ppo.num_mini_batches
    factor = schedule(ppo, count * steps)
    factors = [sum(factor(i * steps + step) for step in range(steps)) / steps for i in range(count)]
    order = islice(batches.until_epoch(epochs=count), count)
    return [[list(data.train[i].ids) for i in indices] for indices in order], factors


# --- TRL's process


def trainer_of(s: dict[str, Any]) -> tuple[Any, Any]:
    """(PPOTrainer, tokenizer). The optimizer is AdamW with the learning rates of actor and critic, iteration by
    iteration. PPOTrainer does not clip gradients, and changes the rate only between iterations."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(s["actor_model"], padding_side="left")
    models = trl_trainers.ppo_models(s["actor_model"], s["reward_model"], torch.float32)
    groups = [
        {"params": list(models["model"].parameters()), "lr": s["learning_rate"]},
        {"params": list(models["value_model"].parameters()), "lr": s["critic_learning_rate"]},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(s["adam_beta1"], s["adam_beta2"]), eps=s["adam_epsilon"], weight_decay=s["weight_decay"]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [*s["learning_rate_factors"], 0.0].__getitem__)
    arguments = trl_trainers.ppo_config(
        s, **{name: s[name] for name in TRAINER}, output_dir=s["output_dir"],
        total_episodes=s["batch_size"] * len(s["prompts"]), stop_token="eos", logging_steps=1,
        local_rollout_forward_batch_size=s["rollout_batch_size"],
    )  # fmt: skip
    trainer = trl_trainers.ppo_trainer(arguments, tokenizer, s["prompts"], optimizers=(optimizer, schedule), **models)
    trainer.dataloader = trl_trainers.prompt_batches(s["prompts"], tokenizer.pad_token_id)
    return trainer, tokenizer


def main() -> None:
    from transformers import set_seed

    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    set_seed(settings["seed"])
    trainer, tokenizer = trainer_of(settings)
    trainer.train()
    for part in (trainer.policy_model, tokenizer):
        part.save_pretrained(Path(settings["output_dir"]) / "model")


if __name__ == "__main__":
    main()

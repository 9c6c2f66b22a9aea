"""TRL's part of benchmarks/preferences.py: `python -m benchmarks.trl_reward SETTINGS.json` trains a RewardTrainer.

Weights and moments are fp32 and the products bf16 (autocast), as here. One pass over the rows, with the same batches'
size, rate, schedule, clipping and optimizer, in micro-batches whose gradients are accumulated. The tokenizer is ours,
whose padding is not its EOS: otherwise the score would be that of the token before the EOS, and then be read at the
EOS.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import trl_trainers


def main() -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    s = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(s["tokenizer"])
    factors = [*s["learning_rate_factors"], 0.0]
    torch.manual_seed(s["seed"])
    model = AutoModelForSequenceClassification.from_pretrained(s["model"], num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    arguments = RewardConfig(
        output_dir=s["output_dir"], per_device_train_batch_size=s["micro_batch_size"], num_train_epochs=1,
        gradient_accumulation_steps=s["batch_size"] // s["micro_batch_size"], seed=s["seed"],
        learning_rate=s["learning_rate"], adam_beta1=s["adam_beta1"], adam_beta2=s["adam_beta2"],
        adam_epsilon=s["adam_epsilon"], weight_decay=s["weight_decay"], max_grad_norm=s["max_grad_norm"],
        max_length=s["max_length"], bf16=True, use_cpu=True, dataloader_pin_memory=False, dataloader_drop_last=False,
        **trl_trainers.PLAIN,
    )  # fmt: skip

    class Scheduled(RewardTrainer):  # type: ignore[misc]
        """With our learning rate at each step: transformers' first step of a warm-up has a rate of 0."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factors.__getitem__)
            return self.lr_scheduler

    trainer = Scheduled(
        model=model, args=arguments, train_dataset=Dataset.from_list(s["rows"]), processing_class=tokenizer
    )
    trainer.train()
    model.save_pretrained(s["output_dir"])
    tokenizer.save_pretrained(s["output_dir"])


if __name__ == "__main__":
    main()

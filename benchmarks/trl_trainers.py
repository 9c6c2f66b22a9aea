"""TRL's trainers as contenders: their arguments, and a pace of one pass for each request of the harness.

Only processes with TRL in PYTHONPATH call these functions (benchmarks/peers.py).
"""

from collections.abc import Callable
from typing import Any

from benchmarks import harness, inputs
from benchmarks.harness import WARM_UP, WorkerPipe

LEARNING_RATE = 1e-5
UNLIMITED = 10**6
"""epochs or steps: a contender works until no more work is requested"""
PLAIN = {"gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
"""arguments of every trainer: no checkpoint, no activation checkpointing, no output"""


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of transformers' Trainer, for SFT and reward model."""
    import torch

    return {
        "output_dir": f"{settings['folder']}/trl",
        "per_device_train_batch_size": settings["batch_size"],
        "max_steps": UNLIMITED,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "bf16": settings["dtype"] == "bf16",
        "torch_compile": settings["peer_compile"],
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",  # so that any stretch of whole passes has every row once a pass
        **PLAIN,
    }


def peft_config(rank: int | None, task: str) -> Any:
    """Our adapter for TRL. task: CAUSAL_LM or SEQ_CLS"""
    from peft import LoraConfig

    return None if rank is None else LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type=task
    )  # fmt: skip


def paced(base: Any, count: Callable[[dict[str, Any]], int]) -> Any:
    """A trainer that adds up `count(batch)` over its batches."""

    class Paced(base):  # type: ignore[misc]
        counted = 0

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
            self.counted += count(inputs)
            return super().compute_loss(model, inputs, *args, **options)

    return Paced


def run_paced(trainer: Any, pipe: WorkerPipe, unit: str) -> None:
    """Train at each request: one step for the warm-up, otherwise one pass over the data."""
    from transformers import TrainerCallback

    steps = -(-len(trainer.train_dataset) // trainer.args.per_device_train_batch_size)

    class Pace(TrainerCallback):  # type: ignore[misc]
        done = wanted = 0
        began = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pipe.ready()
            self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.done += 1
            if self.done == self.wanted:
                pipe.reply(seconds=harness.clock() - self.began, **{unit: trainer.counted}, steps=self.done)
                self.wait(control)

        def wait(self, control: Any) -> None:
            work = pipe.next_request()
            if work is None:
                control.should_training_stop = True
            self.done, self.wanted = 0, 1 if work == WARM_UP else steps
            trainer.counted, self.began = 0, harness.clock()

    trainer.add_callback(Pace())
    trainer.train()


def ppo_config(settings: dict[str, Any], **more: Any) -> Any:
    """PPOConfig. A batch is one device batch: PPOTrainer then takes one optimizer step per minibatch."""
    import torch
    from trl.experimental.ppo import PPOConfig

    return PPOConfig(
        per_device_train_batch_size=settings["batch_size"],
        gradient_accumulation_steps=1,
        response_length=settings["response_length"],
        num_sample_generations=0,
        bf16=False,  # no effect in PPOTrainer, which has its own Accelerator; the weights determine the dtype
        use_cpu=not torch.cuda.is_available(),
        **PLAIN,
        **more,
    )


def ppo_models(policy: str, scalar: str, dtype: Any, lora: int | None = None) -> dict[str, Any]:
    """The models of PPOTrainer, as its arguments. With an adapter the reference is the policy with its adapter off."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    policies = {
        name: AutoModelForCausalLM.from_pretrained(policy, dtype=dtype)
        for name in ("model", *(["ref_model"] if lora is None else []))
    }
    scalars = {
        name: AutoModelForSequenceClassification.from_pretrained(scalar, dtype=dtype, num_labels=1)
        for name in ("value_model", "reward_model")
    }
    return {"ref_model": None, **policies, **scalars}


def prompt_batches(prompts: list[list[list[int]]], pad: int) -> list[dict[str, Any]]:
    """The left-padded prompts of every iteration, each [B, P]."""
    return [{"input_ids": inputs.padded(rows, pad)[0]} for rows in prompts]


def ppo_trainer(arguments: Any, tokenizer: Any, prompts: list[list[list[int]]], **more: Any) -> Any:
    """PPOTrainer, which counts the rows of all prompts; its data loader is still to be replaced."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOTrainer

    rows = Dataset.from_list([{"input_ids": ids} for part in prompts for ids in part])
    return PPOTrainer(args=arguments, processing_class=tokenizer, train_dataset=rows, eval_dataset=rows, **more)

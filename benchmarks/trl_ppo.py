"""TRL's half of benchmarks/ppo_quality.py: `python -m benchmarks.trl_ppo SETTINGS.json`, with TRL 1.12 in PYTHONPATH.

The ids, score and KL of every response that PPOTrainer samples are recorded, one JSON line each. TRL's code is not
changed. Its batches are given, so that both systems respond to the same prompts in the same order.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import trl_trainers


class Recorder:
    """Wraps two functions of TRL's trainer, and records the responses of a rollout until `pop_rows`."""

    def __init__(self, trainer: Any, reward_model: Any, pad: int) -> None:
        """`trainer`: the module trl.experimental.ppo.ppo_trainer."""
        self._log_softmax, self._get_reward = trainer.selective_log_softmax, trainer.get_reward
        self._reward_model, self._pad = reward_model, pad
        self._logprobs: list[Tensor] = []
        self._rows: list[dict[str, Any]] = []
        trainer.selective_log_softmax, trainer.get_reward = self.log_softmax, self.get_reward

    def log_softmax(self, logits: Tensor, index: Tensor) -> Tensor:
        """A rollout calls it for the policy, then for the reference. [B, T]"""
        logprobs: Tensor = self._log_softmax(logits, index)
        if not torch.is_grad_enabled():
            self._logprobs.append(logprobs)
        return logprobs

    def get_reward(self, model: Any, ids: Tensor, pad: int, context: int) -> Any:
        """A rollout calls it for the critic, then for the reward model, which ends a micro-batch."""
        result = self._get_reward(model, ids, pad, context)
        if model is self._reward_model:
            policy, reference = self._logprobs
            self._logprobs = []
            self._record(ids[:, context:], policy - reference, result[1])
        return result

    def _record(self, responses: Tensor, log_ratio: Tensor, scores: Tensor) -> None:
        mask = (responses == self._pad).cumsum(1) == 0  # TRL leaves out all after the first one, sampled or not
        log_ratio = log_ratio.double().masked_fill(~mask, 0.0)
        k3 = (-log_ratio).exp() - 1 + log_ratio
        for i, row in enumerate(responses):
            self._rows.append(
                {
                    "response_ids": row[mask[i]].tolist(),
                    "learned": scores[i].item(),
                    "kl": log_ratio[i].sum().item(),
                    "kl_k3": k3[i].sum().item(),
                }
            )

    def pop_rows(self) -> list[dict[str, Any]]:
        """The rows recorded since the last call."""
        rows, self._rows = self._rows, []
        return rows


SHARED = (
    "output_dir", "seed", "num_mini_batches", "num_ppo_epochs", "temperature", "missing_eos_penalty", "kl_coef",
    "cliprange", "cliprange_value", "gamma", "lam", "learning_rate",
)  # fmt: skip
"""our options that PPOConfig has under the same names"""


def trainer_of(s: dict[str, Any]) -> tuple[Any, Any]:
    """(PPOTrainer, tokenizer). The optimizer is AdamW with the learning rates of actor and critic, iteration by
    iteration. PPOTrainer does not clip gradients, and changes the rate only between iterations."""
    from transformers import AutoTokenizer
    from trl.experimental.ppo import ppo_trainer

    tokenizer = AutoTokenizer.from_pretrained(s["actor_model"], padding_side="left")
    models = trl_trainers.ppo_models(s["actor_model"], s["reward_model"], torch.float32)
    recorder = Recorder(ppo_trainer, models["reward_model"], tokenizer.pad_token_id)
    groups = [
        {"params": list(models["model"].parameters()), "lr": s["learning_rate"]},
        {"params": list(models["value_model"].parameters()), "lr": s["critic_learning_rate"]},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(s["adam_beta1"], s["adam_beta2"]), eps=s["adam_epsilon"], weight_decay=s["weight_decay"]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [*s["learning_rate_factors"], 0.0].__getitem__)
    arguments = trl_trainers.ppo_config(
        s, **{name: s[name] for name in SHARED}, total_episodes=s["batch_size"] * len(s["prompts"]),
        local_rollout_forward_batch_size=s["rollout_batch_size"], stop_token="eos", logging_steps=1,
    )  # fmt: skip
    rows = trl_trainers.prompt_rows(s["prompts"])
    trainer = recording(ppo_trainer.PPOTrainer, recorder, Path(s["output_dir"]))(
        args=arguments, processing_class=tokenizer, train_dataset=rows, eval_dataset=rows,
        optimizers=(optimizer, schedule), **models,
    )  # fmt: skip
    trainer.dataloader = trl_trainers.prompt_batches(s["prompts"], tokenizer.pad_token_id)
    return trainer, tokenizer


def recording(base: Any, recorder: Recorder, folder: Path) -> Any:
    """A PPOTrainer that writes each iteration's rows and metrics when it logs."""

    class RecordingTrainer(base):  # type: ignore[misc]
        iteration, start = 0, time.monotonic()

        def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
            self.iteration += 1
            rows = recorder.pop_rows()
            mean = sum(row["kl"] for row in rows) / len(rows)
            assert abs(mean - logs["objective/kl"]) < 1e-3 * (1 + abs(mean)), (mean, logs["objective/kl"])
            end = time.monotonic()
            metrics = {"iteration": self.iteration, "seconds": end - self.start, **logs}
            self.start = end
            append(folder / "metrics.jsonl", [metrics])
            append(folder / "responses.jsonl", [{"iteration": self.iteration, **row} for row in rows])
            names = {"objective/scores": "score", "objective/kl": "kl", "val/ratio": "ratio"}
            text = " ".join(f"{short}={logs[name]:.4g}" for name, short in names.items())
            print(f"trl: iteration {self.iteration}: {text} {metrics['seconds']:.1f} s", flush=True)

    return RecordingTrainer


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows as JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> int:
    import transformers
    import trl

    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(settings["output_dir"])
    for name in ("metrics.jsonl", "responses.jsonl"):
        (folder / name).unlink(missing_ok=True)
    transformers.set_seed(settings["seed"])
    trainer, tokenizer = trainer_of(settings)
    trainer.train()
    trainer.policy_model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    versions = {library.__name__: library.__version__ for library in (trl, transformers, torch)}
    (folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

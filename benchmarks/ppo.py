"""`python -m benchmarks.ppo`: iterations of PPO here and in TRL 1.12.0 (the last with PPO), episodes per second.

A turn is one iteration: 16 responses of 48 new tokens to 16 prompts of at most 128, all scored, one pass of one
optimizer step of actor and critic. Actor, reference, critic and reward model are all the same size; both sides get the
same prompts in the same order, and no response ends before 48 tokens, so that the work is the same. Ours is the
`train` of step 3 with the models from `set_up`; its parts (generate, score, update) are timed separately.

Differences between the libraries: ours keeps fp32 master weights and moments of actor and critic, each in its
own engine with a clipped gradient; TRL has weights and moments in bf16 and both models in one. TRL takes its
old log-probs from the logits of generation, which it keeps; ours takes those that step 3 computes by
default, and with --no-rescore those of the update's own pass. Both compute all 16 rows in one pass. Ours compiles the
layers (before the measurement). With --lora R both sides train adapters of actor and critic.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks import comparison, harness, inputs, limits, outcome, peers, trl_trainers
from benchmarks.comparison import Comparison
from benchmarks.harness import MACHINE, OURS, Program, WorkerPipe
from rlhf import errors

PEER = "TRL"
PARTS = ("generate", "score", "update", "record")
UNLIMITED = 10**4
"""iterations: a contender works until no more work is requested"""


class Options(comparison.TrainingOptions):
    """What to measure."""

    repeats: int = Field(4, ge=1)
    """iterations of each contender, without the warm-up"""
    batch_size: int = Field(16, ge=1)
    """responses of an iteration"""
    micro_batch_size: int = Field(16, ge=1)
    """ours: rows of a forward and backward pass"""
    response_length: int = Field(48, ge=1)
    """new tokens of each response"""
    max_prompt_length: int = Field(128, ge=1)
    """maximal tokens of a prompt"""
    rescore: bool = True
    """ours: as of step 3"""


STAGE_OPTIONS = (
    "batch_size", "micro_batch_size", "response_length", "max_prompt_length", "dtype", "torch_compile", "rescore",
)  # fmt: skip


def prepare(options: Options, folder: Path) -> tuple[dict[str, Any], Any]:
    """(the settings of the contenders, the prompts of every iteration): our options, and our order for TRL."""
    scalar = inputs.scalar_model(options, folder)
    stage_options: dict[str, Any] = {name: getattr(options, name) for name in STAGE_OPTIONS}
    stage_options |= {"actor_model": options.model, "reward_model": scalar, "critic_model": scalar}
    stage_options |= {"num_ppo_epochs": 1, "num_mini_batches": 1, "total_episodes": UNLIMITED * options.batch_size}
    stage_options |= {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "adapter": comparison.adapter(options.lora)}
    count = options.batch_size * (options.repeats + 1)
    stage, data = inputs.first_rows(options, "ppo", count, folder, **stage_options)
    from data.batches import Batches

    order = Batches(count, options.batch_size, _config(stage).seed).until_epoch(options.repeats + 1)
    prompts = [[list(data.train[i].ids) for i in each] for each in itertools.islice(order, options.repeats + 1)]
    settings = {"stage": stage, "model": options.model, "scalar": scalar, "folder": str(folder), "prompts": prompts}
    names = ("dtype", "batch_size", "response_length", "lora")
    return settings | {name: getattr(options, name) for name in names}, prompts


def _config(stage: dict[str, Any]) -> Any:
    from rlhf import plugins

    return plugins.find("step3_ppo.algorithms", "ppo").Config(**stage)


def ours(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """Step 3 without evaluation, checkpoints and files."""
    from dataclasses import replace

    from rlhf.distributed import collectives
    from rlhf.generation import open_backend
    from step3_ppo import stage
    from step3_ppo.inputs import open_data
    from step3_ppo.models import set_up
    from step3_ppo.roles import roles
    from step3_ppo.schedule import Schedule

    config = _config(settings["stage"])
    table = roles(config)
    with collectives.process_group(config.timeout_s):
        pipe.mark_baseline()
        tokenizer, data = open_data(config, table[0].path)
        endless = open_backend("loop", eos_token_id=inputs.NO_TOKEN, pad_token_id=tokenizer.pad_token_id)
        learner = replace(set_up(config, table, tokenizer, None), backend=endless)
        schedule = Schedule(len(data.train), config)
        steps = stage.observe(stage.train(learner, data.train, schedule), learner)
        pipe.ready()
        while pipe.next_request():
            start = harness.clock()
            metrics = next(steps)
            seconds = harness.clock() - start
            assert metrics["response_length"] == config.response_length, metrics
            parts = {name: metrics[f"seconds_{name}"] for name in PARTS}
            pipe.reply(seconds=seconds, episodes=config.batch_size, **parts, first_approx_kl=metrics["first_approx_kl"])


class StopTraining(BaseException):
    """No more work is requested: ends TRL's loop, which must not catch it."""


def trl(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """TRL's PPOTrainer. Its data loader waits for requests: the trainer takes a batch when an iteration is over."""
    import torch

    pipe.mark_baseline()
    trainer, tokenizer = ppo_trainer(settings)
    batches = trl_trainers.prompt_batches(settings["prompts"], tokenizer.pad_token_id)

    def paced() -> Iterator[dict[str, torch.Tensor]]:
        pipe.ready()
        for batch in itertools.cycle(batches):
            if not pipe.next_request():
                raise StopTraining
            start = harness.clock()
            yield batch
            pipe.reply(seconds=harness.clock() - start, episodes=len(batch["input_ids"]))

    trainer.dataloader = paced()
    with contextlib.suppress(StopTraining):
        trainer.train()


def ppo_trainer(s: dict[str, Any]) -> tuple[Any, Any]:
    """(PPOTrainer, tokenizer). All computation is in the dtype of the weights."""
    from peft import inject_adapter_in_model
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(s["scalar"], padding_side="left")
    models = trl_trainers.ppo_models(s["model"], s["scalar"], inputs.weights_dtype(s), s["lora"])
    if s["lora"] is not None:  # the trainer wraps the policy only
        value = models["value_model"]
        inject_adapter_in_model(trl_trainers.peft_config(s["lora"], "SEQ_CLS"), value)
        for name, weight in value.named_parameters():
            weight.requires_grad_("lora_" in name or name == "score.weight")
    arguments = trl_trainers.ppo_config(
        s, output_dir=f"{s['folder']}/trl", total_episodes=s["batch_size"] * UNLIMITED,
        local_rollout_forward_batch_size=s["batch_size"], num_mini_batches=1, num_ppo_epochs=1, temperature=1.0,
        learning_rate=1e-6, lr_scheduler_type="constant",
    )  # fmt: skip
    models |= {"peft_config": trl_trainers.peft_config(s["lora"], "CAUSAL_LM")}
    return trl_trainers.ppo_trainer(arguments, tokenizer, s["prompts"], **models), tokenizer


def needed_flop(options: Options, prompts: list[list[int]]) -> float:
    """Floating-point operations of one forward and backward pass of actor and critic over an iteration."""
    work = limits.model_work(options.model)
    lengths = [len(ids) + options.response_length for ids in prompts]
    predicted = len(prompts) * options.response_length
    pairs, adapter = limits.attention_pairs(lengths), options.lora is not None
    return work.training(sum(lengths), predicted, pairs, adapter) + work.training(sum(lengths), 0, pairs, adapter)


def report(options: Options, rows: harness.Rows, prompts: list[list[list[int]]]) -> dict[str, Any]:
    """Seconds of the parts of our iterations, and our update's share of the peak. prompts: warm-up first"""
    seconds, shares = {}, {}
    if OURS in rows:
        seconds = {name: outcome.spread([row[name] for row in rows[OURS]["all"]]) for name in PARTS}
        gflop = [needed_flop(options, each) / 1e9 for each in prompts[1:]]
        share = comparison.peak_share(rows, OURS, gflop, options.dtype, "update")
        shares[f"update, share of the {options.dtype} peak, {OURS}"] = share
        print("ours, of an iteration: " + ", ".join(f"{name} {s['median']:.2f} s" for name, s in seconds.items()))
    size = {"prompt_tokens_of_iterations": [sum(map(len, each)) for each in prompts]}
    return {"set": size, "seconds_of_parts": seconds, "shares": shares}


COMPARISON = Comparison(
    "ppo", "Iterations of PPO here and in TRL.", Options, "episodes", f"TRL {peers.PPO}",
    programs={OURS: Program(ours), PEER: Program(trl, peers.PPO), MACHINE: Program(limits.contender)},
    goals={PEER: "ppo"}, prepare=prepare, report=report,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(COMPARISON.main))

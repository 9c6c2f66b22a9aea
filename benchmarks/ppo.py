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
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks import harness, inputs, limits, outcome, peers, sft
from benchmarks.goals import goal
from benchmarks.harness import MACHINE, OURS, WorkerPipe
from rlhf import errors
from rlhf.config import parser

PEER = "TRL"
PARTS = ("generate", "score", "update", "record")
NO_TOKEN = -1
"""an id that no token has: no response ends early"""
UNLIMITED = 10**4
"""iterations: a contender works until no more work is requested"""


class Options(harness.Options):
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
    dtype: Literal["bf16", "fp32"] = "bf16"
    """dtype of both sides"""
    torch_compile: bool = True
    """ours: compile the layers, before the measurement"""
    rescore: bool = True
    """ours: as of step 3"""
    lora: int | None = Field(None, ge=1)
    """rank of LoRA on all linear layers of actor and critic, alpha twice the rank; none: all weights are trained"""


def settings(options: Options, folder: Path) -> dict[str, Any]:
    """The settings of the contenders: our options, and for TRL the prompts of every iteration in our order."""
    scalar = inputs.scalar_model(options, folder)
    stage_options = {
        name: getattr(options, name)
        for name in (
            "batch_size",
            "micro_batch_size",
            "response_length",
            "max_prompt_length",
            "dtype",
            "torch_compile",
            "rescore",
        )
    }
    stage_options |= {"actor_model": options.model, "reward_model": scalar, "critic_model": scalar}
    stage_options |= {"num_ppo_epochs": 1, "num_mini_batches": 1, "total_episodes": UNLIMITED * options.batch_size}
    stage_options |= {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "adapter": sft.adapter(options.lora)}
    count = options.batch_size * (options.repeats + 1)
    stage, data = inputs.first_rows(options, "ppo", count, folder, **stage_options)
    from step3_ppo.schedule import Schedule

    schedule = Schedule(count, _config(stage), _config(stage).seed)
    order = [indices for _, indices in itertools.islice(schedule, options.repeats + 1)]
    return {
        "stage": stage,
        "model": options.model,
        "scalar": scalar,
        "folder": str(folder),
        "dtype": options.dtype,
        "prompts": [[list(data.train[i].ids) for i in indices] for indices in order],
        **{name: getattr(options, name) for name in ("batch_size", "response_length", "lora")},
    }


def _config(stage: dict[str, Any]) -> Any:
    from rlhf import plugins

    return plugins.find("step3_ppo.algorithms", "ppo").Config(**stage)


def ours(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """Step 3 without evaluation, checkpoints and files."""
    from dataclasses import replace

    from rlhf.distributed import collectives
    from rlhf.generation import open_backend
    from step3_ppo import stage
    from step3_ppo.inputs import open_data, with_inputs
    from step3_ppo.models import set_up
    from step3_ppo.schedule import Schedule

    config = with_inputs(_config(settings["stage"]))
    with collectives.process_group(config.timeout_s):
        pipe.mark_baseline()
        tokenizer, data = open_data(config, str(config.actor_model))
        players = set_up(config, tokenizer)
        endless = open_backend("loop", eos_token_id=NO_TOKEN, pad_token_id=tokenizer.pad_token_id)
        players = replace(players, backend=endless)
        steps = stage.train(players, data.train, Schedule(len(data.train), config, config.seed), config)
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

    from benchmarks import trl_ppo

    pipe.mark_baseline()
    trainer, tokenizer = ppo_trainer(settings)
    config = trl_ppo.batches(settings["prompts"], tokenizer.pad_token_id)

    def paced() -> Iterator[dict[str, torch.Tensor]]:
        pipe.ready()
        for batch in itertools.cycle(config):
            if not pipe.next_request():
                raise StopTraining
            start = harness.clock()
            yield batch
            pipe.reply(seconds=harness.clock() - start, episodes=len(batch["input_ids"]))

    trainer.dataloader = paced()
    with contextlib.suppress(StopTraining):
        trainer.train()


def ppo_trainer(s: dict[str, Any]) -> tuple[Any, Any]:
    """(PPOTrainer, tokenizer). All computation is in the dtype of the weights; a batch is one device batch."""
    import torch
    from datasets import Dataset
    from peft import inject_adapter_in_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    dtype = torch.bfloat16 if s["dtype"] == "bf16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(s["scalar"], padding_side="left")
    # With an adapter the reference is the policy with its adapter off, on both sides.
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(s["model"], dtype=dtype) if needed else None
        for needed in (True, s["lora"] is None)
    )
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(s["scalar"], dtype=dtype, num_labels=1) for _ in range(2)
    )
    if s["lora"] is not None:  # the trainer wraps the policy only
        inject_adapter_in_model(sft.peft_config(s["lora"], "SEQ_CLS"), value)
        for name, weight in value.named_parameters():
            weight.requires_grad_("lora_" in name or name == "score.weight")
    rows = Dataset.from_list([{"input_ids": ids} for part in s["prompts"] for ids in part])
    arguments = PPOConfig(
        output_dir=f"{s['folder']}/trl",
        total_episodes=s["batch_size"] * UNLIMITED,
        per_device_train_batch_size=s["batch_size"],
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=s["batch_size"],
        num_mini_batches=1,
        num_ppo_epochs=1,
        response_length=s["response_length"],
        temperature=1.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,  # no effect in PPOTrainer, which has its own Accelerator; the weights determine the dtype
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        args=arguments, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
        value_model=value, train_dataset=rows, eval_dataset=rows, peft_config=sft.peft_config(s["lora"], "CAUSAL_LM"),
    )  # fmt: skip
    return trainer, tokenizer


CONTENDERS = {OURS: ours, PEER: trl, MACHINE: limits.contender}


def needed_flop(options: Options, prompts: list[list[int]]) -> float:
    """Floating-point operations of one forward and backward pass of actor and critic over an iteration."""
    work = limits.model_work(options.model)
    lengths = [len(ids) + options.response_length for ids in prompts]
    predicted = len(prompts) * options.response_length
    pairs, adapter = limits.attention_pairs(lengths), options.lora is not None
    return work.training(sum(lengths), predicted, pairs, adapter) + work.training(sum(lengths), 0, pairs, adapter)


def part_seconds(rows: harness.Rows) -> dict[str, Any]:
    """Seconds of the parts of our iterations."""
    return {name: outcome.spread([row[name] for row in rows[OURS]["all"]]) for name in PARTS if OURS in rows}


def shares(rows: harness.Rows, options: Options, prompts: list[list[list[int]]]) -> dict[str, Any]:
    """Our update's share of the matrix-product peak of the same turn. prompts: of each iteration, warm-up first"""
    if OURS not in rows:
        return {}
    work = [needed_flop(options, each) / 1e9 for each in prompts[1:]]
    turns = zip(work, rows[OURS]["all"], rows[MACHINE]["all"], strict=True)
    values = [gflop / row["update"] / machine[f"{options.dtype}_gflops"] for gflop, row, machine in turns]
    least, aim = goal("training, share of the peak")
    return {f"update, share of the {options.dtype} peak, {OURS}": outcome.share(values, least, aim)}


def measure(options: Options) -> dict[str, Any]:
    """All measurements, as written to the JSON file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = settings(options, folder)
        envs = harness.select_contenders({OURS: None, PEER: peers.PPO, MACHINE: None}, options)
        with harness.start_contenders("benchmarks.ppo", envs, config, options.threads, folder) as contenders:
            rows = harness.alternate(contenders, options.repeats)
            return outcome.results(
                "ppo" if options.lora is None else "ppo_lora", options, contenders, rows, "episodes",
                peer=f"TRL {peers.PPO}",
                set={"prompt_tokens_of_iterations": [sum(map(len, each)) for each in config["prompts"]]},
                seconds_of_parts=part_seconds(rows),
                ratios=outcome.ratios(rows, "episodes", {(PEER, "all"): goal("ppo", options.lora)}),
                shares=shares(rows, options, config["prompts"]),
                limits=outcome.limits(rows),
            )  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--contender"]:
        return harness.run_contender(CONTENDERS, sys.argv[2:])
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.ppo", "Iterations of PPO here and in TRL.")
    result = measure(options)
    outcome.write(result, options)
    parts_text = ", ".join(f"{name} {s['median']:.2f} s" for name, s in result["seconds_of_parts"].items())
    print(f"ours, of an iteration: {parts_text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

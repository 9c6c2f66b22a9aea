"""`python -m benchmarks.reward`: the pairwise reward model here and in TRL 1.16, pairs per second.

A turn is one pass over the same pairs with the same ids, in batches of 8 pairs. Ours is the `train` of step 2,
including its data pipeline and engine.

Differences between the libraries: ours keeps fp32 master weights and moments, clips the gradient, and groups pairs
by length (within the set); TRL's RewardTrainer pads both sides of all pairs to the longest in one pass, in the given
order, with weights and moments in bf16 under autocast.

The needed work counts the prompt of a pair once, because both sides share it. Ours compiles the layers before the
measurement.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks import harness, inputs, limits, outcome, peers, sft
from benchmarks.goals import goal
from benchmarks.harness import MACHINE, OURS, WorkerPipe
from rlhf import errors
from rlhf.config import parser

PEER = "TRL"


class Options(sft.Options):
    """What to measure."""

    rows: int = Field(64, ge=1)
    """pairs of the data set"""
    batch_size: int = Field(8, ge=1)
    """pairs of an optimizer step"""
    micro_batch_size: int = Field(8, ge=1)
    """ours: pairs of a forward and backward pass"""


def settings(options: Options, folder: Path) -> tuple[dict[str, Any], Any]:
    """(the settings of the contenders, the data)."""
    stage, dataset = inputs.first_rows(options, "reward", options.rows, folder, **sft.stage_options(options))
    rows = [{"chosen_ids": list(item.chosen), "rejected_ids": list(item.rejected)} for item in dataset.train]
    contender_settings = {"stage": stage, "model": options.model, "rows": rows, "folder": str(folder)}
    contender_settings |= {"scalar": inputs.scalar_model(options, folder)}
    return {**contender_settings, **{name: getattr(options, name) for name in sft.PEER_OPTIONS}}, dataset


def ours(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """Step 2 without evaluation, checkpoints and files."""
    from rlhf import adapters
    from rlhf.distributed import collectives
    from rlhf.engine.precision import compute_dtype
    from rlhf.engine.training import Engine, shards_of
    from rlhf.models.load import Loading
    from rlhf.models.scalar import new_scalar_model
    from step2_reward import objectives, stage
    from step2_reward.config import RewardConfig

    config = RewardConfig(**settings["stage"])
    with collectives.process_group(config.timeout_s):
        pipe.mark_baseline()
        tokenizer, data = stage.REWARD_MODELLING.open_data(config, config.model)
        dtype = compute_dtype(config, collectives.local_device())
        model = new_scalar_model(config.model, dtype, len(tokenizer), Loading(config.seed, shards_of(config)))
        model.backbone = adapters.wrap(model.backbone, config.adapter)
        reward = Engine(model, config, config, sft.UNLIMITED)
        objective, pad_id = objectives.load(config), tokenizer.pad_token_id
        pair_scores = stage.scoring(reward, data.train, config, pad_id)
        pipe.ready()
        sft.run_ours(
            pipe,
            config,
            data.train.row_lengths,
            lambda batches, until: stage.train(
                reward, objective, stage.steps_of(data.train, batches, until, pad_id), pair_scores
            ),
            lambda metrics, work: {"pairs": len(metrics) * config.batch_size},
        )


def trl(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """TRL's RewardTrainer. Its callbacks wait for requests."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    pipe.mark_baseline()
    bf16 = settings["dtype"] == "bf16"
    path, dtype = settings["scalar"], torch.bfloat16 if bf16 else torch.float32
    trainer = sft.paced(RewardTrainer, lambda batch: len(batch["input_ids"]) // 2)(
        model=AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=1),
        args=RewardConfig(**sft.trainer_arguments(settings, bf16), max_length=512),
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=sft.peft_config(settings["lora"], "SEQ_CLS"),
    )
    sft.run_paced(trainer, pipe, -(-len(trainer.train_dataset) // settings["batch_size"]), "pairs")


CONTENDERS = {OURS: ours, PEER: trl, MACHINE: limits.contender}


def needed_flop(options: Options, dataset: Any) -> float:
    """Floating-point operations that the loss of one pass over the data needs. A pair's prompt counts once."""
    tokens = attended = 0.0
    for item in dataset.train:
        responses = [len(side) - item.prompt_length for side in (item.chosen, item.rejected)]
        tokens += item.prompt_length + sum(responses)
        attended += limits.attention_pairs([item.prompt_length]) + limits.attention_pairs(responses, item.prompt_length)
    return limits.model_work(options.model).training(tokens, 0, attended, options.lora is not None)


def measure(options: Options) -> dict[str, Any]:
    """All measurements, as written to the JSON file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contender_settings, dataset = settings(options, folder)
        envs = harness.select_contenders({OURS: None, PEER: peers.REWARD, MACHINE: None}, options)
        with harness.start_contenders(
            "benchmarks.reward", envs, contender_settings, options.threads, folder
        ) as contenders:
            rows = harness.alternate(contenders, options.repeats)
            flop, sides = needed_flop(options, dataset), dataset.train.sides
            return outcome.results(
                "reward" if options.lora is None else "reward_lora", options, contenders, rows, "pairs",
                peer=f"TRL {peers.REWARD}",
                set={
                    "pairs": len(dataset.train),
                    "tokens_of_both_sides": int(sides.sum()),
                    "tokens_prompt_once": int(sides.sum() - sum(item.prompt_length for item in dataset.train)),
                    "needed_gflop": flop / 1e9,
                },
                ratios=outcome.ratios(rows, "pairs", {(PEER, "all"): goal("reward", options.lora)}),
                shares=sft.shares(rows, flop, options.dtype),
                limits=outcome.limits(rows),
            )  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--contender"]:
        return harness.run_contender(CONTENDERS, sys.argv[2:])
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.reward", "The reward model here and in TRL.")
    outcome.write(measure(options), options)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

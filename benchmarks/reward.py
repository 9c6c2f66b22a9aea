"""`python -m benchmarks.reward`: the pairwise reward model here and in TRL 1.16, pairs per second.

A turn is one pass over the same pairs with the same ids, in batches of 8 pairs. Ours is the `train` of step 2,
including its data pipeline and engine.

Differences between the libraries: ours keeps fp32 master weights and moments, clips the gradient, and groups pairs
by length (within the set); TRL's RewardTrainer pads both sides of all pairs to the longest in one pass, in the given
order, with weights and moments in bf16 under autocast.

The needed work counts the prompt of a pair once, because both sides share it. Ours compiles the layers before the
measurement.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks import harness, inputs, limits, peers, sft, trl_trainers
from benchmarks.comparison import Comparison
from benchmarks.harness import MACHINE, OURS, Program, WorkerPipe
from rlhf import errors

PEER = "TRL"


class Options(sft.Options):
    """What to measure."""

    rows: int = Field(64, ge=1)
    """pairs of the data set"""


def prepare(options: Options, folder: Path) -> tuple[dict[str, Any], Any]:
    """(the settings of the contenders, the data)."""
    settings, data = sft.supervised("reward", inputs.pairs, options, folder)
    return {**settings, "scalar": inputs.scalar_model(options, folder)}, data


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
        reward = Engine(model, config, trl_trainers.UNLIMITED)
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
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    pipe.mark_baseline()
    path, dtype = settings["scalar"], inputs.weights_dtype(settings)
    trainer = trl_trainers.paced(RewardTrainer, lambda batch: len(batch["input_ids"]) // 2)(
        model=AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=1),
        args=RewardConfig(**trl_trainers.arguments(settings), max_length=512),
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=trl_trainers.peft_config(settings["lora"], "SEQ_CLS"),
    )
    trl_trainers.run_paced(trainer, pipe, "pairs")


def needed_flop(options: Options, data: Any) -> float:
    """Floating-point operations that the loss of one pass over the data needs. A pair's prompt counts once."""
    tokens = attended = 0.0
    for item in data.train:
        responses = [len(side) - item.prompt_length for side in (item.chosen, item.rejected)]
        tokens += item.prompt_length + sum(responses)
        attended += limits.attention_pairs([item.prompt_length]) + limits.attention_pairs(responses, item.prompt_length)
    return limits.model_work(options.model).training(tokens, 0, attended, options.lora is not None)


def report(options: Options, rows: harness.Rows, data: Any) -> dict[str, Any]:
    """The size of the work, and shares of the peak."""
    flop, tokens = needed_flop(options, data), int(data.train.sides.sum())
    size = {
        "pairs": len(data.train),
        "tokens_of_both_sides": tokens,
        "tokens_prompt_once": tokens - sum(item.prompt_length for item in data.train),
        "needed_gflop": flop / 1e9,
    }
    return {"set": size, "shares": sft.shares(rows, flop, options)}


COMPARISON = Comparison(
    "reward", "The reward model here and in TRL.", Options, "pairs", f"TRL {peers.REWARD}",
    programs={OURS: Program(ours), PEER: Program(trl, peers.REWARD), MACHINE: Program(limits.contender)},
    goals={PEER: "reward"}, prepare=prepare, report=report,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(COMPARISON.main))

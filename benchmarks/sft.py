"""`python -m benchmarks.sft`: fine-tuning here and in TRL 1.16 (padded, and packed), real tokens per second.

A turn is one pass over the same rows, in batches of 8 dialogues, with the same ids and the loss on the same tokens (the
last response of each dialogue). Ours is the `train` of step 1, including its data pipeline and engine.

Differences between the libraries: ours keeps fp32 master weights and moments and clips the gradient to norm 1 inside
DeepSpeed, and groups rows by length (here within this small set, a tenth of the rows that it sorts by default). TRL has
weights and moments in bf16 under autocast, uses rows in the given order, and computes entropy and token accuracy.
Packed, TRL fills rows of 512 tokens (best fit decreasing) and flattens a batch into one row, whose dialogues sdpa
separates by a mask. A step then has as many such rows as hold 8 dialogues, rounded. Ours compiles the layers before the
measurement. With --lora R both sides train the same adapter.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from benchmarks import comparison, harness, inputs, limits, peers, trl_trainers
from benchmarks.comparison import Comparison
from benchmarks.harness import MACHINE, OURS, WARM_UP, Program, WorkerPipe
from rlhf import errors

PADDED, PACKED = "TRL padded", "TRL packed"
PEER_OPTIONS = ("batch_size", "dtype", "lora", "peer_compile")
"""options that TRL's contenders read"""


class Options(comparison.TrainingOptions):
    """What to measure."""

    rows: int = Field(48, ge=1)
    """dialogues, or pairs, of the data set"""
    peer_compile: bool = False
    """theirs: torch_compile of transformers' Trainer"""

    @model_validator(mode="after")
    def _whole_batches(self) -> Self:
        """Our stages leave out an incomplete batch, whose rows would count."""
        if self.rows % self.batch_size:
            raise ValueError(f"rows {self.rows}: expected a multiple of batch_size, {self.batch_size}")
        return self


def supervised(phase: str, rows_of: Callable[[Any], list[Any]], options: Options, folder: Path) -> tuple[Any, Any]:
    """(the settings of the contenders of step 1 or 2, the data). rows_of: the data as TRL reads it"""
    names = ("model", "batch_size", "micro_batch_size", "dtype", "torch_compile")
    stage = {key: getattr(options, key) for key in names} | {"adapter": comparison.adapter(options.lora)}
    stage |= {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "learning_rate": trl_trainers.LEARNING_RATE}
    stage, data = inputs.first_rows(options, phase, options.rows, folder, **stage)
    settings = {"stage": stage, "model": options.model, "rows": rows_of(data.train), "folder": str(folder)}
    return settings | {name: getattr(options, name) for name in PEER_OPTIONS}, data


def ours(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """Step 1 without evaluation, checkpoints and files."""
    from rlhf import adapters
    from rlhf.distributed import collectives
    from rlhf.engine.precision import compute_dtype
    from rlhf.engine.training import Engine, shards_of
    from rlhf.models.load import Loading, load_causal_lm
    from rlhf.models.policy import Policy
    from step1_sft import stage
    from step1_sft.config import SFTConfig

    config = SFTConfig(**settings["stage"])
    with collectives.process_group(config.timeout_s):
        pipe.mark_baseline()
        tokenizer, data = stage.FINE_TUNING.open_data(config, config.model)
        dtype = compute_dtype(config, collectives.local_device())
        lm = load_causal_lm(config.model, dtype, len(tokenizer), Loading(config.seed, shards_of(config)))
        policy = Engine(Policy(adapters.wrap(lm, config.adapter)), config, trl_trainers.UNLIMITED)
        pipe.ready()
        # The warm-up is one step, whose tokens do not count.
        tokens = int(data.train.lengths.sum())
        run_ours(
            pipe,
            config,
            data.train.sides,
            lambda batches, until: stage.train(policy, data.train, batches, until, tokenizer.pad_token_id),
            lambda metrics, work: {"tokens": tokens if work != WARM_UP else 0},
        )


def run_ours(
    pipe: WorkerPipe,
    config: Any,
    sides: Any,
    train: Callable[[Any, Any], Iterator[dict[str, float]]],
    counted: Callable[[list[dict[str, float]], str], dict[str, int]],
) -> None:
    """Train one pass over the data per request; for the warm-up only one step.

    `train(batches, options)` is that of a stage; `counted(steps, work)` returns the counts of finished work.
    """
    from data.batches import Batches

    for epoch in itertools.count():
        work = pipe.next_request()
        if work is None:
            return
        batches = Batches(sides, config.batch_size, config.seed, drop_last=False)
        batches.set_epoch(epoch)
        until = config.model_copy(update={"num_train_epochs": epoch + 1})
        start = harness.clock()
        metrics = list(itertools.islice(train(batches, until), 1 if work == WARM_UP else None))
        seconds = harness.clock() - start
        means = {name: sum(one[name] for one in metrics) / len(metrics) for name in ("loss", "padding")}
        pipe.reply(seconds=seconds, steps=len(metrics), **counted(metrics, work), **means)


def trl(settings: dict[str, Any], pipe: WorkerPipe, packing: bool = False) -> None:
    """TRL's SFTTrainer. Its callbacks wait for requests."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    pipe.mark_baseline()
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=inputs.weights_dtype(settings))
    trainer = trl_trainers.paced(SFTTrainer, count_tokens)(
        model=model,
        args=SFTConfig(
            **trl_trainers.arguments(settings), packing=packing, completion_only_loss=False, max_length=512
        ),  # the labels say what is learned
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        peft_config=trl_trainers.peft_config(settings["lora"], "CAUSAL_LM"),
    )
    if packing:
        packs = len(trainer.train_dataset)
        trainer._train_batch_size = max(1, round(settings["batch_size"] * packs / len(settings["rows"])))
        trainer.args.per_device_train_batch_size = trainer._train_batch_size
    trl_trainers.run_paced(trainer, pipe, "tokens")


def count_tokens(inputs: dict[str, Any]) -> int:
    """Real tokens of a batch: flattened rows have no mask, because they have no padding."""
    mask = inputs.get("attention_mask")
    return int(inputs["input_ids"].numel() if mask is None else mask.sum())


def needed_flop(options: Options, data: Any) -> float:
    """Floating-point operations that the loss of one pass over the data needs."""
    items = list(data.train)
    lengths = [len(item.ids) for item in items]
    predicted = sum(end - start for item in items for start, end in item.spans)
    work, pairs = limits.model_work(options.model), limits.attention_pairs(lengths)
    return work.training(sum(lengths), predicted, pairs, options.lora is not None)


def report(options: Options, rows: harness.Rows, data: Any) -> dict[str, Any]:
    """The size of the work, and shares of the peak."""
    flop, train = needed_flop(options, data), data.train
    size = {"dialogues": len(train), "tokens": int(train.lengths.sum()), "needed_gflop": flop / 1e9}
    return {"set": size, "shares": shares(rows, flop, options)}


def shares(rows: harness.Rows, flop: float, options: Options) -> dict[str, Any]:
    """Shares of the matrix-product peak of the same turn: needed work over the time of a pass."""
    gflop, dtype = [flop / 1e9] * options.repeats, options.dtype
    return {
        f"training, share of the {dtype} peak, {who}": comparison.peak_share(rows, who, gflop, dtype)
        for who in rows
        if who != MACHINE
    }


COMPARISON = Comparison(
    "sft", "Fine-tuning here and in TRL.", Options, "tokens", f"TRL {peers.SFT}",
    programs={
        OURS: Program(ours), PADDED: Program(trl, peers.SFT), PACKED: Program(partial(trl, packing=True), peers.SFT),
        MACHINE: Program(limits.contender),
    },
    goals={PADDED: "sft beside padded", PACKED: "sft beside packed"},
    prepare=partial(supervised, "sft", inputs.demonstrations), report=report,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(COMPARISON.main))

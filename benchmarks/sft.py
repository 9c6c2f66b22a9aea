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
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from benchmarks import harness, inputs, limits, outcome, peers
from benchmarks.goals import Goal, goal
from benchmarks.harness import MACHINE, OURS, WARM_UP, WorkerPipe
from rlhf import errors
from rlhf.config import parser

PADDED, PACKED = "TRL padded", "TRL packed"
LEARNING_RATE = 1e-5
PEER_OPTIONS = ("batch_size", "dtype", "lora", "peer_compile")
"""options that TRL's contenders read"""
UNLIMITED = 10**6
"""epochs or steps: a contender works until no more work is requested"""


class Options(harness.Options):
    """What to measure."""

    rows: int = Field(48, ge=1)
    """dialogues of the data set"""
    batch_size: int = Field(8, ge=1)
    """dialogues of an optimizer step"""
    micro_batch_size: int = Field(8, ge=1)
    """ours: dialogues of a forward and backward pass"""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """dtype of both sides"""
    torch_compile: bool = True
    """ours: compile the layers, before the measurement"""
    peer_compile: bool = False
    """theirs: torch_compile of transformers' Trainer"""
    lora: int | None = Field(None, ge=1)
    """rank of LoRA on all linear layers, alpha twice the rank; none: all weights are trained"""

    @model_validator(mode="after")
    def _whole_batches(self) -> Self:
        """Our stages leave out an incomplete batch, whose rows would count."""
        if self.rows % self.batch_size:
            raise ValueError(f"rows {self.rows}: expected a multiple of batch_size, {self.batch_size}")
        return self


def stage_options(options: Options) -> dict[str, Any]:
    """Options of step 1 or 2, without those of the data."""
    names = ("model", "batch_size", "micro_batch_size", "dtype", "torch_compile")
    config = {key: getattr(options, key) for key in names}
    config["adapter"] = adapter(options.lora)
    return {**config, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "learning_rate": LEARNING_RATE}


def adapter(rank: int | None) -> str | None:
    """Our option `adapter` for LoRA of this rank."""
    return None if rank is None else f"lora,r={rank},lora_alpha={2 * rank}"


def peft_config(rank: int | None, task: str) -> Any:
    """The same adapter for TRL. task: CAUSAL_LM or SEQ_CLS"""
    from peft import LoraConfig

    return None if rank is None else LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type=task
    )  # fmt: skip


def settings(options: Options, folder: Path) -> tuple[dict[str, Any], Any]:
    """(the settings of the contenders, the data)."""
    stage, data = inputs.first_rows(options, "sft", options.rows, folder, **stage_options(options))
    rows = inputs.demonstrations(data.train)
    contender_settings = {"stage": stage, "model": options.model, "rows": rows, "folder": str(folder)}
    return {**contender_settings, **{name: getattr(options, name) for name in PEER_OPTIONS}}, data


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
        policy = Engine(Policy(adapters.wrap(lm, config.adapter)), config, config, UNLIMITED)
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
    from data.batches import batches_of

    for epoch in itertools.count():
        work = pipe.next_request()
        if work is None:
            return
        batches = batches_of(sides, config, config.seed, (0, 1))
        batches.set_epoch(epoch)
        until = config.model_copy(update={"num_train_epochs": epoch + 1})
        start = harness.clock()
        metrics = list(itertools.islice(train(batches, until), 1 if work == WARM_UP else None))
        seconds = harness.clock() - start
        means = {name: sum(one[name] for one in metrics) / len(metrics) for name in ("loss", "padding")}
        pipe.reply(seconds=seconds, steps=len(metrics), **counted(metrics, work), **means)


def trl(settings: dict[str, Any], pipe: WorkerPipe, packing: bool = False) -> None:
    """TRL's SFTTrainer. Its callbacks wait for requests."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    pipe.mark_baseline()
    bf16 = settings["dtype"] == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    arguments = SFTConfig(
        **trainer_arguments(settings, bf16), packing=packing, completion_only_loss=False, max_length=512
    )  # the labels say what is learned
    trainer = paced(SFTTrainer, count_tokens)(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        peft_config=peft_config(settings["lora"], "CAUSAL_LM"),
    )
    if packing:
        packs = len(trainer.train_dataset)
        arguments.per_device_train_batch_size = max(1, round(settings["batch_size"] * packs / len(settings["rows"])))
        trainer._train_batch_size = arguments.per_device_train_batch_size
    steps = -(-len(trainer.train_dataset) // arguments.per_device_train_batch_size)
    run_paced(trainer, pipe, steps)


def trl_packed(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    trl(settings, pipe, packing=True)


def trainer_arguments(settings: dict[str, Any], bf16: bool) -> dict[str, Any]:
    """Arguments of transformers' Trainer, for both trainers of TRL. No checkpoint, no activation checkpointing."""
    import torch

    return {
        "output_dir": f"{settings['folder']}/trl",
        "per_device_train_batch_size": settings["batch_size"],
        "max_steps": UNLIMITED,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "bf16": bf16,
        "torch_compile": settings["peer_compile"],
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",  # so that any stretch of whole passes has every row once a pass
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def count_tokens(inputs: dict[str, Any]) -> int:
    """Real tokens of a batch: flattened rows have no mask, because they have no padding."""
    mask = inputs.get("attention_mask")
    return int(inputs["input_ids"].numel() if mask is None else mask.sum())


def paced(base: Any, count: Any) -> Any:
    """A trainer that adds up `count(batch)` over its batches."""

    class Paced(base):  # type: ignore[misc]
        counted = 0

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
            self.counted += count(inputs)
            return super().compute_loss(model, inputs, *args, **options)

    return Paced


def run_paced(trainer: Any, pipe: WorkerPipe, steps: int, unit: str = "tokens") -> None:
    """Train at each request: one step for the warm-up, otherwise `steps`, which are one pass over the data."""
    from transformers import TrainerCallback

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


CONTENDERS = {OURS: ours, PADDED: trl, PACKED: trl_packed, MACHINE: limits.contender}


def needed_flop(options: Options, data: Any) -> float:
    """Floating-point operations that the loss of one pass over the data needs."""
    items = list(data.train)
    lengths = [len(item.ids) for item in items]
    predicted = sum(end - start for item in items for start, end in item.spans)
    work, pairs = limits.model_work(options.model), limits.attention_pairs(lengths)
    return work.training(sum(lengths), predicted, pairs, options.lora is not None)


def measure(options: Options) -> dict[str, Any]:
    """All measurements, as written to the JSON file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, data = settings(options, folder)
        versions = {OURS: None, PADDED: peers.SFT, PACKED: peers.SFT, MACHINE: None}
        envs = harness.select_contenders(versions, options)
        with harness.start_contenders("benchmarks.sft", envs, config, options.threads, folder) as contenders:
            rows = harness.alternate(contenders, options.repeats)
            flop = needed_flop(options, data)
            return outcome.results(
                "sft" if options.lora is None else "sft_lora", options, contenders, rows, "tokens",
                peer=f"TRL {peers.SFT}",
                set={
                    "dialogues": len(data.train),
                    "tokens": int(data.train.lengths.sum()),
                    "needed_gflop": flop / 1e9,
                },
                ratios=outcome.ratios(rows, "tokens", targets(options)),
                shares=shares(rows, flop, options.dtype),
                limits=outcome.limits(rows),
            )  # fmt: skip


def targets(options: Options) -> dict[tuple[str, str], Goal]:
    """(peer, work) -> the goal of the ratio."""
    names = {PADDED: "sft beside padded", PACKED: "sft beside packed"}
    return {(peer, "all"): goal(name, options.lora) for peer, name in names.items()}


def shares(rows: harness.Rows, flop: float, dtype: str) -> dict[str, Any]:
    """Shares of the matrix-product peak of the same turn: needed work over the time of a pass."""
    shares_by_name = {}
    for who in (name for name in rows if name != MACHINE):
        pairs = zip(rows[who]["all"], rows[MACHINE]["all"], strict=True)
        values = [flop / 1e9 / row["seconds"] / machine[f"{dtype}_gflops"] for row, machine in pairs]
        least, aim = goal("training, share of the peak") if who == OURS else (None, None)
        shares_by_name[f"training, share of the {dtype} peak, {who}"] = outcome.share(values, least, aim)
    return shares_by_name


def main() -> int:
    if sys.argv[1:2] == ["--contender"]:
        return harness.run_contender(CONTENDERS, sys.argv[2:])
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.sft", "Fine-tuning here and in TRL.")
    outcome.write(measure(options), options)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

"""`python -m benchmarks.sft`: supervised fine-tuning here and in TRL 1.16 (padded, and packed), real tokens a second.

A turn is one pass over the same whole set of rows, in batches of 8 dialogues; the same ids, and the loss on the same
tokens (the last response of each dialogue). Ours is step 1's own `train`, the data path and engine included.

What differs, as each library has it: ours keeps fp32 master weights and moments and clips the gradient to norm 1
inside DeepSpeed, and groups rows by length (here within the set, a tenth of what it sorts by default); TRL has weights
and moments in bf16 under autocast, takes rows in the given order, and tells entropy and token accuracy of each batch.
Packed, TRL fills rows of 512 tokens (best fit decreasing) and flattens a batch into one row, whose dialogues sdpa keeps
apart by a mask; a step then has as many such rows as hold 8 dialogues, rounded.
Ours compiles the layers, before the clock runs.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks import harness, inputs, limits, outcome, peers
from benchmarks.harness import MACHINE, OURS, WARM_UP, Wire
from rlhf import errors
from rlhf.config import parser

PADDED, PACKED = "TRL padded", "TRL packed"
TARGETS = {(PADDED, "all"): (3.0, 5.0), (PACKED, "all"): (2.5, 5.0)}
LEAST_SHARE, AIM_SHARE = 0.55, 0.65
LEARNING_RATE = 1e-5
ENDLESS = 10**6
"""epochs or steps: a contender works until nobody asks"""


class Options(harness.Options):
    """What to measure."""

    rows: int = Field(48, ge=8, multiple_of=8)
    """dialogues of the set"""
    batch_size: int = Field(8, ge=1)
    """dialogues of an optimizer step"""
    micro_batch_size: int = Field(8, ge=1)
    """ours: dialogues of a forward and backward pass"""
    dtype: str = "bf16"
    """of both: bf16 or fp32"""
    torch_compile: bool = True
    """ours: layers compiled, before the clock runs"""


def stage_options(options: Options) -> dict[str, Any]:
    """Of step 1 or 2, beside those of the data."""
    names = ("model", "batch_size", "micro_batch_size", "dtype", "torch_compile")
    given = {key: getattr(options, key) for key in names}
    return {**given, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "learning_rate": LEARNING_RATE}


def settings(options: Options, folder: Path) -> tuple[dict[str, Any], Any]:
    """What the contenders read; and the opened data."""
    stage, opened = inputs.first_rows(options, "sft", options.rows, folder, **stage_options(options))
    made = {"stage": stage, "model": options.model, "rows": inputs.demonstrations(opened.train), "folder": str(folder)}
    return {**made, "batch_size": options.batch_size, "dtype": options.dtype}, opened


def ours(settings: dict[str, Any], wire: Wire) -> None:
    """Step 1 without evaluation, checkpoints and files."""
    from rlhf import adapters
    from rlhf.distributed import collectives
    from rlhf.engine.training import Engine, compute_dtype, shards_of
    from rlhf.models.load import load_causal_lm
    from rlhf.models.policy import Policy
    from step1_sft import stage
    from step1_sft.config import SFTConfig

    given = SFTConfig(**settings["stage"])
    with collectives.process_group(given.timeout_s):
        wire.loading()
        tokenizer, data = stage.FINE_TUNING.open_data(given, given.model)
        dtype = compute_dtype(given, collectives.local_device())
        lm = load_causal_lm(given.model, dtype, len(tokenizer), given.seed, shards_of(given))
        policy = Engine(Policy(adapters.wrap(lm, given.adapter)), given, given, ENDLESS)
        wire.ready()
        # A warm-up is one step of rows that nobody counts.
        tokens = int(data.train.lengths.sum())
        run_ours(
            wire,
            given,
            data.train.sides,
            lambda batches, until: stage.train(policy, data.train, batches, until, tokenizer.pad_token_id),
            lambda told, work: {"tokens": tokens if work != WARM_UP else 0},
        )


def run_ours(
    wire: Wire,
    given: Any,
    sides: Any,
    train: Callable[[Any, Any], Iterator[dict[str, float]]],
    counted: Callable[[list[dict[str, float]], str], dict[str, int]],
) -> None:
    """A pass over the set each time one is asked for, a step where it is the warm-up.

    `train(batches, options)` is a stage's; `counted(steps, work)` what of it is told as done.
    """
    from data.batches import batches_of

    for epoch in itertools.count():
        work = wire.asked()
        if work is None:
            return
        batches = batches_of(sides, given, given.seed, (0, 1))
        batches.set_epoch(epoch)
        until = given.model_copy(update={"num_train_epochs": epoch + 1})
        began = time.perf_counter()
        told = list(itertools.islice(train(batches, until), 1 if work == WARM_UP else None))
        seconds = time.perf_counter() - began
        means = {name: sum(one[name] for one in told) / len(told) for name in ("loss", "padding")}
        wire.tell(seconds=seconds, steps=len(told), **counted(told, work), **means)


def trl(settings: dict[str, Any], wire: Wire, packing: bool = False) -> None:
    """TRL's SFTTrainer, paced from its callbacks."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    wire.loading()
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
    )
    if packing:
        packs = len(trainer.train_dataset)
        arguments.per_device_train_batch_size = max(1, round(settings["batch_size"] * packs / len(settings["rows"])))
        trainer._train_batch_size = arguments.per_device_train_batch_size
    steps = -(-len(trainer.train_dataset) // arguments.per_device_train_batch_size)
    run_paced(trainer, wire, steps)


def trl_packed(settings: dict[str, Any], wire: Wire) -> None:
    trl(settings, wire, packing=True)


def trainer_arguments(settings: dict[str, Any], bf16: bool) -> dict[str, Any]:
    """Those of transformers' Trainer, for both of TRL's. No checkpoint, no activation checkpointing."""
    return {
        "output_dir": f"{settings['folder']}/trl",
        "per_device_train_batch_size": settings["batch_size"],
        "max_steps": ENDLESS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "bf16": bf16,
        "use_cpu": True,
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
    """A trainer that adds up what `count` says of its batches."""

    class Paced(base):  # type: ignore[misc]
        counted = 0

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
            self.counted += count(inputs)
            return super().compute_loss(model, inputs, *args, **options)

    return Paced


def run_paced(trainer: Any, wire: Wire, steps: int, unit: str = "tokens") -> None:
    """Train as long as there are questions: a warm-up is one step, anything else `steps`, a pass over the set."""
    from transformers import TrainerCallback

    class Pace(TrainerCallback):  # type: ignore[misc]
        done = wanted = 0
        began = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wire.ready()
            self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.done += 1
            if self.done == self.wanted:
                wire.tell(seconds=time.perf_counter() - self.began, **{unit: trainer.counted}, steps=self.done)
                self.wait(control)

        def wait(self, control: Any) -> None:
            work = wire.asked()
            if work is None:
                control.should_training_stop = True
            self.done, self.wanted = 0, 1 if work == WARM_UP else steps
            trainer.counted, self.began = 0, time.perf_counter()

    trainer.add_callback(Pace())
    trainer.train()


CONTENDERS = {OURS: ours, PADDED: trl, PACKED: trl_packed, MACHINE: limits.contender}


def needed(options: Options, opened: Any) -> float:
    """Floating-point operations that the loss of one pass over the set needs."""
    items = list(opened.train)
    lengths = [len(item.ids) for item in items]
    predicted = sum(end - start for item in items for start, end in item.spans)
    return limits.work_of(options.model).training(sum(lengths), predicted, limits.seen_by(lengths))


def measure(options: Options) -> dict[str, Any]:
    """All of it, as written to the JSON file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given, opened = settings(options, folder)
        trl_needs = peers.environment(peers.SFT)
        envs = harness.chosen({OURS: {}, PADDED: trl_needs, PACKED: trl_needs, MACHINE: {}}, options)
        with harness.started("benchmarks.sft", envs, given, options.threads, folder) as contenders:
            rows = harness.alternate(contenders, options.repeats)
            flop = needed(options, opened)
            return outcome.results(
                "sft", options, contenders, rows, "tokens",
                peer=f"TRL {peers.SFT}",
                set={
                    "dialogues": len(opened.train),
                    "tokens": int(opened.train.lengths.sum()),
                    "needed_gflop": flop / 1e9,
                },
                ratios=outcome.ratios(rows, "tokens", TARGETS),
                shares=shares(rows, flop, options.dtype),
                limits=outcome.limits(rows),
            )  # fmt: skip


def shares(rows: harness.Rows, flop: float, dtype: str) -> dict[str, Any]:
    """Of the matrix-product peak, measured in the same turn: needed work over the time of a pass."""
    found = {}
    for who in (name for name in rows if name != MACHINE):
        pairs = zip(rows[who]["all"], rows[MACHINE]["all"], strict=True)
        values = [flop / 1e9 / row["seconds"] / machine[f"{dtype}_gflops"] for row, machine in pairs]
        goals = (LEAST_SHARE, AIM_SHARE) if who == OURS else (None, None)
        found[f"training, share of the {dtype} peak, {who}"] = outcome.share(values, *goals)
    return found


def main() -> int:
    if sys.argv[1:2] == ["--contender"]:
        return harness.contend(CONTENDERS, sys.argv[2:])
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.sft", "Fine-tuning here and in TRL.")
    outcome.write(measure(options), options)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

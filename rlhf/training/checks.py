"""Checks of options and models before a stage begins, so that a mistake is reported before training."""

from pathlib import Path

from rlhf import adapters
from rlhf.config import deepspeed_json
from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.engine import optimizers
from rlhf.engine.precision import compute_dtype, with_dtype
from rlhf.engine.training import require_possible
from rlhf.errors import UserError
from rlhf.hub import short_names
from rlhf.hub.untrusted import is_adapter
from rlhf.models import quantized
from rlhf.models.adapter_files import base_of, read_options, reason_against_sharing
from rlhf.models.load import load_config, require_context, require_decoder, require_vocabulary
from rlhf.roles import LoadTokenizer, tokenizer_of
from rlhf.storage import manifests
from rlhf.text.encoder import id_count
from rlhf.text.templates import template_name
from rlhf.text.tokenizer import describe_template, prepare_tokenizer


def check_engine(options: EngineOptions, ranks: int = 1) -> None:
    """ranks: number of processes

    Raises: UserError for options that exclude each other on this device, or a mistake in the adapter's options.
    """
    device = collectives.local_device()
    require_possible(options, device)
    optimizers.require_usable(options, device)
    dtype = compute_dtype(options, device)
    optimizers.require_whole(with_dtype(options, dtype), dtype.itemsize, ranks)
    quantized.require_possible(options)
    if options.share_trunk:
        _check_trunk_options(options)
    if options.adapter is None:
        return
    adapter = adapters.open_adapter(options.adapter)
    if adapter.check is not None:
        adapter.check(options)


def _check_trunk_options(options: EngineOptions) -> None:
    """Raises: UserError for an option with which several adapters cannot be on one model."""
    if options.adapter is None:
        raise UserError("--share-trunk: needs --adapter, the method that is trained on it, for example --adapter lora")
    refused = {
        f"--zero-stage {options.zero_stage}": options.zero_stage == 3,
        f"--tensor-parallel-size {options.tensor_parallel_size}": options.tensor_parallel_size > 1,
        f"--sequence-parallel-size {options.sequence_parallel_size}": options.sequence_parallel_size > 1,
        "--torch-compile": options.torch_compile,
    }
    for option in (option for option, is_set in refused.items() if is_set):
        raise UserError(
            f"--share-trunk: got it with {option}; expected --zero-stage 0, 1 or 2 and no split or compiler"
        )


def check_trunk(options: EngineOptions, base: str) -> None:
    """Raises: UserError if the adapter of the options cannot share the base model, which is not loaded."""
    if not options.share_trunk:
        return
    if base.endswith((".yaml", ".yml")):
        raise UserError(
            f"--share-trunk: model '{base}' is made with random weights, which adapters leave as they are; "
            "expected a trained model"
        )
    if is_adapter(Path(base)):
        raise UserError(f"--share-trunk: model '{base}' is an adapter, expected its base model '{base_of(base)}'")
    assert options.adapter is not None
    require_decoder(base)
    problem = reason_against_sharing(adapters.peft_options(options.adapter, load_config(base)))
    if problem is not None:
        raise UserError(f"--share-trunk: --adapter {options.adapter}: {problem}; expected lora without such options")


def check_steps(options: EngineOptions, rows: int, rows_text: str, micro_batch_size: int, ranks: int) -> None:
    """Raises: UserError unless the size of an optimizer step is the one that a DeepSpeed JSON names.

    rows: of one optimizer step; rows_text: the options that they follow from; ranks: those that share the rows
    """
    micro_batches = -(-rows // (micro_batch_size * ranks))
    follows = f"{rows_text} / (--micro-batch-size {micro_batch_size} x {ranks} processes)"
    sizes = {deepspeed_json.STEP_ROWS: (rows, rows_text), deepspeed_json.ACCUMULATION: (micro_batches, follows)}
    path = options.deepspeed_config
    for key, value in deepspeed_json.read(path).items() if path else ():
        if key in sizes and value != sizes[key][0]:
            size, text = sizes[key]
            raise UserError(f"{path}: {key} {value}: here it is {size} ({text}); leave it out, or set the options")


def check_start(
    model_path: str,
    chat_template: str,
    tokens: int,
    convert_template: bool = False,
    load: LoadTokenizer = tokenizer_of,
) -> None:
    """Check the model that a stage starts from.

    Raises: UserError if there is no model or no tokenizer, its context is shorter than `tokens`, its tokenizer is
    another model's, or (without `convert_template`) a stage made it with another chat template or end token.
    """
    source = short_names.resolve(model_path)
    if is_adapter(Path(source)):
        read_options(source)  # refuses virtual tokens
    tokenizer = load(model_path)
    prepared = prepare_tokenizer(tokenizer, chat_template)
    if chat_template != "auto" and not convert_template and manifests.stage_of(model_path) is not None:
        trained_with, requested = describe_template(tokenizer), describe_template(prepared)
        if trained_with != requested:
            name = template_name(trained_with["chat_template"]) or "of its own"
            raise UserError(
                f"{model_path}: made with chat template {name} and end token {trained_with['eos_token']}, but got "
                f"--chat-template {chat_template} (end token {requested['eos_token']}); use --chat-template auto, or "
                "add --convert-template to train on with the new one"
            )
    require_context(model_path, tokens)
    require_vocabulary(model_path, id_count(prepared))


def check_ranks(
    batch_size: int, ranks: int, name: str = "batch_size", parts: int = 1, parts_name: str = "parts"
) -> None:
    """Raises: UserError unless every rank gets the same share of a batch, and of each of its `parts`.

    name, parts_name: of the options
    """
    if batch_size % (ranks * parts):
        option, parts_option = (f"--{each.replace('_', '-')}" for each in (name, parts_name))
        share = f"{ranks} processes" + (f" x {parts_option} {parts}" if parts > 1 else "")
        near = max(1, round(batch_size / (ranks * parts))) * ranks * parts
        raise UserError(f"{option} {batch_size}: expected a multiple of {ranks * parts} ({share}); try {near}")

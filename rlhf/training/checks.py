"""What must be true of options and models before a stage begins, so that a mistake costs no training."""

from rlhf import adapters
from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.engine.training import require_possible
from rlhf.errors import UserError
from rlhf.hub import short_names
from rlhf.models.load import require_context, require_vocabulary
from rlhf.storage import manifests
from rlhf.text.encoder import id_count
from rlhf.text.templates import template_name
from rlhf.text.tokenizer import describe_template, load_tokenizer, prepare_tokenizer


def check_engine(options: EngineOptions) -> None:
    """Raises: UserError for options that do not go together on this device, or a mistake in the adapter's."""
    require_possible(options, collectives.local_device())
    if options.adapter is not None:
        adapters.open_adapter(options.adapter)


def check_start(place: str, chat_template: str, tokens: int, convert_template: bool = False) -> None:
    """Refuse a place that cannot be started from; with `convert_template`, one made with another template will do.

    Raises: UserError if there is no model or no tokenizer, it has no room for `tokens`, its tokenizer is another
    model's, or another stage made it with another chat template or end token.
    """
    found = load_tokenizer(short_names.resolve(place))
    asked = prepare_tokenizer(found, chat_template)
    if chat_template != "auto" and not convert_template and manifests.stage_of(place) is not None:
        made, now = describe_template(found), describe_template(asked)
        if made != now:
            name = template_name(made["chat_template"]) or "of its own"
            raise UserError(
                f"{place}: made with chat template {name} and end token {made['eos_token']}, but --chat-template "
                f"{chat_template} (end token {now['eos_token']}) is asked for; leave --chat-template auto, or add "
                "--convert-template to go on with the new one"
            )
    require_context(place, tokens)
    require_vocabulary(place, id_count(asked))


def check_ranks(
    batch_size: int, ranks: int, name: str = "batch_size", parts: int = 1, parts_name: str = "parts"
) -> None:
    """Raises: UserError unless every rank gets the same share of a batch, and of each of its `parts`. The names are
    those of the options."""
    if batch_size % (ranks * parts):
        option, parts_option = (f"--{each.replace('_', '-')}" for each in (name, parts_name))
        share = f"{ranks} processes" + (f" x {parts_option} {parts}" if parts > 1 else "")
        near = max(1, round(batch_size / (ranks * parts))) * ranks * parts
        raise UserError(f"{option} {batch_size}: expected a multiple of {ranks * parts} ({share}); try {near}")

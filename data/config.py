"""Options of the data, the same in all three stages. This module must not import torch."""

import json
import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from rlhf.config import Config, Tree, validate

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
"""of the files that `data/read/formats.py` reads"""
FILE_TYPES = f"{', '.join(SUFFIXES)} (.gz too)"


class DataOptions(Config):
    """Which rows are used, how they are divided, and how they become tokens."""

    FREE: ClassVar[frozenset[str]] = frozenset({"data_workers", "data_cache", "group_column"})

    data_path: tuple[str, ...] = ("hh_rlhf:Anthropic/hh-rlhf",)
    """paths of the rows, one or more of [source[,option=value]:]path[=weight]: a local .json, .jsonl, .csv,
    .parquet or .txt file (.gz too), a glob, a directory, a hub id (@revision too), a source by name (demo,
    hh_rlhf:DIR), or your own Python file. With weights, training rows are drawn in their proportion"""

    sft_only_data_path: tuple[str, ...] = ()
    """more paths, whose rows serve only fine-tuning (and its evaluation)"""

    reward_only_data_path: tuple[str, ...] = ()
    """more paths, for the reward model only"""

    ppo_only_data_path: tuple[str, ...] = ()
    """more paths, for PPO's prompts only"""

    eval_data_path: tuple[str, ...] = ()
    """paths of rows for evaluation, in all stages, instead of eval_fraction; no stage trains on their prompts"""

    data_split: tuple[float, float, float] = (2, 4, 4)
    """shares of the prompts that fine-tuning, reward modelling and PPO get of those they can use, without overlap"""

    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """share of all prompts held out for evaluation, the same ones in every stage; the rest is divided by data_split"""

    chat_template: str = "auto"
    """auto (the tokenizer's own, else human_assistant), plain, human_assistant, chatml, llama-2, llama-3, alpaca, or
    the path of a Jinja file"""

    chat_template_kwargs: str | None = None
    """what the chat template gets beside the messages, as JSON, such as '{"enable_thinking": false}'; a row's column of
    this name comes first, and the saved model has it too"""

    max_prompt_length: int = Field(256, ge=1)
    """tokens; a longer prompt loses its oldest turns"""

    max_length: int = Field(512, ge=2)
    """tokens of prompt and response together; the prompt is cut first, but keeps a fourth of them"""

    truncate: Literal["turns", "tokens"] = "turns"
    """what is cut from a row that is too long: turns = the oldest turns of its prompt; the row is dropped and
    counted if that is not enough; tokens = then also the first words of the last user turn, and the response's end"""

    max_dropped: float = Field(0.5, ge=0, le=1)
    """the run stops if more than this share of the training rows is too long, empty or equal on both sides"""

    max_train_rows: int | None = Field(None, ge=1)
    """maximal number of usable rows for training; none: all. With weights: the rows of an epoch; a path with too few
    rows repeats them"""

    max_eval_rows: int = Field(200, ge=0)
    """maximal number of rows for evaluation"""

    group_column: str | None = None
    """column with the name of a row's group, such as a language or a voter: the accuracy of the reward model and the
    gain of the policy are shown for each group too; none: `group`, or else `subset`"""

    skip_bad_rows: int = Field(0, ge=0)
    """malformed rows that are tolerated, per path; they are listed in bad_rows.txt"""

    data_seed: int = 0
    """seed of the split and of the order of the rows"""

    data_workers: int | None = Field(None, ge=1)
    """processes that tokenise; none: one per core, at most 8"""

    data_cache: str | None = None
    """directory for the cache of tokenised rows; none: $RLHF_CACHE, else ~/.cache/rlhf-pipeline"""

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _variables(cls, value: object) -> str | None:
        """A mapping, as a YAML file has it, or JSON on the command line."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ValueError(f"got {value!r}, expected JSON such as '{{\"enable_thinking\": false}}'") from None
        if value is not None and not (isinstance(value, dict) and all(map(str.isidentifier, value))):
            raise ValueError(f"got {value!r}, expected an object of names and values")
        return json.dumps(value, sort_keys=True) if value else None

    @field_validator("data_split", mode="before")
    @classmethod
    def _split_words(cls, shares: object) -> object:
        """`2,4,4` and `2 4 4` of the command line, and `2:4:4`."""
        words = [shares] if isinstance(shares, str) else shares
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return shares
        numbers = tuple(float(word) for word in re.split("[,:]", ",".join(words)) if word)
        if len(numbers) != 3:
            raise ValueError("expected three shares: 2,4,4")
        return numbers

    @field_validator("data_split")
    @classmethod
    def _some_share(cls, shares: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(shares) < 0 or not 0 < sum(shares) < float("inf"):
            raise ValueError("expected three shares, none negative and not all zero")
        return shares


def recorded_options(config: Tree) -> DataOptions:
    """The data options among those that a stage has recorded; defaults for options that it did not have yet."""
    return validate(
        DataOptions, {name: config[name] for name in DataOptions.model_fields if name in config}, "the data"
    )


class BatchOptions(Config):
    """How the rows of an epoch become batches. Sizes are per optimizer step, over all devices."""

    batch_size: int = Field(16, ge=1)
    """rows: dialogues, packed contexts or pairs; the pairs of one ranked list are in one batch and count as one. The
    last batch of an epoch has what is left"""
    batch_tokens: int | None = Field(None, ge=1)
    """tokens, instead of batch_size; a pair counts its prompt once and both responses, or both sides in full if prompts
    are so short that this saves less than a tenth"""
    group_by_length: bool = True
    """put rows of similar length into a batch: little padding, but less mixing; batch_tokens implies it"""

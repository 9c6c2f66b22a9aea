"""Options of the data, the same in all three stages. Importing this module must not import torch."""

from pydantic import Field, field_validator

from rlhf.config import Config


class DataOptions(Config):
    """Which rows, how they are divided, and how they become tokens."""

    data_path: tuple[str, ...] = ("hh_rlhf:Anthropic/hh-rlhf",)
    """where the rows come from, one or more of [source[,option=value]:]place: a local .json, .jsonl, .csv or .parquet
    file (.gz too), a hub id, a source by name (demo, hh_rlhf:DIR), or a Python file of your own"""

    data_split: tuple[float, float, float] = (2, 4, 4)
    """shares of the prompts that fine-tuning, reward modelling and PPO get; no prompt is in two"""

    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """share of all prompts held out for evaluation, the same ones in every stage; taken before data_split"""

    chat_template: str = "auto"
    """auto (the tokenizer's own, else human_assistant), plain, human_assistant, chatml, or the path of a Jinja file"""

    max_prompt_length: int = Field(256, ge=1)
    """tokens; a longer prompt loses its oldest turns, then its first tokens"""

    max_length: int = Field(512, ge=2)
    """tokens of prompt and response together; the prompt gives way first"""

    max_train_rows: int | None = Field(None, ge=1)
    """rows at most for training; none: all"""

    max_eval_rows: int = Field(200, ge=0)
    """rows at most for evaluation"""

    data_seed: int = 0
    """seed of the split and of the order of the rows"""

    @field_validator("data_path")
    @classmethod
    def _some_place(cls, places: tuple[str, ...]) -> tuple[str, ...]:
        if not places:
            raise ValueError("expected at least one place")
        return places

    @field_validator("data_split")
    @classmethod
    def _shares(cls, shares: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(shares) < 0 or not 0 < sum(shares) < float("inf"):
            raise ValueError("expected three shares, none negative and not all zero")
        return shares

"""Options of `rlhf evaluate-reward`. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from rlhf.config import Config


class EvaluateRewardConfig(Config):
    """The reward models, the pairs, and how the pairs are encoded."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("models",)

    models: tuple[str, ...] = ()
    """one or more reward models: stage directories, model directories, hub ids or short names. Several models with one
    tokenizer are also compared with each other"""
    data_path: tuple[str, ...] = ()
    """sources of pairs, as of training; each has its own row in the tables. Of a list of responses all pairs count. A
    column `group`, or else `subset`, makes subsets with a row of their own"""
    max_rows: int | None = Field(None, ge=1)
    """maximal number of pairs of each source; none: all"""
    chat_template: str = "auto"
    """auto (each model's own template), a name such as chatml, or a Jinja file"""
    max_prompt_length: int = Field(256, ge=1)
    """tokens; a longer prompt loses its oldest turns. Use the value of training"""
    max_length: int = Field(512, ge=2)
    """tokens of prompt and response together. Use the value of training"""
    truncate: Literal["turns", "tokens"] = "turns"
    """what is cut from a pair that is too long, as in training: turns of the prompt, or tokens too"""
    max_dropped: float = Field(0.5, ge=0, le=1)
    """the program stops if more than this share of the pairs is too long, empty or equal on both sides"""
    skip_bad_rows: int = Field(0, ge=0)
    """malformed rows that are tolerated, per source"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype of the models; auto = bf16 on devices that compute it fast, else fp32"""
    micro_batch_size: int = Field(8, ge=1)
    """pairs in one forward pass; changes memory and speed, and results by rounding alone"""
    data_workers: int | None = Field(None, ge=1)
    """processes that tokenise; none: one per core, at most 8"""
    data_cache: str | None = None
    """directory for the cache of tokenised rows; none: $RLHF_CACHE, else ~/.cache/rlhf-pipeline"""
    output: str | None = None
    """directory for results.json and results.md; by default results are only printed"""
    overwrite: bool = False
    """replace the results of an earlier call"""

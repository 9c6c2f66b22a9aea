"""Datasets that need no file of their own: their ids on the hub, their options, and how one record becomes a row.

docs/datasets.md has the same list for users.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from data.read.paths import TableConfig, is_hub_id, open_path
from data.read.records import Phase, Skipped
from data.read.table import Ranked, Table, phase_rows
from data.sources import _parsers as parsers
from data.sources._parsers import Texts
from rlhf.types import Row

SPLITS: Mapping[Phase, str] = {"sft": "train_sft", "reward": "train_prefs", "ppo": "train_gen"}


class HelpSteer(TableConfig):
    """How responses are ranked."""

    attribute: Literal["helpfulness", "correctness", "coherence", "complexity", "verbosity"] = "helpfulness"
    """the rating that ranks the responses"""


class HelpSteer2Preference(TableConfig):
    """Which rows of the only file are used."""

    part: Literal["train", "validation"] = "train"
    """value of the column `split`"""


class Mkqa(TableConfig):
    """Which language."""

    lang: Literal[
        "ar", "da", "de", "en", "es", "fi", "fr", "he", "hu", "it", "ja", "km", "ko", "ms", "nl", "no", "pl", "pt",
        "ru", "sv", "th", "tr", "vi", "zh_cn", "zh_hk", "zh_tw",
    ] = "zh_cn"  # fmt: skip
    """language of questions and answers"""


class SafeRlhf(TableConfig):
    """What is preferred."""

    label: Literal["better", "safer"] = "better"
    """the better (more helpful) or the safer response"""


class Shp(TableConfig):
    """Which pairs are used."""

    min_score_ratio: float = Field(2.0, ge=1)
    """votes of the preferred comment over those of the other, at least"""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A plug-in for one dataset. Options of its own go to `parse`."""

    name: str
    HUB_IDS: tuple[str, ...]
    parse: Callable[..., Row | Ranked]
    columns: tuple[str, ...] = ()
    """columns by which `files` knows the dataset; () if they are read as a shape, or no others need the parser"""
    Config: type[TableConfig] = TableConfig
    combine: Callable[[Iterator[Any], Phase], Iterator[Row | Skipped]] = phase_rows
    """the rows of all records, see `Table`"""
    part: Mapping[str, str] = field(default_factory=dict)
    """subset or data_dir on the hub, if the user names none"""
    splits: Mapping[Phase, str] = field(default_factory=dict)

    def build(self, config: TableConfig, path: str) -> Table:
        own = config.model_dump(exclude={*TableConfig.model_fields})
        path = path or next(iter(self.HUB_IDS), "")
        if is_hub_id(path) and config.subset is None and config.data_dir is None:
            config = config.model_copy(update=dict(self.part))
        return Table(open_path(path), config, partial(self.parse, **own), self.combine, self.splits)


DATASETS = (
    Dataset(
        "chatbot_arena",
        (
            "lmsys/chatbot_arena_conversations", "lmarena-ai/arena-human-preference-140k",
            "lmarena-ai/arena-human-preference-100k",
        ),
        parsers.chatbot_arena, ("conversation_a", "conversation_b", "winner"),
    ),
    # The hub has only a script; the English HC3 has the same columns.
    Dataset(
        "hc3_chinese", ("Hello-SimpleAI/HC3-Chinese", "Hello-SimpleAI/HC3"), parsers.hc3_chinese,
        ("question", "human_answers"),
    ),
    Dataset(
        "helpsteer", ("nvidia/HelpSteer", "nvidia/HelpSteer2"), parsers.helpsteer,
        ("prompt", "response", "helpfulness", "correctness"), HelpSteer, parsers.rows_by_prompt,
    ),
    # The bare id of the hub means the ratings.
    Dataset(
        "helpsteer2_preference", (), parsers.helpsteer2_preference,
        ("prompt", "response_1", "response_2", "preference_strength"), HelpSteer2Preference,
        part={"data_dir": "preference"},
    ),
    # The other subsets hold feedback and edits.
    Dataset(
        "helpsteer3", ("nvidia/HelpSteer3",), parsers.helpsteer3,
        ("context", "response1", "response2", "overall_preference"), part={"subset": "preference"},
    ),
    Dataset("hh_rlhf", ("Anthropic/hh-rlhf",), parsers.hh_rlhf),
    Dataset(
        "miracl", ("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12"), parsers.miracl,
        ("query", "positive_passages", "negative_passages"),
    ),
    Dataset("mkqa", ("apple/mkqa",), parsers.mkqa, ("queries", "answers"), Mkqa),
    Dataset("nectar", ("berkeley-nest/Nectar",), parsers.nectar, ("prompt", "answers", "good_natured")),
    Dataset("qag_jaquad", ("lmqg/qag_jaquad",), parsers.qag_jaquad, ("questions", "answers", "paragraph")),
    # Questions on one paragraph stay in one split.
    Dataset(
        "qg_jaquad", ("lmqg/qg_jaquad",), Texts("question", "sentence", columns=("answer",), group="paragraph"),
    ),
    Dataset(
        "rlhf_reward_datasets", ("yitingxie/rlhf-reward-datasets",), partial(parsers.rm_static, marker="Assistant:")
    ),
    Dataset("rm_static", ("Dahoas/rm-static", "Dahoas/full-hh-rlhf"), parsers.rm_static),
    Dataset(
        "safe_rlhf", ("PKU-Alignment/PKU-SafeRLHF",), parsers.safe_rlhf,
        ("prompt", "response_0", "response_1", "better_response_id"), SafeRlhf,
    ),
    Dataset("sharegpt_vicuna", ("pvduy/sharegpt_alpaca_oa_vicuna_format",), parsers.sharegpt_vicuna),
    Dataset("shp", ("stanfordnlp/SHP",), parsers.shp, ("history", "human_ref_A", "human_ref_B", "labels"), Shp),
    Dataset(
        "stack_exchange", ("HuggingFaceH4/stack-exchange-preferences",), parsers.stack_exchange,
        ("qid", "question", "answers"),
    ),
    Dataset(
        "stack_exchange_paired", ("lvwerra/stack-exchange-paired",),
        Texts("question", "response_j", "response_k", columns=("qid",)), ("question", "response_j", "response_k"),
    ),
    Dataset(
        "synthetic_instruct", ("Dahoas/synthetic-instruct-gptj-pairwise",),
        Texts("prompt", "chosen", "rejected", strip=True),
    ),
    Dataset("ultrafeedback", ("HuggingFaceH4/ultrafeedback_binarized",), parsers.ultrafeedback, splits=SPLITS),
    Dataset(
        "webgpt", ("openai/webgpt_comparisons",), parsers.webgpt,
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
    ),
    Dataset(
        "zhihu_kol", ("wangrui6/Zhihu-KOL",),
        Texts("INSTRUCTION", "RESPONSE", columns=("METADATA",), strip=True), ("INSTRUCTION", "RESPONSE"),
    ),
)  # fmt: skip
ROWS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in DATASETS})

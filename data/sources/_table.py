"""Datasets that need no file of their own: their ids on the hub, and how one record becomes a row.

The functions are in the order of the table at the end. Each raises UserError for a malformed record, and Unusable for
one that cannot be trained on. docs/datasets.md has the same list for users.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from data.read.columns import (
    as_prompt,
    first_user_text,
    merge_messages,
    read_choice,
    read_list,
    read_number,
    read_struct,
    read_structs,
    read_value,
    select_columns,
    user_prompt,
)
from data.read.dialogues import parse_transcript, read_dialogue
from data.read.paths import PARQUET_REVISION, TableConfig, is_hub_id, open_path
from data.read.records import Phase, Record, Unusable, read_text
from data.read.table import Ranked, Table
from rlhf.errors import UserError
from rlhf.text.messages import require_text
from rlhf.types import Message, Row

CITATION = re.compile(r"[ \t]*\[\d+(?:[,\s]+\d+)*\]")
MARKER = "Assistant:"
SAFETY = ("is_response_0_safe", "is_response_1_safe", "better_response_id", "safer_response_id")
SPLITS: Mapping[Phase, str] = {"sft": "train_sft", "reward": "train_prefs", "ppo": "train_gen"}
WINNERS = ("model_a", "model_b", "tie", "tie (bothbad)")


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
class Texts:
    """A row from columns of text: the prompt, the demonstration or preferred response, and the other one."""

    prompt: str
    response: str
    rejected: str | None = None
    columns: tuple[str, ...] = ()
    """columns that the row has beside them, for reward functions"""
    strip: bool = False
    group: str | None = None
    """column by which rows stay in one split; None: the prompt"""

    def __call__(self, record: Record, location: str) -> Row:
        names = (self.prompt, self.response, *([self.rejected] if self.rejected else []))
        texts = [read_text(record, name, location) for name in names]
        prompt, response, *rejected = [text.strip() for text in texts] if self.strip else texts
        group = read_text(record, self.group, location) if self.group else prompt
        columns = select_columns(record, *self.columns)
        return Row(user_prompt(prompt), response, rejected[0] if rejected else None, group, columns)


def chatbot_arena(record: Record, location: str) -> Row:
    """Votes between two models' conversations (arXiv 2306.05685). After the first turn each model has its own, so a
    pair needs the same messages before the last response."""
    sides = [read_dialogue(record, column, location) for column in ("conversation_a", "conversation_b")]
    winner = read_choice(record, "winner", location, WINNERS)
    if winner.startswith("tie"):
        raise Unusable("tie")
    chosen, rejected = sides if winner == "model_a" else sides[::-1]
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise Unusable("conversation does not end in the assistant's turn")
    if chosen[:-1] != rejected[:-1]:
        raise Unusable("conversations differ before the last turn")
    prompt = as_prompt(chosen[:-1])
    columns = select_columns(record, "question_id", "language")
    return Row(prompt, chosen[-1].content, rejected[-1].content, first_user_text(prompt), columns)


def hc3_chinese(record: Record, location: str) -> Row:
    """Questions answered by people and by ChatGPT (arXiv 2301.07597): the first human answer is the demonstration."""
    prompt = read_text(record, "question", location).strip()
    answers = read_list(record, "human_answers", location)
    if not answers:
        raise Unusable("no human answer")
    response = require_text(answers[0], f"{location}: human_answers[0]").strip()
    return Row(user_prompt(prompt), response, None, prompt, select_columns(record, "id"))


def helpsteer3(record: Record, location: str) -> Ranked:
    """Dialogues with two responses (arXiv 2505.11475). The preference runs from -3 to 3: below 0 response1 is
    preferred, above 0 response2, and 0 is a tie."""
    prompt = as_prompt(read_dialogue(record, "context", location))
    first, second = read_text(record, "response1", location), read_text(record, "response2", location)
    preference = read_number(record, "overall_preference", location)
    columns = select_columns(record, "domain", "language", "overall_preference")
    return Ranked(prompt, ((first, -preference), (second, 0.0)), first_user_text(prompt), columns)


def miracl(record: Record, location: str) -> Ranked:
    """Questions with passages that answer them and passages that do not (arXiv 2210.09984): the first of each."""
    prompt = read_text(record, "query", location)
    good, bad = (
        [read_text(passage, "text", where) for where, passage in read_structs(record, column, location)[:1]]
        for column in ("positive_passages", "negative_passages")
    )
    if not good:
        raise Unusable("no positive passage")
    responses = ((good[0], 1.0), *((passage, 0.0) for passage in bad))
    return Ranked(user_prompt(prompt), responses, prompt, select_columns(record, "query_id"))


def mkqa(record: Record, location: str, lang: str) -> Row:
    """Questions with short answers in 26 languages (arXiv 2007.15207; github.com/apple/ml-mkqa). The first answer that
    is text is the demonstration; the column `answers` has all accepted ones. A question without one is left out."""
    prompt = read_text(read_struct(record, "queries", location), lang, f"{location}: queries")
    answers = read_structs(read_struct(record, "answers", location), lang, f"{location}: answers")
    accepted = list(dict.fromkeys(text for where, answer in answers for text in _accepted(answer, where)))
    if not accepted:
        raise Unusable("no short answer")
    columns = {**select_columns(record, "example_id"), "answers": accepted}
    return Row(user_prompt(prompt), accepted[0], None, prompt, columns)


def _accepted(answer: Record, location: str) -> list[str]:
    """The text of one answer and its aliases; empty if the text is null."""
    if read_value(answer, "text", location) is None:
        return []
    aliases = read_list(answer, "aliases", location) if answer.get("aliases") is not None else []
    return [read_text(answer, "text", location), *(require_text(alias, f"{location}: aliases") for alias in aliases)]


def qag_jaquad(record: Record, location: str) -> Row:
    """Paragraphs of Japanese Wikipedia with questions on them (arXiv 2202.01764, 2210.03992): the first one is the
    prompt, the paragraph the demonstration."""
    questions, paragraph = read_list(record, "questions", location), read_text(record, "paragraph", location)
    if not questions:
        raise Unusable("no question")
    prompt = require_text(questions[0], f"{location}: questions[0]")
    return Row(user_prompt(prompt), paragraph, None, paragraph)


def rlhf_reward_datasets(record: Record, location: str) -> Row:
    """Dialogues of several preference sets, as `rm_static`; the responses begin with a marker, which is dropped."""
    prompt = as_prompt(parse_transcript(read_text(record, "prompt", location), f"{location}: prompt"))
    texts = {column: read_text(record, column, location).strip() for column in ("chosen", "rejected")}
    for column, text in texts.items():
        if not text.startswith(MARKER):
            raise UserError(f"{location}: {column}: got text that begins {text[:20]!r}, expected '{MARKER} ...'")
    chosen, rejected = (text.removeprefix(MARKER).strip() for text in texts.values())
    return Row(prompt, chosen, rejected, first_user_text(prompt))


def rm_static(record: Record, location: str) -> Row:
    """HH-RLHF with the prompt in its own column, a dialogue `\\n\\nHuman: ...\\n\\nAssistant:` that becomes turns."""
    prompt = as_prompt(parse_transcript(read_text(record, "prompt", location), f"{location}: prompt"))
    chosen, rejected = (read_text(record, column, location).strip() for column in ("chosen", "rejected"))
    return Row(prompt, chosen, rejected, first_user_text(prompt))


def safe_rlhf(record: Record, location: str, label: str) -> Row:
    """Pairs with one label for the better response and one for the safer (arXiv 2406.15513), which may disagree. The
    preferred response is the demonstration, even if it is unsafe."""
    prompt, first, second = (read_text(record, column, location) for column in ("prompt", "response_0", "response_1"))
    second_preferred = read_choice(record, f"{label}_response_id", location, (0, 1))
    chosen, rejected = (second, first) if second_preferred else (first, second)
    return Row(user_prompt(prompt), chosen, rejected, prompt, select_columns(record, *SAFETY))


def sharegpt_vicuna(record: Record, location: str) -> Row:
    """Dialogues `USER: ... ASSISTANT: ... USER: ... ASSISTANT:` in Vicuna's format; the label is the demonstration."""
    if read_value(record, "prompt", location) is None or read_value(record, "label", location) is None:
        raise Unusable("null prompt or label")
    response = read_text(record, "label", location).strip()
    prompt = as_prompt(_vicuna_turns(read_text(record, "prompt", location), f"{location}: prompt"))
    return Row(prompt, response, None, first_user_text(prompt))


def _vicuna_turns(text: str, location: str) -> tuple[Message, ...]:
    """The turns, without the spaces around them; text before the first one is the system message."""
    before, *parts = re.split(r"(?:^|(?<=\s))(USER|ASSISTANT):", text)
    if not parts:
        raise UserError(f"{location}: got text that begins {text[:20]!r}, expected 'USER: ... ASSISTANT:'")
    system = [Message("system", before.strip())] if before.strip() else []
    turns = (Message(role.lower(), turn.strip()) for role, turn in zip(parts[::2], parts[1::2], strict=True))
    return merge_messages([*system, *turns])


def shp(record: Record, location: str, min_score_ratio: float) -> Row:
    """Reddit posts with two comments and their votes (arXiv 2110.08420): the one with more votes, not older, is
    preferred. The authors recommend pairs whose votes differ by a factor of at least 2."""
    prompt, a, b = (read_text(record, column, location) for column in ("history", "human_ref_A", "human_ref_B"))
    chosen, rejected = (a, b) if read_choice(record, "labels", location, (0, 1)) else (b, a)
    if read_number(record, "score_ratio", location) < min_score_ratio:
        raise Unusable(f"score ratio below {min_score_ratio:g}")
    columns = select_columns(record, "post_id", "domain", "score_ratio")
    return Row(user_prompt(prompt), chosen, rejected, prompt, columns)


def ultrafeedback(record: Record, location: str) -> Ranked:
    """UltraFeedback in pairs (arXiv 2310.01377): dialogues that repeat the prompt, with scores; equal: a tie."""
    chosen, rejected = (read_dialogue(record, column, location) for column in ("chosen", "rejected"))
    scores = [read_number(record, column, location) for column in ("score_chosen", "score_rejected")]
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise Unusable("dialogue does not end in the assistant's turn")
    if chosen[:-1] != rejected[:-1]:
        raise Unusable("chosen and rejected differ before the last turn")
    prompt = as_prompt(chosen[:-1])
    responses = tuple(zip((chosen[-1].content, rejected[-1].content), scores, strict=True))
    return Ranked(prompt, responses, first_user_text(prompt), select_columns(record, "prompt_id"))


def webgpt(record: Record, location: str) -> Ranked:
    """Questions with two researched answers and their scores (arXiv 2112.09332). Citations such as [1] are removed,
    because the cited texts are not in the prompt."""
    question = read_struct(record, "question", location)
    prompt = read_text(question, "full_text", f"{location}: question")
    responses = tuple(
        (
            CITATION.sub("", read_text(record, f"answer_{i}", location)).strip(),
            read_number(record, f"score_{i}", location),
        )
        for i in (0, 1)
    )
    return Ranked(user_prompt(prompt), responses, prompt, {"question_id": question.get("id")})


@dataclass(frozen=True, slots=True)
class Dataset:
    """A plug-in for one dataset. Options of its own go to `parse`."""

    name: str
    HUB_IDS: tuple[str, ...]
    parse: Callable[..., Row | Ranked]
    Config: type[TableConfig] = TableConfig
    script: bool = False
    """the hub has it only as a loading script, which `datasets` does not run"""
    subset: str | None = None
    """subset on the hub, if the user names none"""
    splits: Mapping[Phase, str] = field(default_factory=dict)

    def build(self, config: TableConfig, path: str) -> Table:
        """Raises: UserError, with the cure, for a loading script. Needs no network for it."""
        own = config.model_dump(exclude={*TableConfig.model_fields})
        hub_id = path or self.HUB_IDS[0]
        if self.script and hub_id.casefold() in map(str.casefold, self.HUB_IDS) and is_hub_id(hub_id):
            raise UserError(
                f"{self.name}: {hub_id} ships a loading script, which `datasets` refuses to run; download its data "
                f"files and write {self.name}:PATH, or write {self.name}:{hub_id}@{PARQUET_REVISION} for the hub's "
                "conversion to parquet"
            )
        if self.subset and is_hub_id(hub_id) and config.subset is None and config.data_dir is None:
            config = config.model_copy(update={"subset": self.subset})
        return Table(open_path(hub_id), config, partial(self.parse, **own), splits=self.splits)


DATASETS = (
    Dataset("chatbot_arena", ("lmsys/chatbot_arena_conversations",), chatbot_arena),
    # The hub has only a script; the English HC3 has the same columns.
    Dataset("hc3_chinese", ("Hello-SimpleAI/HC3-Chinese", "Hello-SimpleAI/HC3"), hc3_chinese, script=True),
    Dataset("helpsteer3", ("nvidia/HelpSteer3",), helpsteer3, subset="preference"),  # others hold feedback and edits
    Dataset("miracl", ("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12"), miracl),
    Dataset("mkqa", ("apple/mkqa",), mkqa, Mkqa, script=True),
    Dataset("qag_jaquad", ("lmqg/qag_jaquad",), qag_jaquad, script=True),
    # Questions on one paragraph stay in one split.
    Dataset(
        "qg_jaquad", ("lmqg/qg_jaquad",), Texts("question", "sentence", columns=("answer",), group="paragraph"),
        script=True,
    ),
    Dataset("rlhf_reward_datasets", ("yitingxie/rlhf-reward-datasets",), rlhf_reward_datasets),
    Dataset("rm_static", ("Dahoas/rm-static", "Dahoas/full-hh-rlhf"), rm_static),
    Dataset("safe_rlhf", ("PKU-Alignment/PKU-SafeRLHF",), safe_rlhf, SafeRlhf),
    Dataset("sharegpt_vicuna", ("pvduy/sharegpt_alpaca_oa_vicuna_format",), sharegpt_vicuna),
    Dataset("shp", ("stanfordnlp/SHP",), shp, Shp),
    Dataset(
        "stack_exchange_paired", ("lvwerra/stack-exchange-paired",),
        Texts("question", "response_j", "response_k", columns=("qid",)),
    ),
    Dataset(
        "synthetic_instruct", ("Dahoas/synthetic-instruct-gptj-pairwise",),
        Texts("prompt", "chosen", "rejected", strip=True),
    ),
    Dataset("ultrafeedback", ("HuggingFaceH4/ultrafeedback_binarized",), ultrafeedback, splits=SPLITS),
    Dataset("webgpt", ("openai/webgpt_comparisons",), webgpt, script=True),
    Dataset("zhihu_kol", ("wangrui6/Zhihu-KOL",), Texts("INSTRUCTION", "RESPONSE", columns=("METADATA",), strip=True)),
)  # fmt: skip
ROWS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in DATASETS})

"""What each source's dataset looks like: records of one prompt, made from its texts. All of it invented.

`make(question, good, bad)` writes them as the dataset does, so that the rows are known beforehand: `question` is the
prompt, `good` the demonstration and the chosen side, `bad` the rejected one. A row of `Texts` in the table of
datasets needs no example here.
"""

import html
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.read.records import Phase
from data.sources._parsers import Texts
from data.sources._table import DATASETS

Record = dict[str, Any]
Make = Callable[[str, str, str], list[Record]]

COUNT = 60
PHASES: tuple[Phase, ...] = ("sft", "reward", "ppo")
NO_PAIRS: tuple[Phase, ...] = ("sft", "ppo")


@dataclass(frozen=True)
class Example:
    """One source. Columns are named by their last key, wherever they lie in the record."""

    make: Make | None = None
    write: Callable[[Path], str] | None = None
    """for a source without records: makes a place of some COUNT rows in a folder"""
    options: str = ""
    phases: tuple[Phase, ...] = PHASES
    optional: tuple[str, ...] = ()
    """may be missing or null"""
    free: tuple[str, ...] = ()
    """may be anything"""
    one_shape: bool = True
    """whether a record without one of the columns is malformed, and not of another shape"""
    nulls: dict[str, str] = field(default_factory=dict)
    """column: the reason that rows are counted under whose value is null, as the dataset documents"""


def plain_pair(prompt: str, chosen: str, rejected: str) -> Make:
    """Records of three columns of plain text."""
    return lambda question, good, bad: [{prompt: question, chosen: good, rejected: bad}]


def of_texts(texts: Texts) -> Example:
    """The example of a row of texts: its columns, and in those beside them what no text is."""

    def make(question: str, good: str, bad: str) -> list[Record]:
        sides = {texts.prompt: question, texts.response: good} | ({texts.rejected: bad} if texts.rejected else {})
        group = {texts.group: f"{good} {bad}"} if texts.group else {}
        return [{**sides, **group, **dict.fromkeys(texts.columns, 1), "another": "column"}]

    return Example(make, phases=PHASES if texts.rejected else NO_PAIRS, free=(*texts.columns, "another"))


def turns(question: str, response: str) -> list[Record]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": response}]


def hh_rlhf(question: str, good: str, bad: str) -> list[Record]:
    before = f"\n\nHuman: {question}\n\nAssistant: "
    return [{"chosen": before + good, "rejected": before + bad}]


def rm_static(question: str, good: str, bad: str) -> list[Record]:
    prompt = f"\n\nHuman: {question}\n\nAssistant:"
    return [{"prompt": prompt, "response": f" {good}", "chosen": f" {good}", "rejected": f" {bad}"}]


def rlhf_reward_datasets(question: str, good: str, bad: str) -> list[Record]:
    prompt = f"\n\nHuman: {question}\n\n"
    return [{"prompt": prompt, "chosen": f"Assistant: {good}", "rejected": f"Assistant: {bad}"}]


def shp(question: str, good: str, bad: str) -> list[Record]:
    votes = {"score_A": 4, "score_B": 12, "labels": 0, "score_ratio": 3.0}
    return [{"post_id": "p1", "domain": "d", "history": question, "human_ref_A": bad, "human_ref_B": good, **votes}]


def webgpt(question: str, good: str, bad: str) -> list[Record]:
    prompt = {"dataset": "made", "id": "q1", "full_text": question}
    quotes = {"title": ["A page"], "extract": ["Its words."]}
    one = {"quotes_0": quotes, "answer_0": f"{bad} [1]", "score_0": -0.5}
    return [{"question": prompt, **one, "quotes_1": quotes, "answer_1": f"{good} [2, 3]", "score_1": 0.5}]


def stack_exchange(question: str, good: str, bad: str) -> list[Record]:
    answers = [
        {
            "answer_id": i,
            "author": "a",
            "author_id": i,
            "author_profile": "p",
            "pm_score": i,
            "selected": bool(i),
            "text": t,
        }
        for i, t in enumerate((f"<p>{html.escape(bad)}</p>", f"<p>{html.escape(good)}</p>"))
    ]
    return [
        {
            "qid": 1,
            "question": f"<p>{html.escape(question)}</p>",
            "answers": answers,
            "date": "2012/05/01",
            "metadata": ["m"],
        }
    ]


def helpsteer(question: str, good: str, bad: str) -> list[Record]:
    ratings = {"correctness": 2, "coherence": 4, "complexity": 1, "verbosity": 1}
    return [
        {"prompt": question, "response": response, "helpfulness": helpfulness, **ratings}
        for response, helpfulness in ((bad, 1), (good, 4))
    ]


def helpsteer2_preference(question: str, good: str, bad: str) -> list[Record]:
    record = {"split": "train", "prompt": question, "response_1": bad, "response_2": good, "preference_strength": 2}
    return [{**record, "preference_statement": "The second one.", "all_preferences_unprocessed": []}]


def helpsteer3(question: str, good: str, bad: str) -> list[Record]:
    context = [{"role": "user", "content": question}]
    record = {"context": context, "response1": good, "response2": bad, "overall_preference": -2}
    return [{"domain": "general", "language": "english", **record, "individual_preference": []}]


def safe_rlhf(question: str, good: str, bad: str) -> list[Record]:
    record = {"prompt": question, "response_0": bad, "response_1": good, "better_response_id": 1}
    return [{**record, "safer_response_id": 0, "is_response_0_safe": True, "is_response_1_safe": False}]


def chatbot_arena(question: str, good: str, bad: str) -> list[Record]:
    record = {"question_id": "q1", "winner": "model_b", "conversation_a": turns(question, bad)}
    return [{**record, "conversation_b": turns(question, good), "turn": 1, "language": "English"}]


def nectar(question: str, good: str, bad: str) -> list[Record]:
    answers = [{"answer": text, "model": "m", "rank": rank} for text, rank in ((bad, 2.0), (f" {good}", 1.0))]
    record = {"prompt": f"\n\nHuman: {question}\n\nAssistant: ", "answers": answers, "turns": 1, "num_responses": 2}
    return [{**record, "source": ["anthropic-hh"], "good_natured": True}]


def oasst1(question: str, good: str, bad: str) -> list[Record]:
    root = f"id of {question}"
    every: list[tuple[str | None, str, str, int | None]] = [
        (None, "prompter", question, None),
        (root, "assistant", bad, 1),
        (root, "assistant", good, 0),
    ]
    return [
        {
            "message_id": f"{root} {text}" if parent else root,
            "parent_id": parent,
            **{"text": text, "role": role, "lang": "en", "rank": rank, "deleted": False, "review_result": True},
        }
        for parent, role, text, rank in every
    ]


def oasst1_tree(question: str, good: str, bad: str) -> list[Record]:
    root, *replies = oasst1(question, good, bad)
    replies = [{**reply, "replies": []} for reply in replies]
    return [{"message_tree_id": root["message_id"], "tree_state": "ready", "prompt": {**root, "replies": replies}}]


def ultrafeedback(question: str, good: str, bad: str) -> list[Record]:
    sides = {"chosen": turns(question, good), "rejected": turns(question, bad)}
    record = {"prompt": question, "prompt_id": "p1", **sides, "messages": turns(question, good)}
    return [{**record, "score_chosen": 8.5, "score_rejected": 3.0}]


def miracl(question: str, good: str, bad: str) -> list[Record]:
    passages = [[{"docid": "1#0", "title": "T", "text": text}] for text in (good, bad)]
    record = {"query_id": "1#0", "query": question, "positive_passages": passages[0]}
    return [{**record, "negative_passages": passages[1], "emb": [0.0, 0.5]}]


def hc3_chinese(question: str, good: str, bad: str) -> list[Record]:
    return [{"id": "0", "question": question, "human_answers": [good], "chatgpt_answers": [bad]}]


def mkqa(question: str, good: str, bad: str) -> list[Record]:
    answers = {"en": [{"type": "entity", "text": "a word"}], "ja": [{"type": "entity", "text": good, "aliases": [bad]}]}
    return [{"query": "which", "queries": {"en": "which", "ja": question}, "answers": answers, "example_id": 1}]


def qag_jaquad(question: str, good: str, bad: str) -> list[Record]:
    return [{"questions": [question], "answers": [bad], "paragraph": good, "paragraph_id": "tr-0"}]


def sharegpt_vicuna(question: str, good: str, bad: str) -> list[Record]:
    return [{"prompt": f"USER: {question} ASSISTANT:", "label": good}]


def rt_polarity(folder: Path) -> str:
    for side, judgement in (("pos", "warm"), ("neg", "cold")):
        lines = [f"film {i} , by {judgement} people , is {judgement} ." for i in range(COUNT)]
        (folder / f"rt-polarity.{side}").write_text("\n".join(lines))
    return str(folder)


def llama_factory(folder: Path) -> str:
    lines = [f"Question {i}?\tAnswer {i}.\tNo {i}." for i in range(COUNT)]
    (folder / "pairs.tsv").write_text("\n".join(["ask\tgood\tbad", *lines]))
    columns = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    entry = {"file_name": "pairs.tsv", "ranking": True, "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"pairs": entry}))
    return str(folder / "dataset_info.json:pairs")


OF_TREES = ("rank", "deleted", "review_result")
SHAREGPT_NULLS = dict.fromkeys(("prompt", "label"), "null prompt or label")

EXAMPLES = {
    **{dataset.name: of_texts(dataset.parse) for dataset in DATASETS if isinstance(dataset.parse, Texts)},
    "chatbot_arena": Example(chatbot_arena, free=("question_id", "turn", "language")),
    "demo": Example(write=lambda folder: "", options=",rows=200"),
    "files": Example(plain_pair("prompt", "chosen", "rejected"), one_shape=False),
    "hc3_chinese": Example(hc3_chinese, phases=NO_PAIRS, free=("id", "chatgpt_answers")),
    "helpsteer": Example(helpsteer, free=("correctness", "coherence", "complexity", "verbosity")),
    "helpsteer2_preference": Example(
        helpsteer2_preference, free=("preference_statement", "all_preferences_unprocessed")
    ),
    "helpsteer3": Example(helpsteer3, free=("domain", "language", "individual_preference")),
    "hh_rlhf": Example(hh_rlhf),
    "llama_factory": Example(write=llama_factory),
    "miracl": Example(miracl, free=("query_id", "emb", "docid", "title")),
    "mkqa": Example(
        mkqa,
        options=",lang=ja",
        phases=NO_PAIRS,
        optional=("aliases",),
        free=("query", "en", "type", "example_id"),
        nulls={"text": "no short answer"},
    ),
    "nectar": Example(nectar, free=("model", "turns", "num_responses", "source", "good_natured")),
    "oasst1": Example(oasst1, options=",lang=en", optional=OF_TREES, nulls={"parent_id": "reply to no prompt"}),
    "oasst1/tree": Example(
        oasst1_tree, optional=(*OF_TREES, "replies"), free=("message_tree_id", "tree_state", "parent_id", "lang")
    ),
    "qag_jaquad": Example(qag_jaquad, phases=NO_PAIRS, free=("answers", "paragraph_id")),
    "rlhf_reward_datasets": Example(rlhf_reward_datasets),
    "rm_static": Example(rm_static, free=("response",)),
    "rt_polarity": Example(write=rt_polarity),
    "safe_rlhf": Example(safe_rlhf, free=("safer_response_id", "is_response_0_safe", "is_response_1_safe")),
    "sharegpt_vicuna": Example(sharegpt_vicuna, phases=NO_PAIRS, nulls=SHAREGPT_NULLS),
    "shp": Example(shp, free=("post_id", "domain", "score_A", "score_B")),
    "ultrafeedback": Example(ultrafeedback, free=("prompt", "prompt_id", "messages")),
    "stack_exchange": Example(
        stack_exchange,
        free=("qid", "answer_id", "author", "author_id", "author_profile", "selected", "date", "metadata"),
    ),
    "webgpt": Example(webgpt, free=("dataset", "id", "quotes_0", "quotes_1")),
}

FIXTURES: dict[str, tuple[str, tuple[Phase, ...]]] = {
    "Anthropic__hh-rlhf": ("hh_rlhf", PHASES),
    "Cohere__miracl-ja-queries-22-12": ("miracl", NO_PAIRS),
    "Cohere__miracl-zh-queries-22-12": ("miracl", PHASES),
    "Dahoas__full-hh-rlhf": ("rm_static", PHASES),
    "Dahoas__rm-static": ("rm_static", PHASES),
    "Dahoas__synthetic-instruct-gptj-pairwise": ("synthetic_instruct", PHASES),
    "Hello-SimpleAI__HC3-Chinese": ("hc3_chinese", NO_PAIRS),
    "HuggingFaceH4__stack-exchange-preferences": ("stack_exchange", PHASES),
    "HuggingFaceH4__ultrafeedback_binarized": ("ultrafeedback", PHASES),
    "OpenAssistant__oasst1": ("oasst1", PHASES),
    "PKU-Alignment__PKU-SafeRLHF": ("safe_rlhf", PHASES),
    "lmqg__qag_jaquad": ("qag_jaquad", NO_PAIRS),
    "lmqg__qg_jaquad": ("qg_jaquad", NO_PAIRS),
    "lmsys__chatbot_arena_conversations": ("chatbot_arena", PHASES),
    "lvwerra__stack-exchange-paired": ("stack_exchange_paired", PHASES),
    "mkqa": ("mkqa,lang=zh_cn", NO_PAIRS),
    "nvidia__HelpSteer": ("helpsteer", NO_PAIRS),
    "nvidia__HelpSteer2": ("helpsteer", PHASES),
    "nvidia__HelpSteer2.preference": ("helpsteer2_preference", PHASES),
    "nvidia__HelpSteer3.preference": ("helpsteer3", PHASES),
    "openai__webgpt_comparisons": ("webgpt", PHASES),
    "pvduy__sharegpt_alpaca_oa_vicuna_format": ("sharegpt_vicuna", NO_PAIRS),
    "stanfordnlp__SHP": ("shp,min_score_ratio=1", PHASES),
    "wangrui6__Zhihu-KOL": ("zhihu_kol", NO_PAIRS),
    "yitingxie__rlhf-reward-datasets": ("rlhf_reward_datasets", PHASES),
}
"""fixture file: (the source that reads it, the phases that get rows)"""


def place_of(example: Example, folder: Path) -> str:
    """A place with COUNT prompts."""
    if example.write:
        return example.write(folder)
    assert example.make
    groups = [example.make(f"Which is {i}?", f"That is {i}.", f"It is not {i}.") for i in range(COUNT)]
    return write_records(folder / "x.jsonl", [record for group in groups for record in group])


def write_records(path: Path, records: list[Record]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def steps_of(value: Any, above: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The way to every value inside a record."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [steps for key, one in inside for steps in ((*above, key), *steps_of(one, (*above, key)))]


def changed(record: Record, steps: tuple[str | int, ...], *to: Any) -> Record:
    """A copy with the value at the end of `steps` changed to `to`, or taken out."""
    copy: Record = json.loads(json.dumps(record))
    inside: Any = copy
    for step in steps[:-1]:
        inside = inside[step]
    if to:
        inside[steps[-1]] = to[0]
    else:
        del inside[steps[-1]]
    return copy


def of_another_type(value: Any) -> list[Any]:
    """Values that no column can mean which holds `value`; for text, half a surrogate pair too."""
    kinds: list[tuple[Any, tuple[type, ...]]] = [(7, (int, float)), ("x", (str,)), ([1], (list,)), ({"x": 1}, (dict,))]
    wrong = [other for other, types in kinds if isinstance(value, bool) or not isinstance(value, types)]
    wrong += [] if isinstance(value, bool) else [True]
    return [*wrong, "half \ud83d"] if isinstance(value, str) else wrong


@dataclass(frozen=True)
class Variant:
    """An example with one value changed."""

    what: str
    records: list[Record]
    line: int
    column: str
    """the last named column on the way to the value"""
    needed: bool
    reason: str | None
    """what the row is counted under, where the dataset documents such values"""


def variants(example: Example, *texts: str) -> Iterator[Variant]:
    """Every value of the example's records of another type, null, and taken out."""
    assert example.make
    records = example.make(*texts)
    for i, record in enumerate(records):
        for steps in steps_of(record):
            value: Any = record
            for step in steps:
                value = value[step]
            column = next(str(step) for step in reversed(steps) if isinstance(step, str))
            free = bool({*map(str, steps)} & {*example.free})
            gone: list[tuple[Any, ...]] = [(None,)] * (value is not None)
            gone += [()] * (isinstance(steps[-1], str) and example.one_shape)
            wrong: list[tuple[Any, ...]] = [(other,) for other in of_another_type(value)] * (value is not None)
            for to in gone + wrong:
                optional = column in example.optional and isinstance(steps[-1], str)
                needed = not free and (to in wrong or not optional)
                reason = example.nulls.get(column) if to == (None,) else None
                spoiled = [*records[:i], changed(record, steps, *to), *records[i + 1 :]]
                yield Variant(f"{steps} -> {to}", spoiled, i + 1, column, needed, reason)

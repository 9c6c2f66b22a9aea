"""How one record of a dataset becomes a row, for the datasets of `_table`.

The functions are in the order of that table. Each raises UserError for a malformed record, and Unusable for one that
cannot be trained on.
"""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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
from data.read.records import Phase, Record, Skipped, Unusable, read_text
from data.read.table import Ranked, phase_rows
from rlhf.errors import UserError
from rlhf.text.messages import require_text
from rlhf.types import Message, Row

CITATION = re.compile(r"[ \t]*\[\d+(?:[,\s]+\d+)*\]")
HTML = tuple(
    (re.compile(pattern, re.IGNORECASE), written)
    for pattern, written in (
        (r"<pre[^>]*>\s*<code[^>]*>|</code>\s*</pre>", "\n```\n"),
        (r"</?code>", "`"),
        (r"<li[^>]*>(?:\s*<p>)?", "- "),
        (r"</(?:p|h\d|ul|ol|blockquote)>\s*|<br\s*/?>\s*", "\n\n"),
        (r"</?[a-z][^<>]*>|<!--.*?-->", ""),
        (r"\n{3,}", "\n\n"),
    )
)
"""(pattern, replacement) of tags, in order"""
MAX_ANSWERS = 10
HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
SAFETY = ("is_response_0_safe", "is_response_1_safe", "better_response_id", "safer_response_id")
WINNERS = ("model_a", "model_b", "tie", "tie (bothbad)", "both_bad")


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


def _split_last(chosen: Sequence[Message], rejected: Sequence[Message]) -> tuple[tuple[Message, ...], str, str]:
    """(prompt, chosen response, rejected response) of two dialogues, which must differ in the last turn alone."""
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise Unusable("dialogue does not end in the assistant's turn")
    if chosen[:-1] != rejected[:-1]:
        raise Unusable("dialogues differ before the last turn")
    return as_prompt(chosen[:-1]), chosen[-1].content, rejected[-1].content


def chatbot_arena(record: Record, location: str) -> Row:
    """Votes between two models' conversations (arXiv 2306.05685). After the first turn each model has its own, so a
    pair needs the same messages before the last response."""
    columns = ("conversation_a", "conversation_b")
    if any(
        _has_images(turn.get("content")) for column in columns for _, turn in read_structs(record, column, location)
    ):
        raise Unusable("an image in the dialogue")
    sides = [read_dialogue(record, column, location) for column in columns]
    winner = read_choice(record, "winner", location, WINNERS)
    if winner not in ("model_a", "model_b"):
        raise Unusable("tie")
    prompt, chosen, rejected = _split_last(*(sides if winner == "model_a" else sides[::-1]))
    return Row(prompt, chosen, rejected, first_user_text(prompt), select_columns(record, "question_id", "language"))


def _has_images(content: object) -> bool:
    """Whether a message's content has parts that are no text."""
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)


def hc3_chinese(record: Record, location: str) -> Row:
    """Questions answered by people and by ChatGPT (arXiv 2301.07597): the first human answer is the demonstration."""
    prompt = read_text(record, "question", location).strip()
    answers = read_list(record, "human_answers", location)
    if not answers:
        raise Unusable("no human answer")
    response = require_text(answers[0], f"{location}: human_answers[0]").strip()
    return Row(user_prompt(prompt), response, None, prompt, select_columns(record, "id"))


def helpsteer(record: Record, location: str, attribute: str) -> Ranked:
    """One response, rated 0 to 4 on five attributes: HelpSteer (arXiv 2311.09528), HelpSteer2 (arXiv 2406.08673)."""
    prompt = _helpsteer_prompt(record, location)
    response, rating = read_text(record, "response", location), read_number(record, attribute, location)
    return Ranked(prompt, ((response, rating),), first_user_text(prompt))


def _helpsteer_prompt(record: Record, location: str) -> tuple[Message, ...]:
    """The user's first turn, then those that `\\n<extra_id_1>Assistant\\n` and `...User\\n` open."""
    first, *parts = HELPSTEER_TURN.split(read_text(record, "prompt", location))
    turns = [Message("user", first)] if first or not parts else []
    later = (Message(role.lower(), turn) for role, turn in zip(parts[::2], parts[1::2], strict=True))
    return as_prompt(merge_messages([*turns, *later]))


def rows_by_prompt(items: Iterator[Ranked | Skipped], phase: Phase) -> Iterator[Row | Skipped]:
    """Consecutive records with the same prompt are its responses. Those of only one prompt are in memory."""
    return phase_rows(_merge_by_prompt(items), phase)


def _merge_by_prompt(items: Iterable[Ranked | Skipped]) -> Iterator[Ranked | Skipped]:
    ranked: Ranked | None = None
    for item in items:
        if isinstance(item, Skipped):
            yield item
        elif ranked and ranked.prompt == item.prompt:
            ranked = replace(ranked, responses=ranked.responses + item.responses)
        else:
            if ranked:
                yield ranked
            ranked = item
    if ranked:
        yield ranked


def helpsteer2_preference(record: Record, location: str, part: str) -> Ranked:
    """Pairs with a strength from -3 to 3 (arXiv 2410.01257): below 0 response_1 is preferred, above 0 response_2, and 0
    is a tie. One file holds both splits, which its column `split` tells (train; val or validation)."""
    split = read_choice(record, "split", location, ("train", "validation", "val")).replace("validation", "val")
    if split != part.replace("validation", "val"):
        raise Unusable(f"of split {split}")
    prompt = _helpsteer_prompt(record, location)
    return _signed(record, location, prompt, ("response_1", "response_2"), "preference_strength")


def helpsteer3(record: Record, location: str) -> Ranked:
    """Dialogues with two responses (arXiv 2505.11475) and a preference as in HelpSteer2."""
    prompt = as_prompt(read_dialogue(record, "context", location))
    pair = _signed(record, location, prompt, ("response1", "response2"), "overall_preference")
    return replace(pair, columns=select_columns(record, "domain", "language", "overall_preference"))


def _signed(
    record: Record, location: str, prompt: tuple[Message, ...], columns: tuple[str, str], preference: str
) -> Ranked:
    """Two responses and a number, which is below 0 if the first is preferred, above 0 if the second is."""
    first, second = (read_text(record, column, location) for column in columns)
    responses = ((first, -read_number(record, preference, location)), (second, 0.0))
    return Ranked(prompt, responses, first_user_text(prompt), select_columns(record, preference))


def hh_rlhf(record: Record, location: str) -> Row:
    """Two dialogues (github.com/anthropics/hh-rlhf); the prompt is all before the last turn of the assistant.

    The group is the first message. If the dialogues differ before that turn, the row has no rejected side (none of
    3,109 rows in samples of harmless-base and helpful-base; 8 if consecutive turns of one speaker are not merged).
    """
    chosen, rejected = (_transcript(record, column, location) for column in ("chosen", "rejected"))
    group = chosen[0].content
    if chosen[-1].role != "assistant":
        return Row(chosen, group=group)
    prompt, response = chosen[:-1], chosen[-1].content
    paired = rejected[:-1] == prompt and rejected[-1].role == "assistant"
    return Row(prompt, response, rejected[-1].content if paired else None, group)


def _transcript(record: Record, column: str, location: str) -> tuple[Message, ...]:
    return parse_transcript(read_text(record, column, location), f"{location}: {column}")


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


def nectar(record: Record, location: str) -> Ranked:
    """Dialogues `\\n\\nHuman: ...\\n\\nAssistant: ` with seven answers, which GPT-4 has ranked: 1 is the best
    (starling.cs.berkeley.edu)."""
    prompt = as_prompt(_transcript(record, "prompt", location))
    answers = (
        (read_text(answer, "answer", at).strip(), -read_number(answer, "rank", at))
        for at, answer in read_structs(record, "answers", location)
    )
    return Ranked(prompt, tuple(answers), first_user_text(prompt))


def qag_jaquad(record: Record, location: str) -> Row:
    """Paragraphs of Japanese Wikipedia with questions on them (arXiv 2202.01764, 2210.03992): the first one is the
    prompt, the paragraph the demonstration."""
    questions, paragraph = read_list(record, "questions", location), read_text(record, "paragraph", location)
    if not questions:
        raise Unusable("no question")
    prompt = require_text(questions[0], f"{location}: questions[0]")
    return Row(user_prompt(prompt), paragraph, None, paragraph)


def rm_static(record: Record, location: str, marker: str = "") -> Row:
    """HH-RLHF with the prompt in its own column, a dialogue `\\n\\nHuman: ...\\n\\nAssistant:` that becomes turns.

    marker: the text that begins each response, and is dropped
    """
    prompt = as_prompt(_transcript(record, "prompt", location))
    responses = []
    for column in ("chosen", "rejected"):
        text = read_text(record, column, location).strip()
        if not text.startswith(marker):
            raise UserError(f"{location}: {column}: got text that begins {text[:20]!r}, expected '{marker} ...'")
        responses.append(text.removeprefix(marker).strip())
    chosen, rejected = responses
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


def stack_exchange(record: Record, location: str) -> Ranked:
    """Questions and answers of Stack Exchange in HTML; pm_score is log2 of the votes, one more for the accepted one
    (arXiv 2112.00861). Of more than ten answers ten are used, evenly spaced in rank: they are 45 pairs."""
    prompt = _plain(read_text(record, "question", location))
    answers = [
        (_plain(read_text(answer, "text", at)), read_number(answer, "pm_score", at))
        for at, answer in read_structs(record, "answers", location)
    ]
    ranking = sorted(answers, key=lambda answer: -answer[1])
    count = min(len(ranking), MAX_ANSWERS)
    spread = tuple(ranking[round(i * (len(ranking) - 1) / max(count - 1, 1))] for i in range(count))
    return Ranked(user_prompt(prompt), spread, prompt, select_columns(record, "qid"))


def _plain(source: str) -> str:
    """HTML as text: its paragraphs, list items, and code between backticks."""
    for pattern, written in HTML:
        source = pattern.sub(written, source)
    return html.unescape(source).strip()


def ultrafeedback(record: Record, location: str) -> Ranked:
    """UltraFeedback in pairs (arXiv 2310.01377): dialogues that repeat the prompt, with scores; equal: a tie."""
    sides = [read_dialogue(record, column, location) for column in ("chosen", "rejected")]
    scores = [read_number(record, column, location) for column in ("score_chosen", "score_rejected")]
    prompt, *texts = _split_last(*sides)
    responses = tuple(zip(texts, scores, strict=True))
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

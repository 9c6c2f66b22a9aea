"""Dialogues in Anthropic's format; all of them invented here."""

from pathlib import Path

import pytest

from data.prepare.mixture import open_origin
from data.read.dialogues import parse_transcript
from data.sources.hh_rlhf import parse_pair
from rlhf.errors import UserError
from rlhf.types import Message, Row

SHARED = Path(__file__).parents[4] / "shared/data/hh-rlhf"


def test_a_dialogue_by_hand() -> None:
    dialogue = (
        "\n\nHuman: How do I boil an egg?\n\nAssistant: Seven minutes.\nOr eight.\n\nHuman: Thanks \n\nAssistant:"
    )
    assert parse_transcript(dialogue, "f:1") == (
        Message("user", "How do I boil an egg?"),
        Message("assistant", "Seven minutes.\nOr eight."),
        Message("user", "Thanks"),
        Message("assistant", ""),
    )


def test_neighbouring_turns_of_one_speaker_become_one() -> None:
    dialogue = "\n\nHuman: One\n\nHuman: two\n\nAssistant: Three, as in Human: four\n\nAssistant:"
    assert parse_transcript(dialogue, "f:1") == (
        Message("user", "One\n\ntwo"),
        Message("assistant", "Three, as in Human: four"),
    )


def test_a_pair_shares_its_prompt_and_its_first_message_is_the_group() -> None:
    before = "\n\nHuman: Name a bird.\n\nAssistant: Wren.\n\nHuman: Another.\n\nAssistant:"
    row = parse_pair({"chosen": before + " Robin.", "rejected": before + " No."}, "f:1")
    prompt = (Message("user", "Name a bird."), Message("assistant", "Wren."), Message("user", "Another."))
    assert row == Row(prompt, "Robin.", "No.", "Name a bird.")


def test_dialogues_that_differ_early_are_no_pair() -> None:
    record = {"chosen": "\n\nHuman: A\n\nAssistant: B", "rejected": "\n\nHuman: C\n\nAssistant: D"}
    assert parse_pair(record, "f:1") == Row((Message("user", "A"),), "B", None, "A")


def test_a_dialogue_without_a_last_answer_is_a_prompt() -> None:
    record = {"chosen": "\n\nHuman: A", "rejected": "\n\nHuman: A\n\nAssistant: D"}
    assert parse_pair(record, "f:1") == Row((Message("user", "A"),), group="A")


@pytest.mark.parametrize("dialogue", ["", "Hello", "\n\nAssistant: Hi", "Note\n\nHuman: Hi\n\nAssistant: Hi"])
def test_text_that_is_no_dialogue(dialogue: str) -> None:
    with pytest.raises(UserError, match=r"f:1: chosen: got text that begins .*expected a dialogue"):
        parse_pair({"chosen": dialogue, "rejected": ""}, "f:1")


def test_transcripts_are_another_schema(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"red-team-attempts holds single transcripts.*expected data_dir harmless-base"):
        open_origin("hh_rlhf,data_dir=red-team-attempts:Anthropic/hh-rlhf")
    with pytest.raises(UserError, match=r"f:1: transcript: red-team-attempts holds single transcripts"):
        parse_pair({"transcript": "\n\nHuman: A\n\nAssistant: B", "rating": 1.0}, "f:1")


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data is not here")
def test_real_rows_are_all_pairs() -> None:
    rows = list(open_origin(f"hh_rlhf:{SHARED}").rows("reward"))
    assert len(rows) == 3109
    assert sum(row.rejected is None for row in rows) == 0
    assert {row.prompt[-1].role for row in rows} == {"user"}
    assert all("\n\nHuman:" not in message.content for row in rows for message in row.prompt)

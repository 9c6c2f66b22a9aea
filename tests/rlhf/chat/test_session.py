"""Dialogues and votes: what the models see, which rows are written, who reads them; and the terminal."""

import io
import json
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data.prepare.mixture import open_origin
from data.read.records import Skipped
from rlhf.chain.chat import BY_NAME
from rlhf.chat import session as sessions
from rlhf.chat import votes
from rlhf.chat.responses import Models
from rlhf.chat.run_models import run_models
from rlhf.chat.session import Session
from rlhf.chat.terminal import Terminal
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import read_prompts
from rlhf.streams import printable
from rlhf.types import Message, Row
from tests.support import chat_runs

NAMES = ("sft", "ppo")
Make = Callable[..., Session]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_runs.write(tmp_path_factory.mktemp("world") / "run")


@pytest.fixture(scope="module")
def models(run: Path) -> Models:
    """With the reward model of the run."""
    return sessions.open_session(chat_runs.options_of(run, compare=NAMES), run_models(str(run), BY_NAME)).models


@pytest.fixture
def make(models: Models, run: Path, tmp_path: Path) -> Make:
    def session(*names: str, **changes: Any) -> Session:
        options = chat_runs.options_of(run, **{"votes": str(tmp_path / "votes.jsonl"), "seed": 0, **changes})
        return Session(models, names or NAMES, options)

    return session


def rows(session: Session) -> list[dict[str, Any]]:
    return [json.loads(line) for line in session.votes.read_text(encoding="utf-8").splitlines()]


def ask(session: Session, *texts: str) -> list[str]:
    """Ask until both answers can be voted on, and return them."""
    for i in range(100):
        answers = session.ask(texts[0] if texts else f"w{4 + i} w9").responses
        if not votes.refusal(answers):
            return [answer.text for answer in answers]
        session.reset()
    raise AssertionError("no answers")


# --- dialogues


def test_a_dialogue_is_what_the_next_answer_sees(make: Make) -> None:
    session = make("ppo", system="w5")
    first = session.ask("w4 w7").responses[0].text
    assert first
    turn = session.ask("w8")
    expected = (Message("system", "w5"), Message("user", "w4 w7"), Message("assistant", first), Message("user", "w8"))
    assert turn.messages == expected == turn.generations[0].messages
    session.reset()
    assert session.ask("w8").messages == (Message("system", "w5"), Message("user", "w8"))


def test_answers_depend_on_seed_turn_and_side(make: Make) -> None:
    def answers(*questions: str, **changes: Any) -> list[str]:
        session, texts = make(**changes), []
        for question in questions:
            turn = session.ask(question)
            by_policy = dict(zip(turn.policies, turn.responses, strict=True))
            texts += [by_policy[name].text for name in NAMES]
            session.reset()
        return texts

    questions = chat_runs.PROMPTS[:4]
    assert answers(*questions) == answers(*questions) != answers(*questions, seed=1)
    repeated = answers(*["w4 w9"] * 8)
    assert len({*repeated[::2]}) > 1 and repeated[::2] != repeated[1::2]
    session = make("ppo", temperature=0.0)
    greedy = {session.ask("w4 w7").responses[0].text for _ in range(3) if session.reset() is None}
    assert len(greedy) == 1


def test_a_model_alone_has_no_scores_and_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = chat_runs.options_of(run / "base")
    session = sessions.open_session(options, run_models(options.run, BY_NAME))
    assert "answers are not scored; --reward names one" in capsys.readouterr().out
    session.ask("w4")
    assert session.score() == [None]
    sessions.open_session(options.model_copy(update={"reward": "none"}), run_models(options.run, BY_NAME))
    assert not capsys.readouterr().out


def test_the_better_answer_goes_on(make: Make) -> None:
    for preference, side in (("a", 0), ("b", 1), ("tie", 0)):
        session = make()
        answers = ask(session)
        session.vote(preference)  # type: ignore[arg-type]
        assert session.history[-1] == Message("assistant", answers[side]) and session.turn is None


def test_no_seed_tells_the_order_of_blind_sides(make: Make) -> None:
    """A person who knows the seed, or has seen another page, must not know who is on the left."""
    orders = set()
    for _ in range(12):
        session = make(seed=0)
        order = []
        for _ in range(3):
            order.append(session.ask("w4").policies)
            session.reset()
        orders.add(tuple(order))
    assert len(orders) > 1


def test_dialogues_have_seeds_of_their_own_that_votes_name(make: Make) -> None:
    one, two = make(seed=None), make(seed=None)
    assert one.seed != two.seed and make(seed=5).seed == 5
    ask(one)
    one.vote("a")
    assert rows(one)[0]["seed"] == one.seed


# --- votes


def test_votes_are_rows_of_preferences(make: Make, models: Models, run: Path) -> None:
    session = make(temperature=0.7, seed=3, system="w5")
    first = ask(session)
    scores, turn = session.score(), session.turn
    assert turn is not None
    session.vote("b")
    session.reset()
    second = ask(session)
    session.vote("a")
    session.ask("w8 w9")
    session.reset()
    ask(session)
    session.vote("tie")
    written = rows(session)
    assert [row["preference"] for row in written] == ["b", "a", "tie"]
    assert (written[0]["response_a"], written[0]["response_b"]) == tuple(first)
    models_of = {"sft": str(run / "step1_sft/model"), "ppo": str(run / "step3_ppo/actor")}
    for side, policy, score in zip("ab", turn.policies, scores, strict=True):
        assert score is not None
        assert [written[0][f"{name}_{side}"] for name in ("policy", "model", "score")] == [
            policy, models_of[policy], score,
        ]  # fmt: skip
    assert (written[0]["temperature"], written[0]["seed"], written[0]["response_length"]) == (0.7, 3, 24)
    assert written[0]["time"].startswith("20") and written[0]["time"].endswith("+00:00")
    one, two, tie = open_origin(str(session.votes)).rows("reward")
    assert isinstance(one, Row) and (one.response, one.rejected) == (first[1], first[0])
    assert isinstance(two, Row) and (two.response, two.rejected) == tuple(second)
    assert tie == Skipped("tie")
    prompts = [row.prompt for _, row in read_prompts(str(session.votes))]  # as `rlhf pairs --prompts` reads them
    assert len(prompts) == 3 and prompts[0] == one.prompt == turn.messages and one.prompt[0].role == "system"


def test_what_must_not_train_a_reward_model_is_no_vote(make: Make) -> None:
    session = make(response_length=1)
    session.ask("w4").responses  # noqa: B018  (sampled)
    with pytest.raises(UserError, match=r"no vote: .*(cut|empty|equal)"):
        session.vote("a")
    single = make("ppo")
    with pytest.raises(UserError, match="no question yet"):
        single.vote("a")
    with pytest.raises(UserError, match="empty message"):
        single.ask("  ")
    with pytest.raises(UserError, match="a message of 100,001 characters, expected at most 100,000"):
        single.ask("a" * 100_001)
    assert not session.votes.exists()


def append_many(path: str, writer: int, count: int) -> None:
    for number in range(count):
        votes.append(Path(path), {"writer": writer, "number": number, "text": "é" * (1000 * writer + number)})


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    file, count = tmp_path / "votes.jsonl", 60
    file.write_text('{"writer": 0, "number": 0}')  # an editor has left out the last line break
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=append_many, args=(str(file), writer, count)) for writer in (1, 9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    read = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(read) == 2 * count + 1
    for writer in (1, 9):
        assert [row["number"] for row in read if row["writer"] == writer] == [*range(count)]


def test_a_full_disk_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "votes.jsonl"
    votes.append(file, {"n": 1})
    before, write = file.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[: len(line) // 2]))
    with pytest.raises(UserError, match=r"--votes .*No space left"):
        votes.append(file, {"n": 2})
    monkeypatch.undo()
    assert file.read_bytes() == before
    with pytest.raises(UserError, match=r"--votes .*cannot be written"):
        votes.append(file / "below.jsonl", {})


# --- the terminal


def talk(session: Session, *lines: str, **console: Any) -> str:
    """What the terminal shows while a person types these lines."""
    waiting = iter(lines)

    def read(prompt: str) -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        out.write(f"{prompt}{line}\n")
        return line

    out = io.StringIO()
    Terminal(
        session, read, Console(file=out, width=200, highlight=False, markup=False, soft_wrap=True, **console)
    ).run()
    assert next(waiting, None) is None
    return out.getvalue()


def test_one_policy_in_the_terminal(make: Make) -> None:
    session = make("ppo")
    expected = make("ppo")
    shown = talk(session, "w4 w7", "w8", "/reset", "w9", "/help", "/what", "/quit")
    [answer] = expected.ask("w4 w7").responses
    [score] = expected.score()
    assert f"> w4 w7\n{answer.text}\n[ppo, score {score:.3g}, {answer.tokens} tokens" in shown
    assert "error: /what: no such command" in shown and "(new dialogue)" in shown
    assert session.turn is not None and session.turn.messages == (Message("user", "w9"),)


def test_votes_in_the_terminal_need_no_extra(make: Make, run: Path) -> None:
    question = ask_text(make)
    session = make()
    shown = talk(session, question, "x", "r", "/reset", question, "", force_terminal=True, color_system=None)
    assert f"(vote written to {session.votes})" in shown
    assert shown.count("better: l left, r right, t tie, then Enter") == 3  # x is no vote
    [row] = rows(session)
    assert row["preference"] == "b" and row["score_a"] is not None
    assert re.search(rf"│ {row['response_a']} +│ {row['response_b']} +│", shown)
    before, after = shown.split("better: ", 1)  # who wrote an answer is known after the vote
    assert not {"sft", "ppo", "score"} & {*re.findall(r"\w+", before.split(question, 1)[1])}
    assert f"left: {row['policy_a']}, score {row['score_a']:.3g}, " in after


def ask_text(make: Make) -> str:
    """A question whose answers can be voted on as the first and as the second of a session."""
    for i in range(4, 90):
        session = make()
        twice = []
        for _ in range(2):
            twice.append(votes.refusal(session.ask(f"w{i} w9").responses))
            session.reset()
        if not any(twice):
            return f"w{i} w9"
    raise AssertionError("no question")


def test_no_vote_is_asked_that_is_refused_and_mistakes_do_not_end_the_chat(make: Make) -> None:
    session = make(response_length=1)
    shown = talk(session, "w4", "/length 5", "w5 " * 100)
    assert (
        "(no vote: " in shown
        and "better:" not in shown
        and "error: /length 5: no such command" in shown
        and "start a new dialogue" in shown
    )


def test_a_model_cannot_write_to_the_terminal_what_it_obeys() -> None:
    assert printable("a\x1b[31mb\x07\x9b\r\n\tcé你\u200d") == "a\\x1b[31mb\\x07\\x9b\n\tcé你\u200d"

"""A judge at an address: what is asked, what is read in its answers, and what happens when the server fails."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import rewards
from rlhf.errors import UserError
from rlhf.rewards import NO_SCORE, Context, Opened, _requests, openai
from rlhf.rewards._requests import Answers, Server
from rlhf.types import Message, Row
from tests.rlhf.rewards import responses
from tests.support import judges
from tests.support.judges import Judge, Reply, content

KEY = "sk-0123456789abcdefghijklmnop"


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """A model whose rating is the number of the question's characters, and that does not let wait."""
    monkeypatch.setattr(_requests, "WAIT_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with judges.serving(judges.words) as judge:
        yield judge


def context(folder: Path | None) -> Context:
    return replace(responses.context(Path()), answers=folder)


def opened(judge: Judge, folder: Path | None = None, options: str = "") -> Opened:
    return rewards.open_unchecked(f"openai,base_url={judge.url},model=m{options}", context(folder))


def ask(judge: Judge, texts: list[str], folder: Path | None = None, **options: Any) -> list[str | None]:
    server = Server(**{"base_url": judge.url, "key": None, "concurrency": 4, "retries": 3, "timeout": 5.0, **options})
    return Answers(server, Counter(), folder).ask([body(text) for text in texts])


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


# --- what is asked


def test_the_request_has_the_question_with_the_texts_as_they_are(judge: Judge, tmp_path: Path) -> None:
    """A response with the question's own marks stays as it is."""
    (tmp_path / "rubric.txt").write_text("From {low} to {high}: {prompt}/{response}/{reference}/{other}")
    turns = (Message("system", "be brief"), Message("user", "why {response}?"))
    r = responses.rollout()
    rows = (replace(r.rows[0], prompt=turns, response="because"), *(replace(row, response="x") for row in r.rows[1:]))
    samples = replace(responses.samples(replace(r, rows=rows)), answers=("so {prompt}", "b", "c"))
    options = f",prompt={tmp_path}/rubric.txt,low=0,high=99,temperature=0.5,max_tokens=null,body={{seed: 3}}"
    scores = opened(judge, options=options)(samples)
    sent = next(each for each in judge.bodies if "be brief" in each["messages"][0]["content"])
    question = "From 0 to 99: system: be brief\nuser: why {response}?/so {prompt}/because/{other}"
    assert sent == {**body(question), "stream": False, "temperature": 0.5, "seed": 3}
    assert scores[0].item() == pytest.approx(1 + len(question) % 91 / 10)


def test_the_short_question_has_both_texts_and_the_bounds(judge: Judge) -> None:
    samples = responses.samples(responses.rollout())
    opened(judge, options=",low=-2,high=2")(samples)
    for row, answer in zip(samples.rollout.rows, samples.answers, strict=True):
        [question] = [each for each in judge.questions if f"response]\n{answer}\n" in each]
        assert row.prompt[-1].content in question and "from -2 (useless) to 2 (" in question


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ("", "Rate {prompt} from 1 to 10", "expected {response} in it for task=score"),
        (",task=compare", "Rate {first}", "expected {first} and {second} in it for task=compare"),
        (",high=5", "Rate {response} from 1-5: 1 is bad", ""),
        (",task=compare", "{first} or {second}?", ""),
    ],
)
def test_a_file_that_cannot_be_the_question_is_refused(
    judge: Judge, options: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "q.txt").write_text(text)
    try:
        opened(judge, options=f",prompt={tmp_path}/q.txt{options}")
        assert not message
    except UserError as error:
        assert message and message in str(error)


# --- what is read


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("It is fine.\nScore: 7", 7.0),
        ("**Score: 7.5**\n", 7.5),
        ("7/10", 7.0),
        ("Rating: [[3]]", 3.0),
        ('{"score": 4}', 4.0),
        ("Final rating: 10 out of 10.", 10.0),
        ("<think>Score: 9</think>\nScore: 2", 2.0),
        ("Score: 2 <think>Score: 9", None),
        ("<think>Score: 9", None),
        ("Score: 7\nI like it.", None),
        ("Score: 7-8", None),
        ("Score: 7/5", None),
        ("Score: 11", None),
        ("Score: -3", None),
        ("Score: seven", None),
        ("I give 7", None),
        ("", None),
    ],
)
def test_a_rating_is_the_last_line_or_there_is_none(judge: Judge, text: str, rating: float | None) -> None:
    judge.model = lambda _: text
    scores = opened(judge)(responses.samples(responses.rollout()))
    assert scores.tolist() == [NO_SCORE if rating is None else rating] * 3


def test_a_negative_rating_keeps_its_sign(judge: Judge) -> None:
    judge.model = lambda _: "Score: -3"
    assert opened(judge, options=",low=-5,high=5")(responses.samples(responses.rollout())).tolist() == [-3.0] * 3


def test_an_answer_that_was_cut_is_not_read(judge: Judge) -> None:
    """The start of a 10 is a 1."""
    judge.faults += [lambda: (200, {}, json.dumps(content("Score: 1", finish="length")))] * 3
    source = opened(judge)
    assert source(responses.samples(responses.rollout())).tolist() == [NO_SCORE] * 3
    assert source.counts is not None
    assert source.counts() == {"requests": 3, "request_tokens": 15, "cached_answers": 0, "unread_answers": 3}
    assert set(source.counts().values()) == {0}


def test_a_judge_that_never_gives_a_rating_ends_the_run(judge: Judge) -> None:
    judge.model = lambda _: "I am sorry."
    r = responses.rollout()[torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])]
    assert opened(judge)(responses.samples(r[torch.arange(7)])).tolist() == [NO_SCORE] * 7
    with pytest.raises(UserError, match=r"none of 8 answers of 'm' can be read, as 'I am sorry\.'; expected a rating"):
        opened(judge)(responses.samples(r))


# --- pairs


def verdicts(judge: Judge, pairs: list[tuple[str, str]]) -> list[list[float]]:
    source = opened(judge, options=",task=compare")
    assert source.compare is not None
    first, second = zip(*pairs, strict=True)
    rows = [Row((Message("user", f"question {i}"),)) for i in range(len(pairs))]
    result: list[list[float]] = source.compare(rows, first, second).tolist()
    return result


def longer(question: str) -> str:
    """Prefers the longer response; to "silent" it gives no verdict, to equal lengths a tie."""
    one, two = (question.split(f"[Response {name}]\n")[1].split("\n\n[")[0] for name in "AB")
    if "silent" in question:
        return "Neither."
    return "Better: " + ("tie" if len(one) == len(two) else "A" if len(one) > len(two) else "B")


def test_both_orders_are_asked(judge: Judge) -> None:
    judge.model = longer
    pairs = [("a", "longer"), ("longer", "a"), ("aa", "bb"), ("same", "same"), ("silent", "b")]
    assert verdicts(judge, pairs) == [[1, 1], [0, 0], [0.5, 0.5], [0.5, 0.5], [NO_SCORE, NO_SCORE]]
    assert len(judge.questions) == 8 and not any("same" in each for each in judge.questions)


def test_the_first_place_wins_once_for_each(judge: Judge) -> None:
    judge.model = lambda question: "[[A]]"
    assert verdicts(judge, [("a", "b"), ("c", "d")]) == [[0, 1], [0, 1]]


def test_a_judge_of_pairs_is_no_reward(judge: Judge) -> None:
    spec = f"openai,base_url={judge.url},model=m,task=compare"
    for refused in (
        lambda: rewards.open_source(spec, context(None)),
        lambda: rewards.open_sources([spec], context(None)),
        lambda: rewards.check_source(spec, context(None)),
    ):
        with pytest.raises(UserError, match="compares two responses, expected a score of one; remove task=compare"):
            refused()
    rewards.check_source(spec, context(None), scores=False)


# --- a server that fails


def fault(status: int, text: str = "", **headers: str) -> Any:
    return lambda: (status, {name.replace("_", "-"): value for name, value in headers.items()}, text)


@pytest.mark.parametrize(
    "reply", [fault(500), fault(503), fault(429), fault(408), fault(200, "<html>"), fault(200, "[]"), fault(200, "{}")]
)
def test_what_may_pass_is_tried_again(judge: Judge, reply: Any) -> None:
    judge.faults += [reply, reply]
    assert ask(judge, ["a"]) == ["Reasons.\nScore: 1.1"]
    assert len(judge.bodies) == 3


def test_it_waits_as_long_as_the_server_says(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("rlhf.rewards._requests.asyncio.sleep", sleep)
    judge.faults += [
        fault(500),
        fault(429, retry_after="40"),
        fault(500, retry_after="soon"),
        fault(429, retry_after="600"),
    ]
    assert ask(judge, ["a"], retries=4)
    assert waits == [0.01, 40.0, 0.04, 600.0]
    judge.faults += [fault(429, retry_after="601")]
    with pytest.raises(UserError, match="HTTP 429"):
        ask(judge, ["a"])


def test_a_server_that_stalls_is_tried_again(judge: Judge) -> None:
    def stall() -> Reply:
        time.sleep(0.6)
        return 500, {}, ""

    judge.faults.append(stall)
    assert ask(judge, ["a"], timeout=0.3) == ["Reasons.\nScore: 1.1"]
    judge.faults += [stall] * 2
    with pytest.raises(UserError, match=r"/v1: ReadTimeout, expected an answer \(2 tries of 0\.3 s\); .* raise time"):
        ask(judge, ["a"], timeout=0.3, retries=1)


@pytest.mark.parametrize(
    ("status", "cure"),
    [
        (401, "set the environment variable that key_env names"),
        (404, "mostly in /v1, .* 'm'"),
        (400, "temperature=null"),
    ],
)
def test_a_refusal_is_told_at_once_without_the_key(judge: Judge, status: int, cure: str) -> None:
    judge.faults.append(fault(status, f"Incorrect key {KEY}.\nSee"))
    with pytest.raises(UserError, match=cure) as caught:
        ask(judge, ["a"], key=KEY)
    assert len(judge.bodies) == 1 and KEY not in str(caught.value) and "\n" not in str(caught.value)
    assert "Incorrect key ***. See" in str(caught.value) and judge.keys == [f"Bearer {KEY}"]


def test_no_more_requests_at_once_than_allowed(judge: Judge) -> None:
    now, most = [0], [0]

    def model(_: str) -> str:
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.02)
        now[0] -= 1
        return ""

    judge.model = model
    ask(judge, [str(i) for i in range(20)], concurrency=3)
    assert most == [3]


# --- answers on the disk


def test_nothing_is_asked_twice_and_what_was_answered_is_kept(judge: Judge, tmp_path: Path) -> None:
    texts = [f"{'x' * i}" for i in range(1, 9)]
    judge.faults += []

    def model(question: str) -> str:
        if question == texts[5] and len(judge.bodies) < 20:
            time.sleep(0.3)  # after the others
            raise ConnectionAbortedError
        return judges.words(question)

    judge.model = model
    with pytest.raises(UserError, match=f"the same command goes on with the answers in {tmp_path}"):
        ask(judge, texts, tmp_path, retries=0)
    assert len(judge.bodies) == 8
    judge.model = judges.words
    answers = ask(judge, [*texts, *texts], tmp_path)
    assert answers == [judges.words(text) for text in texts] * 2
    assert Counter(judge.questions) == dict.fromkeys(texts, 1) | {texts[5]: 2}
    assert rewards.cost(tmp_path) == (8, 8 * 3)


def test_another_request_is_asked(judge: Judge, tmp_path: Path) -> None:
    samples = responses.samples(responses.rollout())
    for options in ("", ",temperature=1", ",max_tokens=9", ",body={seed: 1}", ",low=0", ""):
        opened(judge, tmp_path, options)(samples)
    assert len(judge.questions) == 15


def test_a_line_that_a_kill_has_cut_is_dropped(judge: Judge, tmp_path: Path) -> None:
    ask(judge, ["a", "b"], tmp_path)
    file = tmp_path / "0.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    (tmp_path / "1.jsonl").write_bytes(whole[: whole.index(b"\n") + 5])
    ask(judge, ["a", "b"], tmp_path)
    assert len(judge.bodies) == 3 and len(file.read_bytes().splitlines()) == 2
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_ranks_read_the_files_of_all_and_write_their_own(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(judge, ["a"], tmp_path)
    monkeypatch.setenv("RANK", "1")
    ask(judge, ["a", "b"], tmp_path)
    assert judge.questions == ["a", "b"] and sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl"]


def test_a_key_is_sent_and_never_written(judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    opened(judge, tmp_path, ",key_env=MY_KEY")(responses.samples(responses.rollout()))
    assert set(judge.keys) == {f"Bearer {KEY}"}
    assert KEY.encode() not in (tmp_path / "0.jsonl").read_bytes() and KEY not in repr(Server("u", KEY, 1, 1, 1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("base_url=https://me:secret@host/v1", "got more than an address; expected the key in a variable"),
        ("base_url=https://host/v1?key=secret", "got more than an address"),
        ("base_url=ftp://host/v1", "base_url: expected an address such as"),
        ("base_url=secret", "base_url: expected an address such as"),
        ("base_url=http://host,api_key=secret", "no option 'api_key'"),
        ("base_url=http://host,body={api_key: secret}", "got what looks like a token or a password"),
        ("base_url=http://host,key_env=NOT_SET", "key_env NOT_SET: got no such environment variable; export it"),
        ("base_url=http://host,low=2,high=2", "got low 2 and high 2, expected low < high"),
        ("base_url=http://host,prompt=absent.txt", "prompt absent.txt: expected a text file"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked_and_without_the_key(options: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        rewards.check_source(f"openai,model=m,{options}", context(None))
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_the_check_before_a_run_asks_once(judge: Judge, tmp_path: Path) -> None:
    spec = f"openai,base_url={judge.url},model=m"
    rewards.check_source(spec, context(tmp_path))
    assert not judge.bodies
    rewards.check_rows(spec, responses.rollout().rows)
    assert len(judge.bodies) == 1 and not judge.questions
    (tmp_path / "q.txt").write_text("{response} {reference} 1 10")
    with pytest.raises(UserError, match=r"question has \{reference\}, but .* has no response"):
        rewards.check_rows(f"{spec},prompt={tmp_path}/q.txt", responses.rollout().rows)
    assert len(judge.bodies) == 1


def test_an_address_where_nothing_answers_is_refused_before_a_run() -> None:
    with pytest.raises(
        UserError, match=r"http://127\.0\.0\.1:9/v1: ConnectError .*; see whether the server runs there"
    ):
        rewards.check_rows("openai,base_url=http://127.0.0.1:9/v1,model=m", [])


def test_the_default_questions_have_their_places() -> None:
    assert all(name in openai.SCORE for name in ("{prompt}", "{response}", "{low}", "{high}"))
    assert all(name in openai.COMPARE for name in ("{prompt}", "{first}", "{second}"))

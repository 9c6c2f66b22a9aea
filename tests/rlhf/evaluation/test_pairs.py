"""Pairs of a policy's own responses: which are compared, labelled, dropped, written and refused."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from data.prepare.mixture import open_origin
from data.read.records import Skipped
from rlhf.errors import UserError
from rlhf.evaluation import label_pairs, pairs
from rlhf.evaluation.label_pairs import CUT, EQUAL, TIE, Pair, Side, to_rows
from rlhf.evaluation.options import PairsConfig
from rlhf.launch import launcher
from rlhf.types import Message, Row
from tests.support import even_policies, forked_ranks, power
from tests.support.programs import Run, runner

Options = Callable[..., list[str]]


def even(response: str) -> float:
    return float(sum(int(word[1:]) % 2 == 0 for word in response.split() if word[1:].isdigit()))


# --- rows from pairs


def pair(one: Side, other: Side) -> Pair:
    return Pair(Row((Message("user", "q"),)), (one, other))


def options_of(**changes: Any) -> PairsConfig:
    return PairsConfig(**{"policies": ("p",), "reward": "length", "output": "x.jsonl", **changes})


GOOD, BAD = Side("good", True, 2.0), Side("bad", True, -1.0)


@pytest.mark.parametrize("sides", [(GOOD, BAD), (BAD, GOOD)])
def test_the_higher_score_is_chosen(sides: tuple[Side, Side]) -> None:
    expected = {"prompt": "q", "chosen": "good", "rejected": "bad", "score_chosen": 2.0, "score_rejected": -1.0}
    assert to_rows([pair(*sides)], options_of()) == ([expected], Counter())
    assert to_rows([pair(*sides)], options_of(margin=True)) == ([expected | {"margin": 3.0}], Counter())


@pytest.mark.parametrize(
    ("one", "other", "tie", "reason"),
    [
        (GOOD, Side("bad", False, -1.0), 0.0, CUT),
        (Side("good", False, 2.0), Side("good", False, 2.0), 0.0, CUT),
        (GOOD, Side("good", True, 1.9), 0.0, EQUAL),  # a score rounded otherwise
        (GOOD, Side("fine", True, 2.0), 0.0, TIE),
        (GOOD, Side("fine", True, 1.5), 0.5, TIE),
        (GOOD, Side("fine", True, 1.5), 0.4, ""),
        (Side("a", True, None), Side("b", True, None), 0.0, ""),
        (Side("a", True, None), Side("a", True, None), 0.0, EQUAL),
    ],
)
def test_drop_reasons(one: Side, other: Side, tie: float, reason: str) -> None:
    reward = None if one.score is None else "length"
    for sides in ((one, other), (other, one)):
        rows, dropped = to_rows([pair(*sides)], options_of(tie=tie, reward=reward))
        assert (len(rows), dropped) == ((0, Counter([reason])) if reason else (1, Counter()))


def test_without_scores_the_order_is_random_and_the_preference_empty() -> None:
    pairs_without_scores = [pair(Side(f"first {i}", True, None), Side(f"second {i}", True, None)) for i in range(200)]
    rows, _ = to_rows(pairs_without_scores, options_of(reward=None))
    firsts = 0
    for i, row in enumerate(rows):
        assert list(row) == ["prompt", "response_a", "response_b", "preference"] and row["preference"] == ""
        assert {row["response_a"], row["response_b"]} == {f"first {i}", f"second {i}"}
        firsts += row["response_a"].startswith("first")
    assert 70 < firsts < 130
    assert to_rows(pairs_without_scores, options_of(reward=None))[0] == rows


@pytest.mark.parametrize("reward", ["length", None])
def test_what_the_template_gets_beside_a_prompt_goes_with_the_pair(reward: str | None, tmp_path: Path) -> None:
    variables = {"enable_thinking": False, "tools": [{"name": "look"}]}
    [row], _ = to_rows(
        [Pair(Row((Message("user", "q"),), variables=variables), (GOOD, BAD))], options_of(reward=reward)
    )
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row | ({} if reward else {"preference": "a"})))
    (read_back,) = open_origin(str(tmp_path / "pairs.jsonl")).rows("reward")
    assert isinstance(read_back, Row) and read_back.variables == variables


@pytest.mark.parametrize(
    ("sides", "cure"),
    [
        ([(GOOD, Side("bad", False, 0.0))] * 36 + [(GOOD, GOOD)] * 4, "raise --response-length"),
        ([(GOOD, Side("bad", False, 0.0))] * 4 + [(GOOD, GOOD)] * 36, "raise --temperature"),
        ([(GOOD, BAD)] * 9 + [(GOOD, Side("bad", False, 0.0))] * 31, "raise --response-length"),
        ([(GOOD, BAD)] * 31 + [(GOOD, Side("bad", False, 0.0))] * 9, ""),
    ],
)
def test_the_advice_is_for_the_most_frequent_reason(
    sides: list[tuple[Side, Side]], cure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(label_pairs, "check", lambda _: ([], None))
    monkeypatch.setattr(label_pairs, "sample_pairs", lambda *_: [pair(*both) for both in sides])
    try:
        label_pairs.run(options_of(output=str(tmp_path / "x.jsonl")))
        said = capsys.readouterr().out
    except UserError as error:
        said = str(error)
    assert [cure] == [each for each in label_pairs.CURES.values() if each in said] or (not cure and "raise" not in said)


# --- the program


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The program in this process."""
    transformers.utils.logging.disable_progress_bar()
    return runner("pairs", pairs.main, monkeypatch, capsys)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base; even, which samples words with even numbers more often; prompts, some of several turns; a judge."""
    folder = tmp_path_factory.mktemp("world")
    rows: list[dict[str, Any]] = [{"prompt": f"w{i} w{i + 3}", "kind": i} for i in range(4, 60)]
    turns = (("system", "w5"), ("user", "w6"), ("assistant", "w7"), ("user", "w8"))
    rows.append({"prompt": [{"role": role, "content": content} for role, content in turns]})
    even_policies.write(folder, {"base": 1.0, "even": 1.2}, rows)
    return folder


@pytest.fixture
def options(world: Path, tmp_path: Path) -> Options:
    def arguments(*policies: str, output: str = "pairs.jsonl") -> list[str]:
        policy_options = ["--policies", *(str(world / name) for name in policies)]
        files = ["--prompts", f"{world}/p.jsonl", "--output", str(tmp_path / output)]
        return [*policy_options, *files, "--response-length", "30", "--dtype", "fp32", "--rollout-batch-size", "24"]

    return arguments


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def count(printed: str) -> tuple[int, int]:
    """(pairs written, pairs dropped) in the last printed line."""
    line = printed.strip().splitlines()[-1]
    written, dropped = line.partition("; dropped ")[::2]
    return int(re.findall(r"wrote (\d+) pairs", written)[0]), sum(map(int, re.findall(r"\d+(?= [ect])", dropped)))


def test_labels_are_those_of_the_judge(run: Run, options: Options, world: Path, tmp_path: Path) -> None:
    words = [*options("base"), "--reward", f"{world}/judge.py:score", "--margin"]
    code, printed, error = run(*words)
    assert (code, error) == (0, "")
    rows = read(tmp_path / "pairs.jsonl")
    assert sum(count(printed)) == 57 and count(printed)[0] == len(rows) > 20
    for row in rows:
        assert row["score_chosen"] == even(row["chosen"]) > even(row["rejected"]) == row["score_rejected"]
        assert row["margin"] == row["score_chosen"] - row["score_rejected"]
    read_back = list(open_origin(str(tmp_path / "pairs.jsonl")).rows("reward"))
    assert len(read_back) == len(rows) and all(isinstance(row, Row) and row.rejected is not None for row in read_back)
    code, _, error = run(*words)
    assert code == 2 and "--overwrite" in error
    assert run(*words, "--overwrite")[0] == 0 and read(tmp_path / "pairs.jsonl") == rows
    assert run(*words, "--overwrite", "--seed", "1")[0] == 0 and read(tmp_path / "pairs.jsonl") != rows


def test_a_power_cut_leaves_all_pairs_or_no_file(
    run: Run, options: Options, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = power.Disk(tmp_path, promised=False)
    with disk.watched(monkeypatch):
        assert run(*options("base"), "--reward", f"{world}/judge.py:score")[0] == 0
        disk.promised = True
    whole = hashlib.sha256((tmp_path / "pairs.jsonl").read_bytes()).hexdigest()
    assert {tree.get("pairs.jsonl", whole) for _, tree in disk.states} == {whole}
    assert all("pairs.jsonl" in tree for promised, tree in disk.states if promised)


def test_two_processes_write_the_same_pairs(
    run: Run, options: Options, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 24 of 114 responses are divided among two processes."""
    judge = ["--reward", f"{world}/judge.py:score"]
    assert run(*options("base"), *judge)[0] == 0
    monkeypatch.setattr(launcher, "run", forked_ranks.launch)
    two = ["--deployment-type", "single_node", "--num-processes", "2"]
    assert run(*options("base", output="two.jsonl"), *judge, *two)[0] == 0
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "pairs.jsonl").read_bytes()


def test_a_person_fills_the_rows_in(run: Run, options: Options, tmp_path: Path) -> None:
    code, printed, error = run(*options("base"))
    assert (code, error) == (0, "") and "to fill in" in printed
    file = tmp_path / "pairs.jsonl"
    rows = read(file)
    assert list(open_origin(str(file)).rows("reward")) == [Skipped("no preference filled in")] * len(rows)
    for row, vote in zip(rows, ["a", "b", "tie"], strict=False):
        row["preference"] = vote
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third, *rest = open_origin(str(file)).rows("reward")
    assert isinstance(first, Row) and (first.response, first.rejected) == (rows[0]["response_a"], rows[0]["response_b"])
    assert isinstance(second, Row) and second.response == rows[1]["response_b"]
    assert third == Skipped("tie") and set(rest) == {Skipped("no preference filled in")}


def test_two_policies_are_compared_with_each_other(run: Run, options: Options, world: Path, tmp_path: Path) -> None:
    """Each samples with its own random numbers: a policy against itself gives two different responses."""
    judge = ["--reward", f"{world}/judge.py"]
    code, _, error = run(*options("base", "base"), *judge)
    assert (code, error) == (0, "")
    assert len(read(tmp_path / "pairs.jsonl")) > 20
    code, printed, error = run(*options("base", "even", output="both.jsonl"))
    assert (code, error) == (0, "") and sum(count(printed)) == 57
    texts = [(row["response_a"], row["response_b"]) for row in read(tmp_path / "both.jsonl")]
    # The better response is on either side.
    gaps = [even(one) - even(other) for one, other in texts]
    assert max(gaps) > 0 > min(gaps)


def test_prompts_are_written_unchanged(run: Run, options: Options, world: Path, tmp_path: Path) -> None:
    assert run(*options("base"), "--rollout-batch-size", "64")[0] == 0
    prompts = [row["prompt"] for row in read(world / "p.jsonl")]
    written = [row["prompt"] for row in read(tmp_path / "pairs.jsonl")]
    assert [prompt for prompt in prompts if prompt in written] == written
    assert any(isinstance(prompt, list) for prompt in prompts)


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "no prompt": (["--prompts", "none.txt"], ["--prompts none.txt", "got no prompt"]),
    "all cut": (["--response-length", "1"], ["no pair is left", CUT, "raise --response-length,"]),
    "all ties": (["--tie", "1000"], ["no pair is left", "tie"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(name: str, run: Run, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    (world / "none.txt").write_text("\n")
    argv, words = MISTAKES[name]
    base = ["--policies", "base", "--prompts", "p.jsonl", "--reward", "judge.py", "--output", "x.jsonl"]
    code, printed, error = run(*base, "--response-length", "10", *argv)
    assert (code, printed) == (2, ""), error
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert not (world / "x.jsonl").exists()

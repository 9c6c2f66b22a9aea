"""Runs of step 3 with a model at an address as score source and judge: killed, resumed, and what they ask."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf import rewards
from rlhf.chain import report, verify
from rlhf.errors import UserError
from tests.support import judges
from tests.support.judges import Judge
from tests.support.killing import PPO, dying, left, ppo_options, require_same, run, sft_options

STAGE = Path("out/step3_ppo")
GROUPS: dict[str, Any] = {"num_generations": 2, "max_train_rows": 16}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judges.serving(judges.words) as judge:
        yield judge


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    with contextlib.chdir(folder):
        run(sft_options(num_train_epochs=4))
    return str(folder / "out/step1_sft")


def options(server: Judge, policy: str, more: str = "", **changes: Any) -> Any:
    spec = f"openai,base_url={server.url},model=m{more}"
    return ppo_options("grpo", **{"actor_model": policy, "reward": (spec,), **GROUPS, **changes})


def rows(kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (STAGE / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def test_a_killed_run_asks_nothing_twice_and_ends_the_same(
    judge: Judge, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in an iteration after its checkpoint: the repeated one is answered from the disk. A run that resumes also
    evaluates the policy that it resumes from."""
    runs, asked_in = {}, {}
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
        before = len(judge.questions)
        with contextlib.chdir(tmp_path / folder):
            if folder == "killed":
                dying(monkeypatch, lambda: run(options(judge, policy, save_every=2)), "train", 3)
            run(options(judge, policy, save_every=2))
            runs[folder] = left(STAGE)
            repeated = rows("train")[2]
        asked_in[folder] = Counter(judge.questions[before:])
    one, other = (set(files.pop("answers/0.jsonl")) for files in runs.values())
    require_same(*runs.values())
    evaluations, responses = PPO["eval_samples"], PPO["total_episodes"]
    assert one < other and len(one) == 2 * evaluations + responses and len(other) == len(one) + evaluations
    assert {*asked_in["whole"].values()} == {*asked_in["killed"].values()} == {1}
    assert (repeated["requests"], repeated["cached_answers"]) == (evaluations, evaluations + 8)


def prefers(place: str, share: int) -> Any:
    """A judge of pairs: the response with more letters, but for one question of `share` the one in that place."""

    def verdict(question: str) -> str:
        if "[Response A]" not in question:
            return judges.words(question)
        one, two = (question.split(f"[Response {name}]\n")[1].split("\n\n[")[0] for name in "AB")
        if len(one + two) % share == 0:
            return f"Better: {place}"
        return "I cannot say." if len(one + two) % share == 1 else f"Better: {'A' if len(one) > len(two) else 'B'}"

    return verdict


def test_a_judge_compares_with_the_response_before_training(
    judge: Judge, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its numbers, from the samples and by asking the model once more; the report has them, and verify asks nothing."""
    monkeypatch.setattr(judge, "model", prefers("A", 3))
    pairs = f"openai,base_url={judge.url},model=m,task=compare"
    changes = {"reward": ("length,target=3",), "eval_samples": 12, "max_eval_rows": 12, "judge": pairs}
    with contextlib.chdir(tmp_path):
        run(options(judge, policy, **changes))
        first, *_, last = rows("eval")
        samples = [json.loads(line) for line in (STAGE / "samples.jsonl").read_text().splitlines()]
        assert first["eval_judge"] == 0.5 == last["eval_judge_before"]
        shares, first_places, flips = [], [], []
        for sample in samples:
            before, after = sample["before"], sample["after"]
            texts = (f"[Response A]\n{a}\n\n[Response B]\n{b}\n\n[" for a, b in ((before, after), (after, before)))
            orders = [judge.model(text) for text in texts]
            places = [text[-1] for text in orders]
            if before == after:
                shares.append(0.5)
            elif places[0] == ".":
                shares.append(None)
            else:
                shares.append(0.5 if places[0] == places[1] else float(places[0] == "B"))
                first_places += [place == "A" for place in places]
                flips.append(places[0] == places[1])
        assert [sample["judge"] for sample in samples] == shares and None in shares and len(flips) > 3
        scored = [share for share in shares if share is not None]
        assert last["eval_judge"] == pytest.approx(sum(scored) / len(scored), abs=1e-5)
        assert last["eval_judge_unread"] == pytest.approx(1 - len(scored) / 12, abs=1e-5)
        assert last["eval_judge_first_place"] == pytest.approx(sum(first_places) / len(first_places), abs=1e-5)
        assert last["eval_judge_flipped"] == pytest.approx(sum(flips) / len(flips), abs=1e-5)
        asked = len(judge.bodies)
        assert verify.main(["out"]) == 0 and "verified" in capsys.readouterr().out
        report.write(report.ReportConfig(runs=("out",)))
        assert len(judge.bodies) == asked
        page = " ".join((tmp_path / "out/report.html").read_text().split())
    requests, tokens = rewards.cost(tmp_path / STAGE / "answers")
    assert requests == 2 * sum(sample["before"] != sample["after"] for sample in samples)
    assert f"{requests:,} requests, {tokens:,} tokens, 0 more answers from the disk" in page
    assert "verdicts of the judge that change with the order" in page


def test_a_judge_that_is_no_reward_is_refused_as_one(judge: Judge, policy: str, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path), pytest.raises(UserError, match="compares two responses"):
        run(options(judge, policy, ",task=compare"))


def test_a_question_that_has_changed_is_another_run(
    judge: Judge, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.chdir(tmp_path):
        Path("q.txt").write_text("{response} from 1 to 10")
        dying(monkeypatch, lambda: run(options(judge, policy, ",prompt=q.txt")), "train", 2)
        Path("q.txt").write_text("{response}, from 1 to 10")
        with pytest.raises(UserError, match=r"another content of q\.txt"):
            run(options(judge, policy, ",prompt=q.txt"))

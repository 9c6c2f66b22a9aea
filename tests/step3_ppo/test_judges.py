"""Runs of step 3 with a model at an address as score source and judge: killed, resumed, and what they ask."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


def options(judge: Judge, policy: str, more: str = "", **changes: Any) -> Any:
    spec = f"openai,base_url={judge.url},model=m{more}"
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

"""`rlhf pairs` and `rlhf evaluate` with a model at an address."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from rlhf.evaluation import evaluate, pairs
from rlhf.evaluation.label_pairs import CUT, EQUAL, NONE
from rlhf.launch import launcher
from rlhf.rewards import cost
from tests.support import even_policies, forked_ranks, judges
from tests.support.judges import Judge
from tests.support.programs import Run, runner

LENGTHS = ["--response-length", "30", "--dtype", "fp32", "--rollout-batch-size", "7"]


def model(question: str) -> str:
    """Rates the number of words w4 to w30, or prefers the response with more of them, in doubt the first place. To a
    prompt with w9 it says nothing."""
    prompt, *texts = re.findall(r"\[(?:The prompt|The response|Response [AB])\]\n(.*?)\n\n(?=\[)", question, re.DOTALL)
    counts = [sum(word[1:].isdecimal() and 4 <= int(word[1:]) <= 30 for word in text.split()) for text in texts]
    if "w9" in prompt.split():
        return "No."
    return f"Score: {min(counts[0], 10)}" if len(texts) == 1 else f"[[{'BA'[counts[0] >= counts[1]]}]]"


def answer(question: str) -> str:
    return model(question) if "[The prompt]" in question else "ready"


@pytest.fixture
def judge() -> Iterator[Judge]:
    with judges.serving(answer) as judge:
        yield judge


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    even_policies.write(folder, {"base": 1.0, "even": 1.2}, [{"prompt": f"w{i} w{i + 3}"} for i in range(4, 30)])
    return folder


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    transformers.utils.logging.disable_progress_bar()
    main = {"pairs": pairs.main, "evaluate": evaluate.main}
    name = "evaluate" if "evaluat" in request.node.name else "pairs"
    return runner(name, main[name], monkeypatch, capsys)


def labelled(run: Run, world: Path, judge: Judge, output: Path, *more: str, options: str = "task=compare") -> Any:
    spec = f"openai,base_url={judge.url},model=m,low=0,{options}"
    files = ["--prompts", f"{world}/p.jsonl", "--output", str(output), "--overwrite", "--reward", spec]
    code, printed, error = run("--policies", str(world / "base"), *files, *LENGTHS, *more)
    assert (code, error) == (0, "")
    return [json.loads(line) for line in output.read_text().splitlines()], printed


def test_pairs_are_labelled_by_comparison_in_both_orders(
    run: Run, world: Path, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, printed = labelled(run, world, judge, tmp_path / "a.jsonl")
    for row in rows:
        texts = (
            f"[The prompt]\n{row['prompt']}\n\n[Response A]\n{row['chosen']}\n\n[Response B]\n{row['rejected']}\n\n["
        )
        assert "w9" not in row["prompt"].split() and model(texts) == "[[A]]"
        assert (row["score_chosen"], row["score_rejected"]) == (1.0, 0.0)
    ties = int(re.findall(r"(\d+) tie", printed)[0])
    first, flipped = (float(x) for x in re.findall(r"judge: first_place ([\d.]+), flipped ([\d.]+)", printed)[0])
    assert flipped == pytest.approx(ties / (ties + len(rows)), abs=1e-3) and ties
    assert first == pytest.approx((len(rows) + 2 * ties) / (2 * len(rows) + 2 * ties), abs=1e-3)
    unread, unasked = (
        sum(map(int, re.findall(rf"(\d+) (?:{reason})", printed))) for reason in (NONE, f"{CUT}|{EQUAL}")
    )
    assert unread and unasked and unread + unasked + ties + len(rows) == 26
    requests = 2 * (unread + ties + len(rows))
    assert len(judge.questions) == requests == cost(tmp_path / "a.answers")[0]
    assert labelled(run, world, judge, tmp_path / "a.jsonl")[0] == rows and len(judge.questions) == requests
    monkeypatch.setattr(launcher, "run", forked_ranks.launch)
    two = ["--deployment-type", "single_node", "--num-processes", "2"]
    assert labelled(run, world, judge, tmp_path / "b.jsonl", *two)[0] == rows and len(judge.questions) == 2 * requests
    assert len(list((tmp_path / "b.answers").iterdir())) == 2


def test_pairs_are_labelled_by_ratings(run: Run, world: Path, judge: Judge, tmp_path: Path) -> None:
    rows, printed = labelled(run, world, judge, tmp_path / "a.jsonl", options="task=score")
    for row in rows:
        for side in ("chosen", "rejected"):
            text = f"[The prompt]\n{row['prompt']}\n\n[The response]\n{row[side]}\n\n["
            assert model(text) == f"Score: {row[f'score_{side}']:g}"
        assert row["score_chosen"] > row["score_rejected"]
    assert rows and f" {NONE}" in printed and "unread_answers 4" in printed  # to the prompts w6 w9 and w9 w12


def test_prompts_without_a_rating_are_not_evaluated(run: Run, world: Path, judge: Judge, tmp_path: Path) -> None:
    spec = f"openai,base_url={judge.url},model=m,low=0"
    words = ["--policies", str(world / "base"), str(world / "even"), "--prompts", f"{world}/p.jsonl", "--reward"]
    code, printed, error = run(*words, spec, "--output", str(tmp_path), *LENGTHS)
    assert (code, error) == (0, "") and "2 of 26 prompts have a response without a score, and are left out" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert results["prompts"] == 24 and len(samples) == 48
    for name, result in zip(words[1:3], results["policies"], strict=True):
        numbers = [sample["responses"][name] for sample in samples]
        assert result["score"]["mean"] == pytest.approx(sum(x["score"] for x in numbers) / 48)
        assert result["response_length"] == pytest.approx(sum(x["length"] for x in numbers) / 48)
        for sample, x in zip(samples, numbers, strict=True):
            text = f"[The prompt]\n{sample['prompt']}\n\n[The response]\n{x['response']}\n\n["
            assert model(text) == f"Score: {x['score']:g}"
    code, _, error = run(*words, f"{spec},task=compare", *LENGTHS)
    assert code == 2 and "compares two responses, expected a score of one" in error

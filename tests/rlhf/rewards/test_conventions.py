"""Functions that were written for another library get what it passes, and their results mean what they mean there."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf import plugins, rewards
from rlhf.errors import UserError
from rlhf.rewards import NO_SCORE
from rlhf.types import Message, Samples
from tests.rlhf.rewards.responses import context, rollout, samples

ZEROS = "return [0.0] * 3"


def with_columns(*columns: dict[str, Any]) -> Samples:
    """Three responses, whose rows have these columns; the second prompt has two messages."""
    r = rollout()
    rows = [replace(row, columns=values) for row, values in zip(r.rows, columns, strict=True)]
    rows[1] = replace(rows[1], prompt=(Message("system", "w4"), *rows[1].prompt))
    return samples(replace(r, rows=tuple(rows)))


def written(folder: Path, signature: str, body: str) -> str:
    """A file whose function keeps in SEEN what it gets."""
    file = folder / "theirs.py"
    parts = signature.partition("(")
    file.write_text(
        f"import asyncio, time\nSEEN = []\n{parts[0]} score({parts[2]}:\n    SEEN.append(locals())\n    {body}\n"
    )
    return f"{file}:score"


def scored(spec: str, s: Samples) -> list[float]:
    result: list[float] = rewards.open_unchecked(spec, context(Path()))(s).tolist()
    return result


def seen(spec: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = plugins.load_file(plugins.function_of(spec)[0]).SEEN
    return calls


def test_trl_passes_texts_and_columns_by_name(tmp_path: Path) -> None:
    s = with_columns({"gold": 1}, {"gold": 2}, {})
    spec = written(tmp_path, "def(gold, completions, prompts, completion_ids, **kwargs)", ZEROS)
    assert scored(spec, s) == [0, 0, 0]
    ids, texts = s.rollout.response_tokens(), {"completions": list(s.responses), "prompts": list(s.prompts)}
    assert seen(spec) == [{"gold": [1, 2, None], "completion_ids": ids, "kwargs": {}, **texts}]


@pytest.mark.parametrize(
    ("body", "options", "as_messages"),
    [
        ("[c[0]['content'] for c in completions]", "", True),
        ("[c[-1]['content'] for c in completions]", "", True),
        ("[c[:1] for c in completions]; {'content': 1}['content']", "", False),
        ("[reply()['message']['content'] for _ in ()]", "", False),
        ("[c[0]['role'] for c in completions]", ",messages=true", True),
        ("[c[0]['content'] for c in [] if c]", ",messages=false", False),
    ],
)
def test_trl_passes_messages_to_a_function_that_reads_them(
    body: str, options: str, as_messages: bool, tmp_path: Path
) -> None:
    s = with_columns({}, {}, {})
    spec = written(tmp_path, "def(prompts, completions, **kwargs)", f"{body}; {ZEROS}") + options
    scored(spec, s)
    [call] = seen(spec)
    if as_messages:
        assert call["completions"] == [[{"role": "assistant", "content": text}] for text in s.responses]
        assert call["prompts"][1] == [{"role": m.role, "content": m.content} for m in s.rollout.rows[1].prompt]
        assert [len(turns) for turns in call["prompts"]] == [1, 2, 1]
    else:
        assert (call["prompts"], call["completions"]) == (list(s.prompts), list(s.responses))


def test_verl_passes_one_response_and_its_truth(tmp_path: Path) -> None:
    columns = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"i": 3}}
    s = with_columns(columns, {"reward_model": {"ground_truth": 8}}, columns)
    spec = written(
        tmp_path, "def(data_source, solution_str, ground_truth, extra_info=None)", "return {'score': len(SEEN), 'n': 5}"
    )
    assert scored(spec, s) == [1, 2, 3]
    first = {"data_source": "sums", "solution_str": s.responses[0], "ground_truth": "7", "extra_info": {"i": 3}}
    second = {"data_source": None, "solution_str": s.responses[1], "ground_truth": 8, "extra_info": None}
    assert seen(spec)[:2] == [first, second]


def test_verl_in_batches_and_without_its_columns(tmp_path: Path) -> None:
    """Rows of another source have the right result in `answer`; what verl's files have beside it is empty."""
    s = with_columns({"answer": "1"}, {"answer": "2"}, {"answer": "3"})
    spec = written(
        tmp_path, "def(data_sources, solution_strs, ground_truths, extra_infos)", "return [{'score': 2}, 1, 0]"
    )
    assert scored(spec, s) == [2, 1, 0]
    [call] = seen(spec)
    assert call["ground_truths"] == ["1", "2", "3"] and call["solution_strs"] == list(s.responses)
    assert (call["data_sources"], call["extra_infos"]) == ([""] * 3, [{}] * 3)


def test_openrlhf_passes_queries_prompts_and_labels(tmp_path: Path) -> None:
    s = with_columns({"label": "a"}, {"label": "b"}, {"label": "c"})
    spec = written(
        tmp_path,
        "def(queries, prompts, labels, **kwargs)",
        "import torch; return {'rewards': torch.ones(3), 'logs': 1}",
    )
    assert scored(spec, s) == [1, 1, 1]
    [call] = seen(spec)
    assert call["labels"] == ["a", "b", "c"] and call["prompts"] == list(s.prompts)
    assert call["queries"] == [p + r for p, r in zip(s.prompts, s.responses, strict=True)]


def test_a_right_result_that_no_row_has_is_asked_for_before_anything_is_sampled(tmp_path: Path) -> None:
    rows = with_columns({"gold": 1}, {"gold": 2}, {"gold": 3}).rollout.rows
    for signature, error in (
        ("def(solution_str, ground_truth)", "it takes 'ground_truth', which can be ground_truth, reward_model, answer"),
        ("def(queries, prompts, labels)", "it takes 'labels', which can be labels, label, ground_truth"),
        ("def(completions, answer)", "it takes 'answer', but the rows have gold;"),
    ):
        with pytest.raises(UserError, match=error):
            rewards.check_rows(written(tmp_path, signature, ZEROS), rows)
    rewards.check_rows(written(tmp_path, "def(completions, gold)", ZEROS), rows)


def test_asynchronous_calls_of_one_response_wait_together(tmp_path: Path) -> None:
    s = with_columns({"answer": "1"}, {"answer": "2"}, {"answer": "3"})
    spec = written(
        tmp_path, "async def(solution_str, ground_truth)", "await asyncio.sleep(0.3); return float(ground_truth)"
    )
    start = time.monotonic()
    assert scored(spec, s) == [1, 2, 3] == scored(spec, s)
    assert time.monotonic() - start < 6 * 0.3
    spec = written(tmp_path, "async def(completions, answer)", "await asyncio.sleep(0); return map(float, answer)")
    assert scored(spec, s) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_response_beyond_the_time_limit_has_no_score(kind: str, tmp_path: Path) -> None:
    s = with_columns({"answer": 0.0}, {"answer": 60.0}, {"answer": 0.0})
    sleep = "time.sleep(ground_truth)" if kind == "def" else "await asyncio.sleep(ground_truth)"
    spec = written(tmp_path, f"{kind}(solution_str, ground_truth)", f"{sleep}; return 1.0")
    assert scored(f"{spec},timeout=0.2", s) == [1, NO_SCORE, 1]


def test_all_responses_beyond_the_time_limit_name_the_line_and_the_slow_one(tmp_path: Path) -> None:
    s = with_columns({"answer": 0.0}, {"answer": 60.0}, {"answer": 0.0})
    spec = written(tmp_path, "def(completions, answer)", f"[time.sleep(x) for x in answer]; {ZEROS}")
    with pytest.raises(UserError, match=r"theirs\.py:5: .* took more than 0\.2 s, for prompt .*, response ") as caught:
        scored(f"{spec},timeout=0.2", s)
    assert repr(s.responses[1][:80]) in str(caught.value)


def test_where_a_function_has_no_score_the_others_decide(tmp_path: Path) -> None:
    """By hand: (1, None, None) and 0.5 * (4, 3, None), as sum and as minimum."""
    (tmp_path / "two.py").write_text(
        "def one(p, r): return [1, None, None]\ndef other(completions): return [4, 3, None]\n"
    )
    specs = [f"{tmp_path}/two.py:one", f"0.5*{tmp_path}/two.py:other"]
    s = samples(rollout())
    for combine, expected in (("sum", [3.0, 1.5, NO_SCORE]), ("min", [1.0, 1.5, NO_SCORE])):
        scores, each = rewards.open_sources(specs, context(tmp_path), combine)(s)  # type: ignore[arg-type]
        assert scores.tolist() == expected
        assert each["two.py:one"].tolist() == [1, NO_SCORE, NO_SCORE]

"""What the training costs: answers to multiple choice, against transformers in float64, and their paired interval."""

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.maths.intervals import student_t
from rlhf.models.policy import Policy
from rlhf.supervised.demonstrations import held_out
from step1_sft.config import SFTConfig
from step3_ppo.config import Step3Config
from step3_ppo.cost import Cost, open_questions
from tests.support import players, tiny


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def records() -> list[dict[str, Any]]:
    """100 questions with two to five choices of one to six words."""
    draw = random.Random(4)

    def words(most: int) -> str:
        return " ".join(draw.choices(tiny.WORDS, k=draw.randint(1, most)))

    rows = []
    for _ in range(100):
        texts = [words(6) for _ in range(draw.randint(2, 5))]
        labels = [str(i) for i in range(len(texts))]
        row = {"question": words(9), "choices": {"text": texts, "label": labels}, "answerKey": draw.choice(labels)}
        rows.append(row)
    return rows


def answers(model: Any) -> list[float]:
    """Whether the choice with the largest sum of log-probs is right: one row at a time, by plain transformers."""
    tokenizer, right = tiny.tokenizer(), []
    for record in records():
        text, sums = f"Question: {record['question']}\nAnswer:", []
        for choice in record["choices"]["text"]:
            ids = tokenizer(f"{text} {choice}").input_ids
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(float(logprobs[i - 1, ids[i]]) for i in range(len(tokenizer(text).input_ids), len(ids))))
        right.append(float(record["choices"]["label"][sums.index(max(sums))] == record["answerKey"]))
    return right


def test_answers_are_those_of_plain_transformers(tmp_path: Path) -> None:
    """Of a policy, and of the same one after its weights have changed."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records()))
    model = players.language_model()
    engine = Engine(Policy(model), SFTConfig(dtype="fp32"), 2)
    config = Step3Config(multiple_choice=str(path), actor_model="x", eval_batch_size=7)
    learner: Any = SimpleNamespace(config=config, actor=engine, scorer=SimpleNamespace(tokenizer=tiny.tokenizer()))
    cost = Cost(learner)
    first = answers(copy.deepcopy(model).double())
    assert cost.measure() == {"eval_choices": sum(first) / 100} and 0 < sum(first) < 100
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        for weight in engine.module.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
    second, metrics = answers(copy.deepcopy(model).double()), cost.measure()
    assert metrics["eval_choices"] == sum(second) / 100 and first != second
    changes = [after - before for before, after in zip(first, second, strict=True)] + [1.0, -1.0]
    mean = sum(changes) / 102
    half = student_t(101) * math.sqrt(sum((x - mean) ** 2 for x in changes) / 101 / 102)
    assert metrics["eval_choices_gain_ci95"] == pytest.approx(half, rel=1e-9)


def test_a_policy_that_has_not_moved_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records()))
    engine = Engine(Policy(players.language_model()), SFTConfig(dtype="fp32"), 2)
    config = Step3Config(multiple_choice=str(path), actor_model="x")
    cost = Cost(SimpleNamespace(config=config, actor=engine, scorer=SimpleNamespace(tokenizer=tiny.tokenizer())))  # type: ignore[arg-type]
    before, after = cost.measure(), cost.measure()
    assert after["eval_choices"] == before["eval_choices"]
    half = student_t(101) * math.sqrt(2 / 101 / 102)
    assert after["eval_choices_gain_ci95"] == pytest.approx(half, rel=1e-9)


def test_a_question_must_fit_the_context(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "w1 " * 5000, "A": "w1", "B": "w2", "answer": "A"}))
    with pytest.raises(UserError, match=r"--keep .*got a question of .* tokens, expected at most .*; leave it out"):
        open_questions("--keep", str(path), "demo-llama", tiny.tokenizer())
    assert open_questions("--keep", None, "demo-llama", tiny.tokenizer()) == []


def test_demonstrations_that_are_gone_cost_a_note_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SFTConfig(model="demo-llama", data_path=(str(tmp_path / "gone.jsonl"),)).model_dump(mode="json")
    (tmp_path / "manifest.json").write_text(json.dumps({"config": config}))
    assert held_out(tmp_path, tiny.tokenizer()) is None
    note = capsys.readouterr()
    assert all(words in note.out + note.err for words in ("gone.jsonl: no such file", "is not measured"))

"""Small inputs that a chat model's users have, from a folder beside the repository: rows, templates, what is expected.

They are invented rows and tiny random models; the folder's README.md says what must come out.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from data.preview import command as preview
from rlhf import errors
from tests.support import forked

CASES = Path(os.environ.get("RLHF_CASES", Path(__file__).parents[3] / "shared/cases"))

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no folder of cases (RLHF_CASES)")

PREVIEWS = {
    "think plain": "<think>\n⟦\n</think>\n\nIt is white and quiet.<|im_end|>⟧",
    "think think_inline": "<think>\n⟦Let me see number 28.\n</think>\n\nIt is white.<|im_end|>⟧",
    "harmony plain": "<|start|>assistant⟦<|channel|>final<|message|>It is white and quiet.<|return|>⟧",
    "hybrid plain": "assistant\n⟦<think>\n\n</think>\n\nIt is white and quiet.<|im_end|>⟧",
    "hybrid reasoning_field": "assistant\n⟦<think>\nLet me see number 28.\n</think>\n\nIt is white.<|im_end|>⟧",
    "chatml trailing_user": "assistant\n⟦It is ",
    "dated plain": "Today Date: 01 Jan 2026 00:00:00<|im_end|>",
}
"""by model and file, a part of what the preview prints"""
REFUSED = {
    "tools_text": "does not read the key 'tool_calls'",
    "weights_last": "weight 0",
    "same_first_turn": "begin with the user message 'You are a guide. Wait for my question.'",
}
"""by file, the reason that chatml's preview gives"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases") / "cases"
    shutil.copytree(CASES, folder)
    done = forked.python("make_models.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def printed(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["preview", *words])
    code = errors.run_as_user(preview.main)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("case", PREVIEWS)
def test_a_preview(case: str, cases: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = case.split()
    words = ["--model", str(cases / "models" / model), "--data-path", str(cases / f"{file}.jsonl"), "--phases", "sft"]
    code, text = printed([*words, "--data-split", "1,0,0", "--rows", "60"], monkeypatch, capsys)
    assert code == 0 and PREVIEWS[case] in text, text


def test_what_is_refused(cases: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for file, reason in REFUSED.items():
        words = ["--model", str(cases / "models/chatml"), "--data-path", str(cases / f"{file}.jsonl")]
        code, text = printed([*words, "--phases", "sft", "--data-split", "1,0,0"], monkeypatch, capsys)
        assert code == 2 and reason in text, text


def run(cases: Path, *words: str) -> str:
    done = forked.python("-m", "rlhf", *words, cwd=cases)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_reward_model_from_elsewhere(cases: Path) -> None:
    text = run(cases, "evaluate-reward", "models/rm", "--data-path", "pairs.jsonl", "--dtype", "fp32")
    assert "0.767" in text and "0.6577" in text


def test_ends_of_a_list(cases: Path) -> None:
    length = ("--response-length", "16", "--output", "evaluated")
    shutil.copytree(cases / "models/glm-ends", cases / "models/same")
    policies = ("--policies", "models/glm-ends", "models/same")
    run(cases, "evaluate", *policies, "--prompts", "prompts.jsonl", "--reward", "repetition", *length)
    results = json.loads((cases / "evaluated/results.json").read_text())
    assert {(policy["response_length"], policy["ended"]) for policy in results["policies"]} == {(1.0, 1.0)}

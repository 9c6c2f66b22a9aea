"""docs/tutorial.md: its commands, run in their order as printed, end with a better policy; `make` alone is not run."""

import json
import math
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from data.preview import command as preview
from rlhf.chain import chat
from rlhf.chain import command as chain
from rlhf.evaluation import evaluate
from rlhf.launch import launcher
from tests.support import one_process, programs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
MAINS: dict[str, Callable[[], object]] = {
    "train.py": chain.main,
    "data.preview": preview.main,
    "rlhf evaluate": evaluate.main,
    "rlhf chat": chat.main,
}
TYPED = ("tell me about the red fox in the forest", "t")
"""a question to both policies, and a tie"""


def test_the_page_from_its_first_command_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "run", one_process.run_stage)
    for code, name in re.findall(r"```(?:python|yaml)\n(# ([\w.]+).*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    typed, done = iter(TYPED), []
    monkeypatch.setattr("builtins.input", lambda _: next(typed, None) or end())
    for line in "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).splitlines():
        program, *argv = shlex.split(line)
        if program in ("make", "source"):
            continue
        assert program == "python", line
        module = " ".join(argv[1:3] if argv[1] == "rlhf" else argv[1:2]) if argv[0] == "-m" else argv[0]
        argv = argv[len(module.split()) + (argv[0] == "-m") :]
        done.append(module)
        if module in MAINS:
            code, _, reported = programs.runner(module, MAINS[module], monkeypatch, capsys)(*argv)
            assert code == 0, reported
        else:
            runpy.run_path(module)
            torch.manual_seed(0)
            printed = capsys.readouterr().out
    trained = ["make_pairs.py", "data.preview", "train.py", "train.py"]
    assert done == [*trained, "rlhf evaluate", "use_policy.py", "rlhf chat"]
    assert "is" in printed.split()  # the response of use_policy.py: every sentence of this world has it
    assert (tmp_path / "runs/tutorial/report.html").stat().st_size > 10_000
    [vote] = [json.loads(row) for row in (tmp_path / "votes.jsonl").read_text().splitlines()]
    assert (vote["prompt"], vote["preference"]) == (TYPED[0], "tie")
    require_better(tmp_path / "runs/tutorial")
    for folder in ("step1_sft/model", "step2_reward/model", "step3_ppo/actor"):
        require_card(tmp_path / "runs/tutorial" / folder, monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and math.isfinite(float(printed[1]))
    shown = json.loads(re.search(r'\{"prompt".*\}', PAGE)[0])  # type: ignore[index]  # there is one
    rows = [json.loads(row) for row in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert all(row.keys() == shown.keys() for row in rows) and 2000 < len(rows) < 2200


def end() -> str:
    """Ctrl-D."""
    raise EOFError


def require_card(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of the last evaluation in metrics.jsonl, and the code works as printed."""
    monkeypatch.chdir(model)
    card = ModelCard.load(model / "README.md")
    rows = [json.loads(line) for line in (model.parent / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "eval"][-1]
    results = {f"eval_{each.metric_type}": each.metric_value for each in card.data.eval_results}
    assert results and results == {name: last[name] for name in results}
    assert (model / "training.svg").is_file()
    [code] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    exec(code, {})


def require_better(run: Path) -> None:
    """Each stage does what the page's table says, and the interval of the judge's gain lies above 0."""
    sft, reward = (
        json.loads((run / f"{s}/manifest.json").read_text())["metrics"] for s in ("step1_sft", "step2_reward")
    )
    assert sft["eval_perplexity"] < sft["eval_perplexity_before"] and reward["eval_accuracy"] > 0.9
    base, tuned = json.loads((run / "compared/results.json").read_text())["policies"]
    assert tuned["gain"]["low"] > 0 and tuned["kl"]["low"] > 0, (base, tuned)

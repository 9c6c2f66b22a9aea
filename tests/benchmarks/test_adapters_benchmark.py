"""benchmarks/adapters.py: the page of the committed results, and that finished runs are kept; nothing is trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import adapters
from rlhf.errors import UserError

RUN = {"rate": 1.0, "before": 0.0, "after": 0.5, "ci95": 0.1, "kl": 1.0, "seconds": 1.0}
COST = {"trained": 1, "share": 1.0, "kept_mb": 1.0, "seconds": 1.0}


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a call whose models exist, whose costs and runs are RUN and COST."""
    for stage in ("step1_sft", "step2_reward"):
        (tmp_path / "demo" / stage).mkdir(parents=True)
        (tmp_path / "demo" / stage / "manifest.json").touch()
    words = ["x", "--models", str(tmp_path / "demo"), "--results", str(tmp_path / "a.json"), "--methods", "all weights"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(adapters, "cost", lambda spec: dict(COST))
    monkeypatch.setattr(adapters, "demo", lambda name, rate, options: dict(RUN))
    return words


def read(argv: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(argv[4]).read_text())
    return values


def refuse(*_: Any) -> Any:
    raise UserError("no")


def test_the_pages_are_those_of_the_results() -> None:
    docs = adapters.ROOT / "docs"
    page = adapters.markdown(json.loads((docs / "results" / "adapters.json").read_text(encoding="utf-8")))
    assert (docs / "results" / "adapters.md").read_text(encoding="utf-8") == page
    assert page in (docs / "adapters.md").read_text(encoding="utf-8")


def test_a_gain_over_another_start_has_no_interval() -> None:
    row = {"spec": "", **COST, "runs": {"1": RUN}}
    moved = {"spec": "prompt_tuning", **COST, "runs": {"1": RUN | {"before": -0.5}}}
    lines = adapters.markdown({adapters.ALL: row, "LoRA": row, "prompt tuning": moved}).splitlines()
    assert "| 0.50 ± 0.10 |" in lines[2] and "| 0.50 ± 0.10 |" in lines[3] and "| 0.50 |" in lines[4]


def test_a_failed_run_keeps_the_finished_ones(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapters.main() == 0
    runs = read(argv)
    monkeypatch.setattr("sys.argv", [*argv, "LoRA", "--rates", "1", "2"])
    monkeypatch.setattr(adapters, "demo", lambda name, rate, options: refuse() if rate == 2 else RUN)
    with pytest.raises(UserError, match="no"):
        adapters.main()
    assert read(argv) == runs | {"LoRA": {**runs["all weights"], "spec": "lora"}}
    (Path(argv[2]) / "step2_reward" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"--models .*: got no step2_reward/manifest.json"):
        adapters.main()
    assert read(argv)["LoRA"]["runs"] == {"1": RUN}


def test_a_refused_adapter_has_a_row_and_is_tried_again(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "cost", lambda spec: refuse() if spec else COST)
    monkeypatch.setattr("sys.argv", [*argv, "BitFit"])
    assert adapters.main() == 0
    assert read(argv)["BitFit"] == {"spec": "bitfit", "refused": "no"}
    assert "| BitFit | `bitfit` | | | | | no | |" in Path(argv[4]).with_suffix(".md").read_text()
    monkeypatch.setattr(adapters, "cost", lambda spec: dict(COST))
    assert adapters.main() == 0 and "runs" in read(argv)["BitFit"]


def test_other_settings_do_not_join_the_runs(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapters.main() == 0
    monkeypatch.setattr("sys.argv", [*argv, "--total-episodes", "64"])
    with pytest.raises(UserError, match=r"all weights: got runs with total_episodes 1280, expected 64; .* --results"):
        adapters.main()
    other = Path(argv[2]).rename(Path(argv[2]).with_name("other"))
    monkeypatch.setattr("sys.argv", [*argv, "--models", str(other)])
    with pytest.raises(UserError, match="got runs with models demo, expected other"):
        adapters.main()

"""Which models the plan of a chain counts."""

from pathlib import Path

import pytest

from rlhf.chain import command, planning
from tests.support import tiny


def test_a_plan_without_a_model_says_that_it_is_for_the_demos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["--plan", "--steps", "1", "--data-path", "mine.jsonl", "--output-dir", str(tmp_path)])
    assert capsys.readouterr().out.startswith("no --actor-model: this trains the demo's tiny model")


def test_a_plan_counts_what_earlier_stages_have_trained(tmp_path: Path) -> None:
    """Before that, what they start from; no step has to be among those of the plan."""
    start, trained = str(tmp_path / "start"), tmp_path / "out/step1_sft/model"
    tiny.causal_lm("llama").save_pretrained(start)
    (tmp_path / "c.yaml").write_text(
        f"actor_model: {start}\noutput_dir: {tmp_path}/out\nppo: {{critic_model: policy}}\n"
    )
    words = ["--config", str(tmp_path / "c.yaml"), "--steps", "3"]

    def paths() -> list[str]:
        [(options, workload)] = planning.workloads(command.read(words)).values()
        return [role.path for role in workload(options, "cpu").models]

    assert paths() == [start] * 4
    tiny.causal_lm("llama").save_pretrained(trained)
    assert paths() == [str(trained)] * 3 + [start]

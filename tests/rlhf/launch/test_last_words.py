"""The last line of a chain that ends early."""

from pathlib import Path

import pytest

from rlhf.launch.failure_summary import command_to_resume, failure_summary, last_step, newest_checkpoint
from rlhf.launch.supervisor import ExitStatus


def test_where_why_what_is_kept_and_how_to_go_on(tmp_path: Path) -> None:
    stage = tmp_path / "step2_reward"
    (stage / "checkpoints" / "step-00000008").mkdir(parents=True)
    (stage / "checkpoints" / "step-00000012").mkdir()
    for step in (8, 12):
        (stage / "checkpoints" / f"step-000000{step:02}" / "manifest.json").touch()
    (stage / "checkpoints" / ".tmp-step-00000016").mkdir()
    (stage / "checkpoints" / "step-00000020").mkdir()  # no manifest: not whole
    rows = ['{"kind": "train", "step": 15}', '{"kind": "train", "step": 16}', '{"kind": "warning", "step": 17}']
    (stage / "metrics.jsonl").write_text("\n".join([*rows, '{"kind": "tr']))
    assert failure_summary(stage, ExitStatus(-9, "rank 1 on b: SIGKILL"), "python train.py --seed 1") == (
        "to resume: python train.py --seed 1\n"
        "step2_reward did not finish: rank 1 on b: SIGKILL, at step 16; it resumes after step 12"
    )


def test_a_stage_that_was_finished_when_the_signal_came(tmp_path: Path) -> None:
    (tmp_path / "step1_sft").mkdir()
    (tmp_path / "step1_sft" / "manifest.json").touch()
    summary = failure_summary(tmp_path / "step1_sft", ExitStatus(-15, "SIGTERM"), "X")
    assert summary == "to go on: X\nstep1_sft is finished; then SIGTERM"


def test_nothing_was_done_yet(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None and newest_checkpoint(tmp_path) is None
    summary = failure_summary(tmp_path / "step1_sft", ExitStatus(1, "rank 0: exit code 1"), "X")
    assert summary.endswith(
        "\nstep1_sft did not finish: rank 0: exit code 1, before its first step; it starts from scratch, "
        "without a checkpoint"
    )


@pytest.mark.parametrize(
    ("typed", "sections", "again"),
    [
        (["--data-path", "a b"], {}, ["--data-path", "'a b'"]),
        (["--overwrite", "--seed", "1"], {"sft.": False, "ppo.": True}, ["--seed", "1", "--ppo.overwrite"]),
        (["--sft.overwrite=True"], {"sft.": False}, []),
        (["--overwrite"], {"sft.": True}, ["--sft.overwrite"]),
        (["--overwrite"], {"": True}, ["--overwrite"]),
    ],
)
def test_the_command_that_goes_on(
    tmp_path: Path, typed: list[str], sections: dict[str, bool], again: list[str]
) -> None:
    """Of a chain or of a stage alone. To overwrite what was already begun again would begin it once more."""
    manifests = {}
    for section, there in sections.items():
        manifests[section] = tmp_path / f"{section}manifest"
        if there:
            manifests[section].touch()
    assert command_to_resume(["python", "train.py", *typed], manifests) == " ".join(["python", "train.py", *again])


def test_on_several_hosts_the_command_is_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = command_to_resume(["python", "train.py"], {})
    assert command == "on every host, with the launcher that started it: python train.py"

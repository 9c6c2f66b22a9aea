"""A process is killed in the middle of something; the command that the last line names makes what an uninterrupted
run makes, to the bit."""

import random
import signal
from pathlib import Path

import pytest

from tests.faults import harness, saving

pytestmark = pytest.mark.faults
SIGKILL = 128 + signal.SIGKILL


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("step", "nth", "last", "saved"), [(1, 6, 5, 4), (2, 6, 5, 4), (3, 14, 3, 2)])
def test_a_rank_killed_in_a_step(
    step: int, nth: int, last: int, saved: int, processes: int, whole: harness.Whole, tmp_path: Path
) -> None:
    """In step 3 between the actor's and the critic's optimizer step of one minibatch."""
    out = harness.after_stages(whole(processes, step), tmp_path / "out", step)
    command = harness.chain(out, "--steps", str(step), processes=processes)
    ended = harness.run(out, command, f"step:{processes - 1}:{nth}:kill9")
    ended.require(SIGKILL)
    assert ended.after < harness.PROMPT_S
    stage = harness.STAGES[step]
    for word in (
        f"{stage} did not finish",
        f"at step {last};",
        f"rank {processes - 1}: SIGKILL",
        f"after step {saved}",
    ):
        assert word in ended.last_line
    assert harness.saved_steps(out, step)[-1] == saved
    again = harness.run(out, harness.printed_command(ended))
    again.require(0, f"{stage}: resumes after step {saved}")
    harness.assert_same(out, whole(processes, step), step)


def test_a_stage_that_crashed_starts_again_by_itself(whole: harness.Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1", "--max-restarts", "1", processes=2)
    ended = harness.run(out, command, "step:1:6:kill9")
    ended.require(0, "step1_sft: rank 1: SIGKILL", "restart 1 of 1", "step1_sft: resumes after step 4")
    harness.assert_same(out, whole(2, 1), 1)


@pytest.mark.parametrize(
    ("processes", "fault", "saved"),
    [
        (2, "write:1:2:kill9", []),  # the first checkpoint: step 2
        (2, "write:1:4:kill9", [2]),
        (1, "write:0:6:kill9", [2]),
        (1, "rename:0:2:kill9", [2]),
        (1, "renamed:0:2:kill9", [2, 4]),
        (1, "export:0:1:kill9", [6, 8]),  # with all steps done, while the model is written
    ],
)
def test_killed_while_it_saves(
    processes: int, fault: str, saved: list[int], whole: harness.Whole, tmp_path: Path
) -> None:
    """The checkpoint before counts, or the new one; what is half written never does, and goes."""
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1", processes=processes)
    ended = harness.run(out, command, fault).require(SIGKILL)
    assert harness.saved_steps(out, 1) == saved
    expected_words = f"after step {saved[-1]}" if saved else "without a checkpoint"
    assert expected_words in ended.last_line
    again = harness.run(out, harness.printed_command(ended)).require(0)
    assert (f"resumes after step {saved[-1]}" in again.output) if saved else ("resumes" not in again.output)
    harness.assert_same(out, whole(processes, 1), 1)


def test_killed_while_it_loads(whole: harness.Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1")
    harness.run(out, command, "step:0:6:kill9").require(SIGKILL)
    harness.run(out, command, "load:0:1:kill9").require(SIGKILL)
    harness.run(out, command).require(0, "resumes after step 4")
    harness.assert_same(out, whole(1, 1), 1)


@pytest.mark.parametrize("trial", range(25))
def test_killed_at_any_moment_of_saving(trial: int, tmp_path: Path) -> None:
    """Two ranks save as fast as they can; one of them, or both, are killed at a random moment."""
    chosen = random.Random(trial)
    victims = chosen.choice([[0], [1], [0, 1]])
    saving.kill(tmp_path, victims, chosen.uniform(0.0, 0.5))
    saving.require_usable(tmp_path)


@pytest.mark.parametrize(
    ("fault", "finished"),
    [
        ("step1_sft/step:0:6:killall", 0),
        ("step1_sft/finished:0:1:killall", 1),
        ("step2_reward/step:0:4:killall", 1),
        ("step3_ppo/step:0:10:killall", 2),
    ],
    ids=["in 1", "between 1 and 2", "in 2", "in 3"],
)
def test_a_chain_killed_anywhere_ends_as_if_it_was_not(
    fault: str, finished: int, whole: harness.Whole, tmp_path: Path
) -> None:
    """Launcher and rank by SIGKILL; then the same command once."""
    out = tmp_path / "out"
    command = harness.chain(out)
    harness.run(out, command, fault).require(harness.KILLED)
    assert [(out / stage / "manifest.json").exists() for stage in harness.STAGES.values()] == [
        step <= finished for step in harness.STAGES
    ]
    again = harness.run(out, command).require(0)
    assert again.output.count("already complete") == finished
    harness.assert_same(out, whole(1, 3), 1, 2, 3)

"""A process is killed, or gets a signal, in the middle of something; the command that the last line names makes what an
uninterrupted run makes, to the bit."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults import harness

pytestmark = pytest.mark.faults
SIGKILL, TERMINATED, REQUEUE = 128 + signal.SIGKILL, 143, 75


@dataclass(frozen=True)
class Case:
    """A fault in a step of the chain on so many processes; the exit code, and the last step that is done, and saved."""

    step: int
    processes: int
    fault: str
    code: int
    done: int
    saved: int
    words: str = ""
    """of the last line"""
    more: tuple[str, ...] = ()


CASES = {
    **{
        f"a rank is killed in step {step}, {ranks}": Case(
            step, ranks, f"step:{ranks - 1}:{nth}:kill9", SIGKILL, done, saved, f"rank {ranks - 1}: SIGKILL"
        )
        for step, nth, done, saved in ((1, 6, 5, 4), (2, 6, 5, 4), (3, 14, 3, 2))
        for ranks in (1, 2)
    },
    "killed in its first checkpoint": Case(1, 2, "write:1:2:kill9", SIGKILL, 2, 0),
    "killed in its second checkpoint": Case(1, 2, "write:1:4:kill9", SIGKILL, 4, 2),
    "killed in state.json": Case(1, 1, "write:0:6:kill9", SIGKILL, 4, 2),
    "killed before the rename": Case(1, 1, "rename:0:2:kill9", SIGKILL, 4, 2),
    "killed after the rename": Case(1, 1, "renamed:0:2:kill9", SIGKILL, 4, 4),
    "killed while the model is written": Case(1, 1, "export:0:1:kill9", SIGKILL, 8, 8),
    "SIGTERM in step 1": Case(1, 2, "step:1:3:parent-sigterm", TERMINATED, 3, 3, "SIGTERM"),
    "SIGTERM in step 2": Case(2, 1, "step:0:3:parent-sigterm", TERMINATED, 3, 3, "SIGTERM"),
    "SIGTERM in a rollout": Case(3, 1, "generate:0:3:parent-sigterm", TERMINATED, 2, 2, "SIGTERM"),
    "SIGTERM in an update": Case(3, 2, "step:0:7:parent-sigterm", TERMINATED, 2, 2, "SIGTERM"),
    "SIGTERM in a save": Case(1, 1, "write:0:5:parent-sigterm", TERMINATED, 5, 5, "SIGTERM"),
    "SIGTERM to one rank": Case(1, 2, "step:1:3:sigterm", TERMINATED, 3, 3, "SIGTERM"),
    "SIGUSR1": Case(1, 1, "step:0:3:parent-sigusr1", REQUEUE, 3, 3, "SIGUSR1"),
    "a save slower than the grace": Case(
        1, 1, "write:0:5:parent-sigterm,write:0:6:sleep:12", TERMINATED, 5, 5, "SIGTERM", ("--grace-s", "10")
    ),
}
"""Step 3 is killed between the actor's and the critic's optimizer step of one minibatch. Of its rollouts the first is
the evaluation before training. SIGTERM in a save is heard after the checkpoint of step 4."""


@pytest.mark.parametrize("name", CASES)
def test_the_command_of_the_last_line_goes_on_to_the_same_bytes(
    name: str, whole: harness.Whole, tmp_path: Path
) -> None:
    case = CASES[name]
    out = harness.after_stages(whole(case.processes, case.step), tmp_path / "out", case.step)
    command = harness.chain(out, "--steps", str(case.step), *case.more, processes=case.processes)
    ended = harness.run(out, command, case.fault).require(case.code)
    assert ended.after < harness.PROMPT_S
    assert harness.last_step(out, case.step) == case.done
    assert harness.saved_steps(out, case.step)[-1:] == ([case.saved] if case.saved else [])
    kept = f"after step {case.saved}" if case.saved else "without a checkpoint"
    for words in (f"{harness.STAGES[case.step]} did not finish", kept, case.words):
        assert words in ended.last_line
    again = harness.run(out, harness.printed_command(ended)).require(0)
    assert (f"resumes after step {case.saved}" in again.output) == bool(case.saved)
    assert ("resumes" in again.output) == bool(case.saved)
    harness.assert_same(out, whole(case.processes, case.step), case.step)


def test_a_stage_that_crashed_starts_again_by_itself(whole: harness.Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1", "--max-restarts", "1", processes=2)
    ended = harness.run(out, command, "step:1:6:kill9")
    ended.require(0, "step1_sft: rank 1: SIGKILL", "restart 1 of 1", "step1_sft: resumes after step 4")
    harness.assert_same(out, whole(2, 1), 1)


def test_killed_while_it_loads(whole: harness.Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1")
    harness.run(out, command, "step:0:6:kill9").require(SIGKILL)
    harness.run(out, command, "load:0:1:kill9").require(SIGKILL)
    harness.run(out, command).require(0, "resumes after step 4")
    harness.assert_same(out, whole(1, 1), 1)


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

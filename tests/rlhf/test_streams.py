"""stdout that breaks: a text that is printed ends early, a run goes on. And what libraries may log."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import console, errors
from rlhf.errors import UserError

ROOT = Path(__file__).parents[2]
MANY = "[print('x' * 80) for i in range(5000)]"
TEXT = f"from rlhf import errors; raise SystemExit(errors.run_as_user(lambda: {MANY} and 0))"
RUN = f"from rlhf import streams; streams.ignore_broken_streams(); {MANY}; print('done', file=open(%r, 'w'))"
CONTINUES = "its further output is dropped, and the run continues\n"


@pytest.mark.parametrize(
    ("program", "shell", "code", "stderr"),
    [
        (TEXT, "| head -n 1 > /dev/null", 0, ""),
        (TEXT, "> /dev/full", 2, "error: stdout: No space left on device; the output is incomplete\n"),
        (TEXT, ">&-", 0, ""),
        (RUN, "| head -n 1 > /dev/null", 0, f"stdout: Broken pipe; {CONTINUES}"),
        (RUN, "> /dev/full", 0, f"stdout: No space left on device; {CONTINUES}"),
        (RUN, ">&-", 0, ""),
        (RUN, "2>&1 > /dev/full | head -n 0 > /dev/null", 0, ""),
    ],
)
def test_a_text_ends_and_a_run_goes_on(program: str, shell: str, code: int, stderr: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(program.replace("%r", repr(str(tmp_path / "end"))))
    command = f"set -o pipefail; {sys.executable} {file} {shell}"
    ended = subprocess.run(["bash", "-c", command], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, stderr)
    assert program is TEXT or (tmp_path / "end").read_text() == "done\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_unbuffered_line_is_out_when_the_program_dies(name: str) -> None:
    lines = f"print('line', file=sys.{name}); os._exit(0)"
    program = f"import os, sys; from rlhf import streams; streams.ignore_broken_streams(); {lines}"
    env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert getattr(ended, name) == "line\n"


def test_a_library_that_logs_while_it_is_imported_is_heard_of_errors_only(caplog: pytest.LogCaptureFixture) -> None:
    """bitsandbytes advises users of new CPUs to install another package, while peft imports it."""
    console.loading("train.py", ["--help"])
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("install more")
    logger.error("this failed")
    assert [record.message for record in caplog.records] == ["this failed"]


ESCAPES = "a\x1b[31mb\x9b2Jc\x07"
ESCAPED = "a\\x1b[31mb\\x9b2Jc\\x07"


def test_what_is_printed_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt, a response, a key of a row or a template may hold controls."""
    console.say(ESCAPES)
    console.status(ESCAPES)
    console.show_table(ESCAPES, [ESCAPES], [[ESCAPES]])

    def mistake() -> int:
        raise UserError(f"no column '{ESCAPES}'")

    assert errors.run_as_user(mistake) == 2
    out, error = capsys.readouterr()
    assert out.count(ESCAPED) == 4 and error.count(ESCAPED) == 2
    assert not {"\x1b", "\x9b", "\x07"} & {*out, *error}

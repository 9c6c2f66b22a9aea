"""How a program ends after its work is done."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import atexit, sys, threading, time
from rlhf import errors
errors.THREADS_S = {seconds}
def main():
    {body}
    print("wrote", flush=True)
    return {code}
errors.run_program(main)
"""


def start(body: str, code: int = 0, seconds: float = 60.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(body=body, code=code, seconds=seconds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_thread_that_the_users_code_has_left_does_not_keep_the_program() -> None:
    body = "threading.Thread(target=threading.Event().wait, name='of a reward').start()"
    for code in (0, 3):
        program = start(body, code, seconds=0.5)
        _, error = program.communicate(timeout=60)
        assert program.returncode == code
        assert error == "ended without waiting for threads that do not end: MainThread, of a reward\n"


def test_a_thread_that_ends_is_waited_for() -> None:
    program = start("threading.Thread(target=lambda: (time.sleep(0.5), print('done'))).start()")
    assert program.communicate(timeout=60) == ("wrote\ndone\n", "") and program.returncode == 0


def test_ctrl_c_in_the_clean_up_ends_the_program_as_ctrl_c() -> None:
    """Python raises KeyboardInterrupt in whatever runs then, prints that it was ignored, and the code is 0 or 1."""
    program = start("atexit.register(lambda: (print('cleaning', flush=True), time.sleep(30)))")
    assert program.stdout is not None
    while program.stdout.readline() != "cleaning\n":
        pass
    time.sleep(0.1)
    program.send_signal(signal.SIGINT)
    _, error = program.communicate(timeout=20)
    assert (program.returncode, error) == (-signal.SIGINT, "")  # a shell says 130

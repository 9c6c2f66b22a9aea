"""`python -m rlhf.launch.host_agent`: the ranks of one host, for a chain that runs elsewhere.

The chain writes what to do to our standard input, a JSON object a line, and reads from our standard output what the
ranks print and how they end. When our input ends, or nothing has come for SILENCE_S, the chain or the way to it is
gone, and the ranks are ended, first by SIGTERM. So none outlives the chain, whichever host or cable fails.
"""

import codecs
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf.distributed import addresses
from rlhf.errors import UserError
from rlhf.launch.launcher import cores, hold_store, rank_environment
from rlhf.launch.pipes import Reader, Writer, objects
from rlhf.launch.supervisor import POLL_S, Ranks

SILENCE_S = 120.0
SHARED_S = 30.0
"""in which a file of the first host must show on every other"""


class Node:
    """The agent of one host."""

    def __init__(self) -> None:
        self._commands = Reader(0)
        self._chain = Writer(1)
        self._heard = time.monotonic()
        self._store: list[Any] = []
        self._pipes: list[tuple[int, str, int, codecs.IncrementalDecoder]] = []
        self._deadline = float("inf")
        self._alone = False

    def run(self) -> int:
        """The exit code: 0 when the ranks were followed to their end, 1 if they never began."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._be_alone)
        with Ranks() as ranks:
            plan = self._wait_for("prepare")
            if plan is None:
                return 1
            try:
                listening = self._prepare(plan)
            except UserError as error:
                self._chain.write({"refused": str(error)})
                self._chain.finish(POLL_S * 100)
                return 1
            port = listening.getsockname() if listening else None
            self._chain.write({"ready": socket.gethostname(), "meeting": port})
            start = self._wait_for("start")
            if start is None:
                return 1
            self._start(ranks, plan, start, listening)
            self._follow(ranks, plan["grace_s"])
        self._pass_on_text()
        self._chain.write({"done": True})
        self._chain.finish(POLL_S * 100)
        return 0

    def _be_alone(self, _: int, __: FrameType | None) -> None:
        self._alone = True

    def _hear(self) -> list[dict[str, Any]]:
        """What has come from the chain."""
        lines = self._commands.lines()
        if lines:
            self._heard = time.monotonic()
        self._alone = self._alone or self._commands.ended or time.monotonic() - self._heard > SILENCE_S
        return objects(lines)

    def _wait_for(self, name: str) -> dict[str, Any] | None:
        while True:
            for command in self._hear():
                if command.get("do") == name:
                    return command
                if command.get("do") == "signal":
                    return None
            if self._alone:
                return None
            time.sleep(POLL_S)

    def _prepare(self, plan: dict[str, Any]) -> socket.socket | None:
        """Look whether the ranks can run here; on the first host, the socket at which all will meet.

        Raises: UserError, without the name of the host.
        """
        try:
            os.chdir(plan["directory"])
        except OSError as error:
            raise UserError(
                f"{plan['directory']}: {error.strerror}; the directory the run starts in must lie there on every host"
            ) from None
        _require_seen(plan["file"])
        _require_slots(plan["slots"])
        meeting = plan["meeting"]
        if meeting is None:
            return None
        address = meeting["address"] or addresses.first_address(meeting["peers"], os.environ.get("SSH_CONNECTION", ""))
        if address is None:
            raise UserError("no way to the other hosts is known; give --master-addr, an address that they reach")
        return addresses.listen(address, meeting["port"] or 0, "--master-port" if meeting["port"] else "port")

    def _start(
        self, ranks: Ranks, plan: dict[str, Any], start: dict[str, Any], listening: socket.socket | None
    ) -> None:
        os.environ.update(plan["environment"])
        for local in range(len(plan["slots"])):
            rank = plan["first"] + local
            place = {"RANK": str(rank), "LOCAL_RANK": str(local), "NODE_RANK": str(plan["node"])}
            environment = (
                rank_environment(len(plan["slots"]), plan["grace_s"])
                | _devices(plan["slots"])
                | place
                | start["environment"]
            )
            command = [sys.executable, "-P", "-m", plan["module"], *plan["argv"]]
            child = ranks.start(rank, command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for stream, pipe in (("out", child.stdout), ("err", child.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                self._pipes.append((rank, stream, pipe.fileno(), decoder))
        if listening is not None:  # ranks take seconds to load, and so does the store
            threading.Thread(target=lambda: self._store.append(hold_store(listening)), daemon=True).start()

    def _follow(self, ranks: Ranks, grace_s: float) -> None:
        while ranks.running():
            for command in self._hear():
                if command.get("do") == "signal":
                    ranks.signal(int(command["number"]))
            if self._alone and self._deadline == float("inf"):
                self._deadline = time.monotonic() + grace_s
                ranks.signal(signal.SIGTERM)
            if time.monotonic() > self._deadline:
                ranks.signal(signal.SIGKILL)
            self._pass_on_text()
            for end in ranks.poll():
                self._pass_on_text()
                self._chain.write({"ended": end.rank, "code": end.code, "state": end.state})
            time.sleep(POLL_S)

    def _pass_on_text(self) -> None:
        for rank, stream, descriptor, decoder in self._pipes:
            with contextlib.suppress(BlockingIOError):
                while got := os.read(descriptor, 1 << 16):
                    self._chain.write({"rank": rank, stream: decoder.decode(got)}, text=True)


def _require_seen(path: str) -> None:
    """Raises: UserError if a file that the chain wrote into the output directory does not show within SHARED_S."""
    end = time.monotonic() + SHARED_S
    while not Path(path).exists():
        if time.monotonic() > end:
            raise UserError(
                f"{path} does not show within {SHARED_S:.0f} s; the output directory must be one directory that all "
                "hosts share"
            )
        time.sleep(POLL_S * 4)


def _require_slots(slots: list[int]) -> None:
    """Raises: UserError if there are more slots than GPUs, or than cores where there is no GPU."""
    gpus = len(_gpus())
    if gpus and max(slots) >= gpus:
        raise UserError(f"slot {max(slots)} is asked for, {gpus} GPUs are there, numbered from 0; lower slots=")
    if not gpus and len(slots) > max(2, cores()):
        raise UserError(f"{len(slots)} slots are asked for, there is no GPU and {cores()} cores; lower slots=")


def _gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, else the numbers of all GPUs of NVIDIA's driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device]
    numbers = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    return [str(number) for number in numbers]


def _devices(slots: list[int]) -> dict[str, str]:
    """The GPUs of the slots."""
    gpus = _gpus()
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot] for slot in slots)} if gpus else {}


if __name__ == "__main__":
    code = Node().run()
    sys.stdout.flush()
    os._exit(code)  # threads and a store are no reason to stay

"""The ranks of several hosts, seen from the chain: an agent on each, reached by ssh or srun. Torch-free."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rlhf.errors import UserError
from rlhf.launch import hosts
from rlhf.launch.hosts import Deployment, Host
from rlhf.launch.pipes import Reader, objects
from rlhf.launch.supervisor import CLOSING_S, POLL_S, RankEnd, Signals

HEARTBEAT_S = 10.0
SETTLING_S = 30.0
"""that the other hosts have to come or fail once one has failed, so that one error names all"""
LAST_LINES = 5
"""of what ssh said, kept for the message when it fails"""


class _Agent:
    """The way to one host."""

    def __init__(self, host: Host, first: int, options: hosts.LaunchOptions) -> None:
        self.host = host
        self.ranks = list(range(first, first + len(host.slots)))
        self.ready: dict[str, Any] = {}
        self.refused = ""
        self.done = False
        self._said: list[str] = []
        command = hosts.command_on(host.name, hosts.agent_command(), options)
        pipe = subprocess.PIPE
        self.tool = command[0]
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise UserError(
                f"{command[0]}: cannot be started ({error.strerror}); install it, or see --remote-shell"
            ) from None
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input = self._process.stdin.fileno()
        os.set_blocking(self._input, False)
        self._events = Reader(self._process.stdout.fileno())
        self._errors = Reader(self._process.stderr.fileno())

    def tell(self, **command: Any) -> None:
        """One object to the agent. One that takes nothing is as good as gone, and ends by its silence rule."""
        with contextlib.suppress(OSError):
            os.write(self._input, json.dumps(command).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]]:
        self._said = [*self._said, *self._errors.lines()][-LAST_LINES:]
        return objects(self._events.lines())

    @property
    def gone(self) -> str:
        """Why nothing more will come from there; empty while something may."""
        if self._process.poll() is None or not self._events.ended:
            return ""
        self._said = [*self._said, *self._errors.lines()][-LAST_LINES:]
        said = next((line.strip() for line in reversed(self._said) if line.strip()), "")
        return f"{self.tool} ended with exit code {self._process.returncode}" + (f" ({said})" if said else "")

    def close(self) -> None:
        """End the ranks there and the way to them, at once if they are already gone."""
        if not self.done:
            self.tell(do="signal", number=int(signal.SIGKILL))
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._process.stdin.close()
        end = time.monotonic() + CLOSING_S
        while self._process.poll() is None and time.monotonic() < end:
            for event in self.hear():
                _show(event, self.host.name)
            time.sleep(POLL_S)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()


class Nodes:
    """The ranks of all hosts of a deployment; at the end of the block none is left."""

    def __init__(self, deployment: Deployment) -> None:
        self._options = deployment.options
        self._agents: list[_Agent] = []
        self._hosts = deployment.hosts
        self._running: dict[int, _Agent] = {}
        self._beat = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            if not agent.done:
                agent.tell(do="signal", number=int(signal.SIGKILL))
        for agent in self._agents:
            agent.close()

    def start(self, module: str, argv: Sequence[str], file: str, asked: Signals) -> None:
        """Reach every host, then start the ranks; `file` is one of the shared directory, which all must see. Returns
        early if someone wants it to end.

        Raises: UserError with every host that is missing or refuses, the others released.
        """
        first = 0
        for node, host in enumerate(self._hosts):
            agent = _Agent(host, first, self._options)
            self._agents.append(agent)
            agent.tell(do="prepare", **self._plan(node, first, host), module=module, argv=list(argv), file=file)
            first += len(host.slots)
        self._gather(asked)
        if asked.waiting():
            return
        address, port = self._agents[0].ready["meeting"]
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(first)}
        meeting |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        meeting |= {"RLHF_RENDEZVOUS_TIMEOUT_S": str(self._options.rendezvous_timeout_s)}
        for agent in self._agents:
            agent.tell(do="start", environment=meeting)
            self._running |= dict.fromkeys(agent.ranks, agent)

    def _plan(self, node: int, first: int, host: Host) -> dict[str, Any]:
        others = [other.name for other in self._hosts[1:]]
        meeting = {"address": self._options.master_addr, "port": self._options.master_port, "peers": others}
        return {
            "node": node,
            "first": first,
            "slots": host.slots,
            "directory": os.getcwd(),
            "environment": hosts.travelling(os.environ),
            "grace_s": self._options.grace_s,
            "meeting": meeting if node == 0 else None,
        }

    def _gather(self, asked: Signals) -> None:
        """Wait until every host is ready. Raises: UserError."""
        end = time.monotonic() + self._options.rendezvous_timeout_s
        while not asked.waiting() and not all(agent.ready for agent in self._agents):
            for agent in self._agents:
                for event in agent.hear():
                    agent.ready = event if "ready" in event else agent.ready
                    agent.refused = event.get("refused", agent.refused)
            failed = [agent for agent in self._agents if agent.refused or (agent.gone and not agent.ready)]
            if failed:
                end = min(end, time.monotonic() + SETTLING_S)
            missing = [agent for agent in self._agents if not agent.ready]
            if len(failed) == len(missing) > 0 or time.monotonic() > end:
                raise UserError(self._missing(missing))
            self._stay_in_touch()
            time.sleep(POLL_S)

    def _missing(self, missing: list[_Agent]) -> str:
        refused = [f"{agent.host.name}: {agent.refused}" for agent in missing if agent.refused]
        gone = [f"{agent.host.name} ({agent.gone or 'no answer'})" for agent in missing if not agent.refused]
        within = f"{self._options.rendezvous_timeout_s:g} s"
        count = f"{len(gone)} of {len(self._agents)} hosts are missing"
        by_ssh = [agent.host.name for agent in missing if not agent.refused and agent.tool == "ssh"]
        check = f"; try: ssh {by_ssh[0]} true" if by_ssh else ""
        absent = [f"{count} (--rendezvous-timeout-s {within}): {', '.join(gone)}{check}"] if gone else []
        return "; ".join([*refused, *absent])

    def running(self) -> list[int]:
        return list(self._running)

    def poll(self) -> list[RankEnd]:
        self._stay_in_touch()
        ended = []
        for agent in self._agents:
            for event in agent.hear():
                agent.done = agent.done or "done" in event
                if event.get("ended") in self._running:
                    del self._running[event["ended"]]
                    ended.append(RankEnd(event["ended"], event["code"], agent.host.name, event["state"]))
                _show(event, agent.host.name)
            gone = agent.gone
            lost = [rank for rank, of in self._running.items() if of is agent] if gone else []
            for rank in lost:
                del self._running[rank]
                ended.append(RankEnd(rank, 1, agent.host.name, lost=f"lost the host: {gone}"))
        return ended

    def signal(self, number: int) -> None:
        for agent in {id(agent): agent for agent in self._running.values()}.values():
            agent.tell(do="signal", number=int(number))

    def _stay_in_touch(self) -> None:
        if time.monotonic() - self._beat > HEARTBEAT_S:
            self._beat = time.monotonic()
            for agent in self._agents:
                agent.tell()


def _show(event: Mapping[str, Any], host: str) -> None:
    """What a rank has printed, to our own streams; lines of ranks other than 0 say whose they are."""
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        text = event.get(name, "")
        if text and event["rank"] > 0:
            text = re.sub(r"^(?=.)", f"[rank {event['rank']} on {host}] ", text, flags=re.MULTILINE)
        stream.write(text)
        stream.flush()

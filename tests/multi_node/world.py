"""Two hosts out of one machine: each with its own network, name, hosts file and shared memory, a cable between them.
A `pdsh` on the PATH enters them. Like many a Debian host, each takes its own name for 127.0.1.1.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESSES = {"alpha": "10.203.77.1", "beta": "10.203.77.2"}
PDSH = """#!/bin/sh
# As pdsh -S -f N -w HOST,HOST WORD...: the words, %n being the number of the host, go to a shell on every host; lines
# come back with its name, and the code is the highest.
while [ "$1" != -w ]; do shift; done
hosts=$(echo "$2" | tr , ' '); shift 2
n=0; children=
for host in $hosts; do
    words=$(echo "$*" | sed "s/%n/$n/g")
    case "$host" in
    {cases}
    *) (echo "$host: No route to host" >&2; exit 255) & ;;
    esac
    children="$children $!"; n=$((n + 1))
done
code=0
for child in $children; do wait "$child"; last=$?; [ "$last" -gt "$code" ] && code=$last; done
exit "$code"
"""


def why_not() -> str:
    """Why this machine cannot be two hosts; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"no program {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", "ip link add one type veth peer name two"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"network namespaces are not permitted: {tried.stderr.strip()}"


class Machine:
    """A host, there for as long as the process that holds its namespaces."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.address = name, ADDRESSES[name]
        other_hosts = "".join(f"{a} {n}\n" for n, a in ADDRESSES.items() if n != name)
        hosts = folder / f"hosts-{name}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{other_hosts}")
        setup = (
            f"hostname {name} && mount --bind {hosts} /etc/hosts && mount -t tmpfs tmpfs /dev/shm && ip link set lo up"
            " && echo up && exec sleep 3600"
        )
        command = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", setup]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "up\n"
        self.pid = self._holder.pid

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", f"--wd={os.getcwd()}", *command]

    def do(self, *command: str) -> None:
        subprocess.run(self.inside(*command), check=True, capture_output=True)

    def plug_in(self) -> None:
        self.do("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class World:
    """The two hosts. Commands of `alpha` find `pdsh` on their PATH, which leads to both."""

    def __init__(self, alpha: Machine, beta: Machine, folder: Path) -> None:
        self.alpha, self.beta, self.folder = alpha, beta, folder

    def environment(self) -> dict[str, str]:
        return os.environ | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def hostfile(self, *lines: str) -> str:
        path = self.folder / "hostfile"
        path.write_text("\n".join(lines or ("alpha slots=1", "beta slots=1")) + "\n")
        return str(path)

    def start(self, command: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        """A process on alpha."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(  # type: ignore[no-any-return, call-overload]
            self.alpha.inside(*command), cwd=ROOT, env=self.environment(), text=True, **pipes
        )

    def processes(self) -> list[str]:
        """Command lines of all that runs on the two hosts, but what makes them hosts."""
        networks = {os.readlink(f"/proc/{host.pid}/ns/net") for host in (self.alpha, self.beta)}
        command_lines = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_text().replace("\0", " ").strip()  # a zombie's is empty
                if os.readlink(folder / "ns" / "net") in networks and not line.startswith("sleep 3600"):
                    command_lines.append(line)
        return [line for line in command_lines if line]

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """A process on alpha, followed to its end."""
        with self.start(command) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        machines = []
        for name in ADDRESSES:
            machines.append(Machine(name, folder))
            stack.callback(machines[-1].close)
        alpha, beta = machines
        ends = ["eth0", "netns", str(alpha.pid), "type", "veth", "peer", "name", "eth0", "netns", str(beta.pid)]
        subprocess.run(["ip", "link", "add", *ends], check=True, capture_output=True)
        alpha.plug_in()
        beta.plug_in()
        (folder / "bin").mkdir()
        enter = '{}) env -i HOME="$HOME" PATH="$PATH" {} sh -c "$words" & ;;'
        entries = [enter.format(machine.name, " ".join(machine.inside())) for machine in machines]
        pdsh = folder / "bin" / "pdsh"
        pdsh.write_text(PDSH.replace("{cases}", "\n    ".join(entries)))
        pdsh.chmod(0o755)
        yield World(alpha, beta, folder)

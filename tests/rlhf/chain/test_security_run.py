"""Step 3 on two ranks, watched from outside: what listens, and what is written."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from rlhf.chain import command as train

ROOT = Path(train.__file__).parents[2]
pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SECRETS = {
    "HF_TOKEN": "hf_test123",
    "HUGGING_FACE_HUB_TOKEN": "hf_test456",
    "WANDB_API_KEY": "wandb-test-0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "aws/test+secret",
    "OPENAI_API_KEY": "sk-test-0123456789",
    "MY_PASSWORD": "correct horse battery",
}
IN_A_COMMENT = "Bearer comment-test-789"


# --- the watch


def processes_under(root: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    descendants = {root}
    while more := {child for child, parent in parents.items() if parent in descendants} - descendants:
        descendants |= more
    return descendants


def listening(processes: set[int]) -> set[str]:
    """The addresses at which they accept TCP connections, as the kernel's tables have them."""
    inodes = set()
    for process in processes:
        for number in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(os.readlink(number))
    addresses = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in inodes:
                addresses.add(address(cells[1].partition(":")[0]))
    return addresses


def address(written: str) -> str:
    """`127.0.0.1` of 0100007F: words of four bytes in the machine's order."""
    words = [bytes.fromhex(written[i : i + 8]) for i in range(0, len(written), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def is_loopback(host: str) -> bool:
    return host.startswith(("127.", "::ffff:127.")) or host == "::1"


# --- the run


@dataclass
class Watched:
    """What was seen of a chain."""

    home: Path
    code: int = -1
    output: bytes = b""
    listened: set[str] = field(default_factory=set)
    commands: set[bytes] = field(default_factory=set)
    most: int = 0
    """processes at once"""


def config_of(home: Path) -> list[str]:
    """Step 3 of the demo at its smallest, without a reward model."""
    rows = [{"prompt": f"the fox {i}", "chosen": "the fox is kind", "rejected": f"no {i}"} for i in range(160)]
    (home / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rollouts = {"total_episodes": 16, "batch_size": 16, "micro_batch_size": 8, "eval_samples": 4}
    small = {
        "data_path": [str(home / "x.jsonl")],
        "data_cache": str(home / "cache"),
        "output_dir": str(home / "out"),
        "max_eval_rows": 4,
        "sample_rows": 2,
        "ppo": {"algorithm": "rloo", "num_generations": 2, "reward": ["length,target=8"], "judge": None} | rollouts,
    }
    file = home / "small.yaml"
    file.write_text(f"# {IN_A_COMMENT}\n{yaml.safe_dump(small, allow_unicode=True)}", encoding="utf-8")
    chain = ["--config", str(train.DEMO), str(file), "--steps", "3", "--actor-model", "demo-llama"]
    return [*chain, "--deployment-type", "single_node", "--num-processes", "2"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    home = tmp_path_factory.mktemp("home")
    observed = Watched(home)
    (home / "tmp").mkdir()
    folders = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "RLHF_CACHE": str(home / "cache")}
    with (home / "tmp" / "said").open("wb") as log:
        command = [sys.executable, "train.py", *config_of(home)]
        environment = os.environ | SECRETS | folders
        chain = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while chain.poll() is None:
                here = processes_under(chain.pid)
                observed.most = max(observed.most, len(here))
                observed.listened |= listening(here)
                for process in here:
                    with suppress(OSError):
                        observed.commands.add(Path(f"/proc/{process}/cmdline").read_bytes())
                time.sleep(0.5)
        finally:
            chain.kill()
    observed.code, observed.output = chain.returncode, (home / "tmp" / "said").read_bytes()
    yield observed


def test_the_chain_ran(watched: Watched) -> None:
    assert watched.code == 0, watched.output.decode(errors="replace")[-3000:]
    assert watched.most >= 3  # the chain itself and two ranks
    assert (watched.home / "out" / "step3_ppo" / "manifest.json").is_file()


def test_one_node_listens_on_the_loopback_interface_only(watched: Watched) -> None:
    assert watched.listened and all(map(is_loopback, watched.listened)), watched.listened


def test_no_secret_is_written(watched: Watched) -> None:
    """Neither into any file that the run left, nor on the terminal, nor into a command line that others can read."""
    files = [path for path in watched.home.rglob("*") if path.is_file() and path.name != "small.yaml"]
    names = {path.name for path in files}
    assert {"config.yaml", "manifest.json", "metrics.jsonl", "data.json", "model.safetensors", "said"} <= names
    written = {str(path): path.read_bytes() for path in files} | {"a command": b"\n".join(watched.commands)}
    for secret in (*SECRETS.values(), IN_A_COMMENT):
        forms = (secret.encode(), secret.encode("utf-16-le"), json.dumps(secret).encode()[1:-1])
        for where, content in written.items():
            assert not any(form in content for form in forms), f"{secret} in {where}"
    for name in SECRETS:
        assert not any(name.encode() in content for content in written.values()), f"{name}: the environment is recorded"

"""Where ranks meet: who is missing, what differs, and this machine's addresses and ports."""

import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from rlhf.config.options import RunOptions
from rlhf.distributed import addresses, rendezvous
from rlhf.errors import UserError
from rlhf.training import progress


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_addresses_and_interfaces() -> None:
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"
    assert addresses.address_towards("no.such.host.invalid") is None
    assert (
        addresses.is_this_host("localhost")
        and addresses.is_this_host("127.0.0.1")
        and not addresses.is_this_host("203.0.113.7")
    )
    assert addresses.interface_of("127.0.0.1") in ("lo", "lo0") and addresses.interface_of("203.0.113.7") is None


def test_a_port_that_is_taken_is_named_with_one_that_is_free() -> None:
    with addresses.listen("127.0.0.1", 0, "port") as listener:
        port = listener.getsockname()[1]
        message = refusal(lambda: addresses.listen("127.0.0.1", port, "--master-port"))
    assert message.startswith(f"--master-port {port}: is taken on {socket.gethostname()} (127.0.0.1); free now: ")
    assert "203.0.113.7:0: cannot listen" in refusal(lambda: addresses.listen("203.0.113.7", 0, "port"))


# --- where ranks meet


def meet(records: list[Any]) -> list[str | None]:
    """What each rank is told in the end; None in `records` is one that never comes."""
    store = HashStore()
    messages: list[str | None] = [None] * len(records)

    def rank(number: int) -> None:
        try:
            rendezvous.require_agreement(store, number, len(records), records[number], 1.0)
        except UserError as error:
            messages[number] = str(error)

    threads = [threading.Thread(target=rank, args=(n,)) for n, record in enumerate(records) if record is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return messages


def record(host: str, **has: str) -> dict[str, Any]:
    return {"host": host, "has": {"torch": "2.10", "--seed": "0", "rlhf-pipeline": "ab"} | has}


def test_ranks_that_agree() -> None:
    assert meet([record("a"), record("b"), record("b")]) == [None] * 3


def test_a_difference_is_told_to_every_rank() -> None:
    other = record(
        "b", **{"torch": "2.11", "--seed": "1", "rlhf-pipeline": "cd", "my.py": "1", "peft": "2", "rich": "3"}
    )
    messages = meet([record("a"), record("b"), other])
    assert messages[0] == messages[1] == messages[2]
    assert messages[0] is not None and messages[0].startswith(
        "rank 2 on b differs from rank 0 on a: torch 2.11, not 2.10; --seed 1, not 0; rlhf-pipeline cd, not ab; "
        "my.py is there; 2 more; "
    )


def test_who_is_missing_is_listed_and_the_others_released() -> None:
    messages = meet([record("a"), None, record("b"), None, None])
    assert messages[0] == messages[2] and messages[1] is None
    assert messages[0] is not None and "3 of 5 ranks did not arrive" in messages[0]
    assert "rank 1, 3, 4; ranks of a, b are there;" in messages[0]


def test_rank_0_is_missing() -> None:
    messages = meet([None, record("b")])
    assert messages[1] == "rank 0 did not arrive within 1 s; start the first host too"


def test_what_must_agree(tmp_path: Path) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text("1")
    properties = rendezvous.shared_properties(RunOptions(output_dir=f"{reward}:score", seed=3), "x")
    assert properties["--seed"] == "3" and properties["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert {"torch", "deepspeed", "rlhf-pipeline"} <= set(properties)  # the last is a digest of all code
    assert "platform" not in properties  # kernels may differ
    reward.write_text("2")
    changed = rendezvous.shared_properties(RunOptions(output_dir=f"{reward}:score", seed=3), "x")
    assert {name for name in properties if properties[name] != changed[name]} == {str(reward)}


def test_a_stage_that_one_host_alone_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would skip the stage, and the other host would wait for it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b/out/x").mkdir(parents=True)
    (tmp_path / "b/out/x/manifest.json").touch()
    hosts = {}
    for rank, host in enumerate("ab"):
        monkeypatch.chdir(tmp_path / host)
        hosts[rank] = {"host": host, "has": rendezvous.shared_properties(RunOptions(output_dir="out"), "x")}
    message = rendezvous.describe_differences(hosts, 2)
    assert message is not None and "rank 1 on b differs from rank 0 on a: out/x/manifest.json is there; " in message
    assert message.endswith("share one --output-dir")


def test_a_directory_that_only_one_host_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "VISIBLE_S", 0.1)
    reports = iter([[None], None, ["", "b", "b"], [None], None, ["", "", ""]])  # three for each call
    monkeypatch.setattr(progress.collectives, "gather_objects", lambda own: next(reports) or [own])
    with (
        pytest.raises(UserError, match=r"x: b does not see what rank 0 writes there; --output-dir must be one"),
        progress.locked_directory(tmp_path / "x", replace=False),
    ):
        pass
    with progress.locked_directory(tmp_path / "x", replace=False):
        assert (tmp_path / "x" / ".lock").exists()


def test_the_first_host_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank_variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in (rank_variables | {rendezvous.TIMEOUT: "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    message = refusal(rendezvous.store)
    monkeypatch.delenv("MASTER_PORT")
    assert "RANK and WORLD_SIZE, but not MASTER_PORT; set the host of rank 0" in refusal(rendezvous.store)
    assert f"rank 1 on {socket.gethostname()}: nothing answers at 127.0.0.1:{port} within 1 s" in message

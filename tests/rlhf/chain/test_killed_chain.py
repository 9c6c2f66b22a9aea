"""The chain as a user starts it, killed in every stage: the same command goes on, and does nothing once all is done."""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf import plugins
from rlhf.chain import command as train
from rlhf.config import parser
from rlhf.launch import launcher
from rlhf.storage import manifests
from tests.support import killing, programs, saving
from tests.support.killing import Killed, dying, left, require_same, run

pytestmark = pytest.mark.usefixtures("here")

CHAIN = ("step1_sft", "step2_reward", "step3_ppo")
Chain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chain(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chain:
    """`python train.py` with its stages in this process: (exit code, what it printed, what it said on stderr)."""
    shared = {name: value for name, value in killing.TINY.items() if name not in ("batch_size", "micro_batch_size")}
    size = {"batch_size": 8, "micro_batch_size": 8}
    short = {name: value for name, value in killing.SHORT.items() if name != "model"} | size
    tree = shared | {"actor_model": "demo-llama", "reward_model": "demo-llama", "data_workers": 1}
    tree |= {"sft": short, "reward": short, "ppo": size | killing.PPO}
    file = here / "chain.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    classes = {"step1_sft": killing.SFTConfig, "step2_reward": killing.RewardConfig}

    def stage(module: str, argv: list[str], target: Any) -> int:
        print(f"started {module}")
        options = classes.get(module) or plugins.find("step3_ppo.algorithms", "ppo").Config
        run(parser.parse(options, argv, module, ""))
        return 0

    monkeypatch.setattr(launcher, "run", stage)
    started = programs.runner("train.py", train.main, monkeypatch, capsys)
    return lambda *argv: started("--config", str(file), *argv)


def test_a_chain_killed_in_every_stage_goes_on_to_the_same_bytes(
    chain: Chain, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "whole").mkdir()
    with contextlib.chdir(here / "whole"):
        code, output, _ = chain()
        assert code == 0 and re.findall(r"started (\w+)", output) == list(CHAIN)
        whole = {stage: left(Path("out") / stage) for stage in CHAIN}
    in_process = launcher.run
    dying(monkeypatch, chain, "train", 2)
    assert killing.steps_of(Path("out/step1_sft")) == [1]

    def between(module: str, argv: list[str], target: Any) -> Any:
        if module == "step2_reward":
            raise Killed
        return in_process(module, argv, target)

    monkeypatch.setattr(launcher, "run", between)
    with pytest.raises(Killed):
        chain()
    monkeypatch.setattr(launcher, "run", in_process)
    assert (Path("out/step1_sft") / "manifest.json").is_file() and not Path("out/step2_reward").exists()
    dying(monkeypatch, chain, "train", 3)
    assert killing.steps_of(Path("out/step2_reward")) == [1, 2] and not Path("out/step3_ppo").exists()
    dying(monkeypatch, chain, "train", 2)  # step 2 goes on at 3, so that this is step 3's
    assert killing.steps_of(Path("out/step3_ppo")) == [1]
    code, output, _ = chain()
    assert code == 0
    started = ["step1_sft", "step1_sft", "step2_reward", "step2_reward", "step3_ppo", "step3_ppo"]  # killed, and again
    assert re.findall(r"started (\w+)", output) == started
    for stage in CHAIN:
        require_same(left(Path("out") / stage), whole[stage])
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    code, output, _ = chain()
    assert code == 0 and "started" not in output
    assert [line for line in output.splitlines() if "already complete" in line] == [
        f"{stage}: already complete in out, skipped" for stage in CHAIN
    ]
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before
    assert saving.save(Path("out/step1_sft"), 4) is None  # as left by kills: of the stage at its end, of the chain
    Path("out/.step3_ppo-1234.yaml").touch()
    code, output, _ = chain()
    assert code == 0 and "started" not in output and set(Path("out").rglob("*")) == set(before)


def test_a_second_chain_leaves_the_first_alone(chain: Chain, here: Path) -> None:
    (here / "out").mkdir()
    (here / "out/config.yaml").write_text("of the first")
    with manifests.locked(here / "out"):
        before = sorted(here.rglob("*"))
        code, output, error = chain("--seed", "1")
        assert sorted(here.rglob("*")) == before
    assert (
        code == 2 and error.startswith(f"error: out: in use by process {os.getpid()} on ") and "started" not in output
    )
    assert (here / "out/config.yaml").read_text() == "of the first"

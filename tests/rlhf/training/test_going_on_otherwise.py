"""What an interrupted stage, or chain, makes of it that something is not as it was: the process, the disk, its options,
data, libraries, or the stages before it."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from rlhf import plugins
from rlhf.chain import command as train
from rlhf.errors import UserError
from rlhf.storage import disk, manifests
from rlhf.supervised import runner
from rlhf.training import checkpoints, progress
from step1_sft.config import SFTConfig
from step3_ppo.config import STAGE
from tests.support import killing, saving
from tests.support.killing import Killed, dying, left, ppo_options, require_same, run, sft_options, undisturbed

pytestmark = pytest.mark.usefixtures("here")

SFT = Path("out/step1_sft")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What step 1 leaves if nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder):
        return undisturbed(folder / "run", sft_options(num_train_epochs=4))


def sft() -> None:
    run(sft_options(num_train_epochs=4))


# --- a process that dies while it saves


ENDS: dict[str, tuple[Any, str, Callable[..., bool], bool]] = {
    "the model half written": (disk.os, "rename", lambda _, to: to.name == "model", False),
    "the model written": (disk.os, "rename", lambda _, to: to.name == "model", True),
    "before the manifest": (disk, "write_json", lambda to, _: to == SFT / "manifest.json", False),
    "after the manifest": (disk, "write_json", lambda to, _: to == SFT / "manifest.json", True),
}


RARE = ("the model half written", "before the manifest")


@pytest.mark.parametrize("point", [pytest.param(p, marks=pytest.mark.faults if p in RARE else ()) for p in ENDS])
def test_a_process_that_dies_at_the_end_is_finished_or_not(
    point: str, here: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched, pytest.raises(Killed):
        saving.killed_by(patched, *ENDS[point])
        sft()
    assert (SFT / "manifest.json").is_file() == (point == "after the manifest")
    capsys.readouterr()
    sft()
    assert ("already complete" in capsys.readouterr().out) == (point == "after the manifest")
    assert left(SFT)["model/model.safetensors"] == whole["model/model.safetensors"]
    manifests.read_manifest(SFT)


# --- the disk


def test_a_run_outlives_a_full_disk(
    whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = checkpoints.save

    def save(stage: Path, step: int, *rest: Any) -> str | None:
        with saving.files_up_to(10_000) if step in (3, 4) else contextlib.nullcontext():
            return real(stage, step, *rest)

    monkeypatch.setattr(checkpoints, "save", save)
    dying(monkeypatch, sft, "train", 5)
    output = capsys.readouterr().out
    warnings = [line for line in output.splitlines() if "no checkpoint" in line]
    assert len(warnings) == 2
    for step, line in zip((3, 4), warnings, strict=True):
        assert line.startswith(f"warning, step {step}: no checkpoint, rank 0 cannot write {SFT}/checkpoints/.tmp-step-")
        assert re.search(rf"[\d,]+ MB are free there; the last checkpoint is {SFT}/checkpoints/step-00000002$", line)
    assert killing.steps_of(SFT) == [1, 2] and not list((SFT / "checkpoints").glob(".*"))
    sft()
    require_same(left(SFT), whole)


def test_too_little_room_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints are kept, and a third is there while it is written: the tensors of one, thrice."""
    dying(monkeypatch, sft, "train", 3)
    files = [path for path in (SFT / "checkpoints").rglob("*") if path.is_file()]
    there, need = sum(path.stat().st_size for path in files), 3 * tensor_bytes(SFT / "checkpoints/step-00000002")
    assert need < 1.5 * there < 1.1 * need  # what lies there are two
    opened: list[int] = []
    read = runner.open_datasets
    for free, enough in ((need - there - 1, False), (need - there, True)):
        usage = SimpleNamespace(free=free)
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
            patched.setattr(runner, "open_datasets", lambda *arguments: opened.append(1) or read(*arguments))
            if enough:
                dying(patched, sft, "train", 4)
            else:
                with pytest.raises(UserError, match=r" are free there, expected .* --keep and one more while"):
                    sft()
                assert killing.steps_of(SFT) == [1, 2] and not opened, "before the data is read"


def tensor_bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as saved:
            total += sum(4 * saved.get_tensor(name).numel() for name in saved.keys())  # noqa: SIM118
    return total


# --- options


OPTIONS = ppo_options(eval_every=2, keep_best="eval_score", actor_model="a", reward_model="b")
FREE = {
    **{"sample_rows": 9, "report_to": ("tensorboard",), "save_every": 7, "save_minutes": 1.0, "keep": 5},
    "keep_last_checkpoint": True,
    **{"micro_batch_size": 2, "zero_stage": 3, "offload_optimizer": True, "gradient_checkpointing": True},
    **{"timeout_s": 60.0, "data_workers": 3, "max_bad_steps": 9, "rollout_batch_size": 3},
    "actor": {"zero_stage": 2},
}
NOTED = {"total_episodes": 64, "eval_every": 3, "patience": 4, "export_rollouts": True}
REFUSED = {
    **{"actor_model": "c", "reward_model": "c", "critic_model": "c", "algorithm": "grpo", "adapter": "lora"},
    **{"data_path": ("x.jsonl",), "eval_fraction": 0.5, "max_train_rows": 7, "seed": 5, "dtype": "bf16"},
    **{"learning_rate": 0.5, "lr_scheduler_type": "cosine", "warmup_ratio": 0.5, "adam_beta2": 0.5, "batch_size": 16},
    **{"num_mini_batches": 2, "num_ppo_epochs": 9, "kl_coef": 0.9, "reward": ("length",), "ema_decay": 0.5},
    **{"temperature": 0.5, "response_length": 4, "chat_template": "chatml", "keep_best": None},
    "chat_template_kwargs": '{"think": false}',
}


@pytest.fixture
def interrupted() -> Path:
    """Of OPTIONS, with a checkpoint."""
    about = {"stage": "step3_ppo", "inputs": {}, "models": [], "logs": {}, "data": {"x.jsonl": "one"}}
    about |= {"config": OPTIONS.model_dump(mode="json"), "versions": manifests.versions()}
    assert checkpoints.save(Path("out/step3_ppo"), 2, checkpoints.Resumable({}, {}), about, 2) is None
    return Path("out/step3_ppo")


def standing(changes: dict[str, Any]) -> str:
    options = type(OPTIONS).model_validate(OPTIONS.model_dump() | changes)
    return progress.stage_status(STAGE, options, {}, lambda: {"x.jsonl": "one"}, {})


@pytest.mark.parametrize("name", FREE)
def test_what_changes_no_result_changes_freely(
    interrupted: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert standing({name: FREE[name]}) == "interrupted" and capsys.readouterr().out == ""


@pytest.mark.parametrize("name", NOTED)
def test_how_long_and_what_is_looked_at_changes_with_a_note(
    interrupted: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert standing({name: NOTED[name]}) == "interrupted"
    note = f"note: {interrupted} resumes with another option: {name} was {getattr(OPTIONS, name)}, now {NOTED[name]}\n"
    assert capsys.readouterr().out == note


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_result_is_refused_unless_asked_for(
    interrupted: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {name: REFUSED[name]}
    with pytest.raises(UserError, match=r"--output-dir.*--overwrite.*--allow-config-change") as caught:
        standing(changes)
    message = f"{name} was {as_json(getattr(OPTIONS, name))!r}, now {as_json(REFUSED[name])!r}"
    assert message in str(caught.value) and str(interrupted) in str(caught.value) and "\n" not in str(caught.value)
    assert standing(changes | {"allow_config_change": True}) == "interrupted"
    assert message in capsys.readouterr().out


def test_what_would_pass_alone_is_shown_beside_what_is_refused(interrupted: Path) -> None:
    assert standing({}) == "interrupted"
    with pytest.raises(UserError, match="total_episodes was 32, now 64"):
        standing({"seed": 5, "total_episodes": 64})
    assert standing({"seed": 5, "overwrite": True}) == "new"


@pytest.mark.parametrize("model", ["actor", "critic", "reference", "reward_models"])
def test_the_bits_of_a_model_are_no_free_option(interrupted: Path, model: str) -> None:
    with pytest.raises(UserError, match=rf"{model}\.quantize was None, now 'nf4'"):
        standing({model: {"quantize": "nf4"}})


def as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_the_classes_name_options_that_there_are() -> None:
    """And an option that nobody has put in a class is refused, which loses nothing."""
    classes = [train.chain_config([]), SFTConfig, killing.RewardConfig]
    classes += [plugins.find("step3_ppo.algorithms", name).Config for name in plugins.names("step3_ppo.algorithms")]
    for options in classes:
        free, noted = options.declared("FREE"), options.declared("TOTALS") | options.declared("NOTED")
        assert free | noted <= set(options.model_fields) and not free & noted
        assert set(FREE) & set(options.model_fields) <= free and set(NOTED) & set(options.model_fields) <= noted
        assert not (free | noted) & set(REFUSED)


def test_more_epochs_and_fewer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    dying(monkeypatch, lambda: run(sft_options(num_train_epochs=2)), "train", 7)
    shutil.copytree("out", "more")
    run(sft_options(num_train_epochs=1))  # 6 of 8 steps are done; 4 are asked for
    assert steps(SFT) == [1, 2, 3, 4, 5, 6]
    run(sft_options(num_train_epochs=3, output_dir="more"))
    assert steps(Path("more/step1_sft")) == list(range(1, 13))
    output = capsys.readouterr().out
    assert "num_train_epochs was 2, now 1" in output and "num_train_epochs was 2, now 3" in output


def steps(stage: Path) -> list[int]:
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["step"] for row in rows if row["kind"] == "train"]


# --- data and libraries


def test_data_that_changed_is_refused_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = here / "own.jsonl"
    lines = [json.dumps({"prompt": f"tell me about {i}", "response": f"the {i} is kind"}) + "\n" for i in range(99)]
    own.write_text("".join(lines), encoding="utf-8")
    options = sft_options(data_path=[str(own)], data_split=(1.0, 0.0, 0.0))
    dying(monkeypatch, lambda: run(options), "train", 3)
    own.write_text("".join([*lines, lines[0]]), encoding="utf-8")
    for variant in (options, options.model_copy(update={"allow_config_change": True})):
        with pytest.raises(UserError, match=rf"checkpoint of a run with other data: {own} changed since") as caught:
            run(variant)
        assert "--allow-config-change" not in str(caught.value)
    own.write_text("".join(lines), encoding="utf-8")
    run(options)
    assert steps(SFT) == [1, 2, 3, 4]


# --- a finished stage that is extended


@pytest.mark.parametrize(("make", "total"), [(sft_options, "num_train_epochs"), (ppo_options, "total_episodes")])
def test_an_extended_stage_makes_what_a_longer_one_makes(
    make: Callable[..., Any], total: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a constant learning rate; else the schedule is that of the larger total from there on."""
    if make is ppo_options:
        make = partial(ppo_options, "rloo", actor_model="demo-llama", reward=("length,target=4",))
    short = {"num_train_epochs": 1, "total_episodes": 16}[total]
    options = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "save_every": None}
    longer = {**options, total: 2 * short}
    stage, model = ("step1_sft", "model") if make is sft_options else ("step3_ppo", "actor")
    run(make(**longer, output_dir="long"))
    run(make(**options, **{total: short}))
    with pytest.raises(UserError, match=f"no checkpoint to be extended from .{total} {short} to {2 * short}.*--keep-"):
        run(make(**longer))
    run(make(**options, **{total: short}, overwrite=True, keep_last_checkpoint=True))
    run(make(**options, **{total: short}))
    assert "already complete" in capsys.readouterr().out and len(killing.steps_of(Path("out") / stage)) == 1
    with pytest.raises(UserError, match=r"other options .*learning_rate was"):
        run(make(**longer, learning_rate=0.5))
    run(make(**longer))
    assert f"{total} was {short}, now {2 * short}" in capsys.readouterr().out
    both = [Path(run_folder) / stage / model / "model.safetensors" for run_folder in ("long", "out")]
    assert both[0].read_bytes() == both[1].read_bytes() and not killing.steps_of(Path("out") / stage)

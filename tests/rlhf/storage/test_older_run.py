"""What an older version left: tests/support/older_run, fine-tuning of 2026-11-26 (commit ae9a9bd7), on 24 rows.

    python -m step1_sft --model model --data-path rows.jsonl --max-length 24 --sample-rows 0 --max-eval-rows 2
        --batch-size 4 --micro-batch-size 4 --save-every 1 --num-train-epochs 1 --output-dir finished

`interrupted` is of the same command, killed after its first checkpoint.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.storage import disk, manifests
from tests.support import forked

RUN = Path(__file__).parents[2] / "support" / "older_run"
OPTIONS = "--model model --data-path rows.jsonl --max-length 24 --sample-rows 0 --max-eval-rows 2 --batch-size 4"
OPTIONS += " --micro-batch-size 4 --save-every 1 --num-train-epochs 1"
CHECKPOINT = "interrupted/step1_sft/checkpoints/step-00000001/manifest.json"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    return tmp_path


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.program("step1_sft", *OPTIONS.split(), *words, cwd=folder)


def test_a_finished_stage_is_complete(older: Path) -> None:
    manifest = json.loads((older / "finished/step1_sft/manifest.json").read_text())
    assert manifests.content_digest(manifest) != manifest["sha256"]  # in it, 1.0 is not 1
    ran = train(older, "--output-dir", "finished")
    assert "already complete in finished" in ran.stdout and ran.returncode == 0, ran.stderr


def test_another_option_is_refused_with_the_version(older: Path) -> None:
    """Its default may be another one now."""
    ran = train(older, "--output-dir", "finished", "--seed", "1")
    assert "(seed was 0, now 1); another version of rlhf-pipeline wrote it" in ran.stderr, ran.stdout


def test_a_checkpoint_is_resumed_and_the_version_said(older: Path) -> None:
    ran = train(older, "--output-dir", "interrupted")
    assert ran.returncode == 0, ran.stderr
    assert "step-00000001 was written with another version: rlhf-pipeline older -> " in ran.stdout
    assert "resumes after step 1" in ran.stdout and "wrote interrupted/step1_sft/model" in ran.stdout


def rewrite(checkpoint: Path, state: Tree, config: Tree) -> None:
    """The checkpoint with this state, and with these options beside its own."""
    disk.write_json(checkpoint.parent / "state.json", state)
    manifest = json.loads(checkpoint.read_text())
    manifest["files"]["state.json"] = manifests.digest(checkpoint.parent / "state.json")
    manifests.write_manifest(checkpoint, manifest | {"config": manifest["config"] | config})


def test_what_is_gone_stays_behind(older: Path) -> None:
    """The states of observers in a checkpoint, an option there, and its default in config.yaml."""
    path = older / CHECKPOINT
    state = json.loads((path.parent / "state.json").read_text())
    rewrite(path, state | {"guard": {"count": 1, "kl": 9.0}}, {"kl_target": 2.0, "abort_kl": None})
    ran = train(older, "--config", "interrupted/step1_sft/config.yaml", "--output-dir", "interrupted")
    assert ran.returncode == 0, ran.stderr
    assert "note: interrupted/step1_sft resumes without kl_target 2.0, an option of before" in ran.stdout
    assert "abort_kl" not in ran.stdout and "resumes after step 1" in ran.stdout


def test_a_checkpoint_that_lacks_a_number_names_the_version(older: Path) -> None:
    path = older / CHECKPOINT
    state = json.loads((path.parent / "state.json").read_text())
    del state["batches"]["row"]
    rewrite(path, state, {})
    ran = train(older, "--output-dir", "interrupted")
    assert "the stage cannot resume from it (KeyError('row')); another version of rlhf-pipeline wrote it" in ran.stderr


def test_a_run_with_an_adapter_that_is_gone_is_reported_and_verified(older: Path) -> None:
    """Also where its command is refused now."""
    adapter, path = "lora,init_lora_weights=pissa", older / "finished/step1_sft/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["adapter"] = adapter
    path.write_text(json.dumps(manifest | {"sha256": manifests.content_digest(manifest)}))
    options = path.with_name("config.yaml")
    options.write_text(options.read_text().replace("adapter: null", f"adapter: {adapter}"))
    for words in ("report finished", "verify finished"):
        ran = forked.program("rlhf", *words.split(), cwd=older)
        assert ran.returncode == 0, ran.stderr + ran.stdout
    ran = train(older, "--output-dir", "finished", "--adapter", adapter)
    assert ran.stderr.count("\n") == 1 and "no option 'init_lora_weights'; have lora_alpha, r" in ran.stderr


@pytest.mark.parametrize("path", ["finished/step1_sft/manifest.json", CHECKPOINT])
def test_an_edited_manifest_is_damaged(path: str, older: Path) -> None:
    assert manifests.parse(older / path)[1] == ""
    text = (older / path).read_text()
    (older / path).write_text(text.replace('"seed": 0', '"seed": 1'))
    assert manifests.parse(older / path) == ({}, "its content differs from its own sha256")


def test_a_manifest_of_another_format_is_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    manifests.write_manifest(path, {"stage": "step1_sft"})
    assert manifests.parse(path)[0]["format"] == manifests.FORMAT
    later = {"stage": "step1_sft", "format": manifests.FORMAT + 1}
    path.write_text(json.dumps(later | {"sha256": manifests.content_digest(later)}))
    with pytest.raises(UserError, match="format 2, expected 1: another version of rlhf-pipeline wrote it"):
        manifests.parse(path)

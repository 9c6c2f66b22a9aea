"""What a stage leaves behind vouches for itself: unfinished, damaged and foreign directories are told apart."""

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from rlhf.config.declaration import Declaration
from rlhf.config.options import OptimizerOptions, RunOptions
from rlhf.errors import UserError
from rlhf.storage import disk, manifests
from rlhf.training import progress
from tests.support import saving


class Options(OptimizerOptions, RunOptions):
    model: str | None = None
    kl_coef: float = 0.1


def make(out: Path, stage: str = "step1_sft", model: str = "weights", **manifest: Any) -> Path:
    """A finished stage as one leaves it, `model` being what its weights say."""
    directory = out / stage
    (directory / "model").mkdir(parents=True, exist_ok=True)
    (directory / "model" / "config.json").write_text("{}")
    (directory / "model" / "model.safetensors").write_text(model)
    (directory / manifests.RUN_CONFIG).write_text("seed: 0")
    (directory / manifests.METRICS).write_text("{}")
    options = Options(output_dir=str(out), model="pretrained")
    content = {
        "stage": stage,
        "inputs": {"model": {"path": "pretrained", "manifest_sha256": None}},
        "models": ["model"],
        "metrics": {},
        "config": options.model_dump(mode="json"),
        "data": {"x.jsonl": "one"},
        "files": manifests.file_digests(directory, ["model"]),
    }
    manifests.write_manifest(directory / manifests.MANIFEST, content | manifest)
    return directory


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with disk.atomic_directory(final) as staging:
        (staging / "a").write_text("old")
        assert not final.exists() and staging.parent == tmp_path
    with pytest.raises(ZeroDivisionError), disk.atomic_directory(final) as staging:
        (staging / "a").write_text("new")
        raise ZeroDivisionError
    assert (final / "a").read_text() == "old" and os.listdir(tmp_path) == ["model"]
    with disk.atomic_directory(final) as staging:
        (staging / "b").write_text("newer")
    assert os.listdir(final) == ["b"]


def test_files_of_an_earlier_crash_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-model").mkdir()
    (tmp_path / ".tmp-model" / "half").write_text("")
    with disk.atomic_directory(tmp_path / "model") as staging:
        (staging / "whole").write_text("")
    assert os.listdir(tmp_path / "model") == ["whole"]


def test_json_is_written_atomically(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    disk.write_json(file, {"ü": 1})
    with pytest.raises(TypeError):
        disk.write_json(file, {"b": object()})
    assert json.loads(file.read_text(encoding="utf-8")) == {"ü": 1}


def test_a_finished_stage_gives_its_model(tmp_path: Path) -> None:
    stage = make(tmp_path)
    model = str(stage / "model")
    assert manifests.read_manifest(stage)["stage"] == "step1_sft"
    assert manifests.resolve_model_path(str(stage), "model") == manifests.resolve_model_path(model, "model") == model
    assert manifests.resolve_model_path(f"{stage}/", "actor", "model") == model
    with pytest.raises(UserError, match="holds model, expected critic or actor"):
        manifests.resolve_model_path(str(stage), "critic", "actor")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def edit(stage: Path, **changes: Any) -> None:
    file = stage / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the weights": (lambda stage: flip(stage / "model/model.safetensors"), "damaged, its content differs"),
    "a short file": (lambda stage: os.truncate(stage / "model/model.safetensors", 3), "got 3 bytes, expected 7"),
    "a lost file": (lambda stage: (stage / "model/config.json").unlink(), "config.json: damaged, no such file"),
    "no manifest": (lambda stage: (stage / "manifest.json").unlink(), "unfinished stage, no manifest.json"),
    "half a manifest": (
        lambda stage: os.truncate(stage / "manifest.json", 40),
        "edited, it is not a manifest",
    ),
    "another manifest": (lambda stage: (stage / "manifest.json").write_text("[]"), "its content differs"),
    "a metric edited": (lambda stage: edit(stage, metrics={"score": 1}), "damaged or edited, its content differs"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_stage_is_refused(tmp_path: Path, damage: str) -> None:
    stage = make(tmp_path)
    manifests.read_manifest(stage)  # so that a digest is remembered
    harm, message = DAMAGES[damage]
    harm(stage)
    for path in (stage, stage / "model"):
        with pytest.raises(UserError) as caught:
            manifests.resolve_model_path(str(path), "model")
        assert message in str(caught.value) and str(stage) in str(caught.value) and "\n" not in str(caught.value)


def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    path = make(tmp_path) / "manifest.json"
    good, content = path.read_bytes(), manifests.read_manifest(path.parent)
    for bit in range(0, 8 * len(good), 29):  # every bit of a byte has its turn
        path.write_bytes(good)
        saving.flip(path, bit // 8, bit % 8)
        try:
            assert manifests.read_manifest(path.parent) == content
        except UserError as error:
            assert "restore the file, rerun that stage with --overwrite" in str(error)


def test_other_files_beside_the_models_are_ignored(tmp_path: Path) -> None:
    stage = make(tmp_path)
    (stage / "notes.txt").write_text("mine")
    (stage / "model" / "README.md").write_text("mine")
    assert manifests.resolve_model_path(str(stage), "model") == str(stage / "model")


def test_paths_outside_stages_do_not_change(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    (plain / "manifest.json").write_text("[]")  # of another program
    (tmp_path / "config.yaml").write_text("")  # a chain's, beside it
    for path in (str(plain), "gpt2", "someone/model", str(tmp_path / "absent"), "a.yaml"):
        assert manifests.resolve_model_path(path, "model") == path
        assert manifests.manifest_digest(path) is None


def test_a_planned_stage_is_recognised_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned = {"step1_sft": "gpt2"}
    for path in ("out/step1_sft", "out/step1_sft/model", f"{tmp_path}/out/step1_sft", "out/x/../step1_sft/"):
        assert manifests.planned_start(path, "out", planned) == "gpt2"
    for path in ("out", "out/step2_reward", "out/step1_sft2", "gpt2", "other/step1_sft"):
        assert manifests.planned_start(path, "out", planned) is None


def test_the_write_test_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    manifests.require_writable(str(tmp_path))
    manifests.require_writable(str(tmp_path / "a" / "b"))
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
    for path in ("file", "file/below", "link", "link/below"):
        with pytest.raises(UserError, match=r"--output-dir .*cannot write there .*is not a directory"):
            manifests.require_writable(str(tmp_path / path))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a directory that nobody can write to")
def test_a_directory_that_is_not_writable() -> None:
    with pytest.raises(UserError, match="cannot write there"):
        manifests.require_writable("/proc/self/x")


def test_another_programs_layout_of_a_manifest_is_no_damage(tmp_path: Path) -> None:
    """jq 1.6 writes 20.0 as 20, and every number with 17 digits."""
    path = tmp_path / manifests.MANIFEST
    content = {"stage": "s", "inputs": {}, "config": {"a": [20.0, 0.1, -0.0], "b": {"c": 1e-5}}, "files": {}}
    content |= {"models": [], "metrics": {"d": 3.0, "e": 2.5}}
    manifests.write_manifest(path, content)
    text = json.dumps(json.loads(path.read_text(), parse_float=lambda word: float(f"{float(word):.17g}")))
    path.write_text(re.sub(r"(\d)\.0\b", r"\1", text))
    assert "20.0" not in path.read_text() and manifests.read_manifest(tmp_path) == content | {
        "format": manifests.FORMAT,
        "sha256": ANY,
    }
    path.write_text(path.read_text().replace("2.5", "2.25"))
    with pytest.raises(UserError, match="damaged or edited"):
        manifests.read_manifest(tmp_path)


def test_a_finished_stage_keeps_no_file_of_an_interrupted_write(tmp_path: Path) -> None:
    content = {"stage": "s", "inputs": {}, "config": {}, "files": {}, "models": [], "metrics": {}}
    manifests.write_manifest(tmp_path / manifests.MANIFEST, content)
    for name in (".tmp-model", ".old-model", "model"):
        (tmp_path / name).mkdir()
    for name in (".tmp-data.json", "model/.tmp-README.md", "model/.tmp-x.svg", "model/weights", "notes.txt"):
        (tmp_path / name).touch()
    progress.sweep_finished(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"manifest.json", "model", "model/weights", "notes.txt"}


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    """It would lead to a file that is not the lock's, whose content would be lost."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"run/\.lock: cannot be written"), manifests.locked(tmp_path / "run"):
        pass
    assert (tmp_path / "mine").read_text() == "precious"


def test_one_process_locks_a_directory(tmp_path: Path) -> None:
    """The last owner removes the lock's file: who waits for it must not take that for the lock."""
    path, inside, refused = tmp_path / "a" / "b", [], []

    def lock_repeatedly() -> None:
        for _ in range(60):
            try:
                with manifests.locked(path):
                    inside.append(1)
                    assert len(inside) == 1
                    (path / "file").touch()
                    inside.pop()
            except UserError as error:
                refused.append(str(error))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(lock_repeatedly) for _ in range(4)]:
            done.result()
    assert all(message.startswith(f"{path}: in use by ") for message in refused)
    assert os.listdir(path) == ["file"]
    (path / "file").unlink()
    path.rmdir()
    with manifests.locked(path):
        assert os.listdir(path) == [".lock"]
    assert os.listdir(tmp_path) == ["a"] and not os.listdir(tmp_path / "a")


# --- whether a stage has to run


def state(
    out: Path, stage: str = "step1_sft", planned: dict[str, str] | None = None, content: Any = None, **changes: Any
) -> str:
    if content is None:
        content = {}
    options = Options(**{"output_dir": str(out), "model": "pretrained", **changes})
    declaration = Declaration(stage, "", {}, ("model",))
    return progress.stage_status(declaration, options, {"model": str(options.model)}, lambda: content, planned or {})


def test_a_finished_stage_is_finished(tmp_path: Path) -> None:
    assert state(tmp_path) == "new"
    stage = make(tmp_path)
    assert state(tmp_path) == "finished"
    assert state(tmp_path, overwrite=True) == "new"
    (stage / "manifest.json").unlink()
    assert state(tmp_path) == "new"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kl_coef", 0.2, "kl_coef was 0.1, now 0.2"),
        ("seed", 1, "seed was 0, now 1"),
        ("learning_rate", 1e-3, "learning_rate was 1e-05, now 0.001"),
        ("model", "other", "model was 'pretrained', now 'other'"),
    ],
)
def test_options_that_change_results_are_refused_by_name(tmp_path: Path, name: str, value: Any, message: str) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=r"--output-dir.*--overwrite") as caught:
        state(tmp_path, **{name: value})
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)


def test_an_option_of_a_later_version_is_no_difference(tmp_path: Path) -> None:
    older = Options(output_dir=str(tmp_path), model="pretrained").model_dump(mode="json")
    del older["kl_coef"]
    make(tmp_path, config=older)
    assert state(tmp_path) == "finished"
    with pytest.raises(UserError, match=r"kl_coef was 0\.1, now 0\.2"):  # it had its default then
        state(tmp_path, kl_coef=0.2)


def test_other_data_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path)
    assert state(tmp_path, content={"x.jsonl": "one"}) == "finished"
    assert state(tmp_path, content={"of a place not known then": "two"}) == "finished"
    with pytest.raises(
        UserError, match=r"finished with other data: x.jsonl changed since; choose another --output-dir"
    ):
        state(tmp_path, content={"x.jsonl": "two"})


def test_a_moved_run_is_the_same_run(tmp_path: Path) -> None:
    make(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    assert state(tmp_path / "new") == "finished"


def test_two_spellings_of_one_model_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Options(output_dir="out", model="opt-125m").model_dump(mode="json")
    make(tmp_path / "out", config=config)
    assert state(Path("out"), model="facebook/opt-125m") == "finished"
    make(tmp_path / "out", config=config | {"model": "here/model"})
    assert state(Path("out"), model=f"{tmp_path}/here/model") == "finished"


def later(out: Path) -> Path:
    """A second stage that started from the first."""
    first = str(out / "step1_sft")
    entry = {"path": f"{first}/model", "manifest_sha256": manifests.manifest_digest(first)}
    config = Options(output_dir=str(out), model=first).model_dump(mode="json")
    return make(out, "step2_reward", inputs={"model": entry}, config=config)


def test_a_result_is_not_replaced_when_its_input_changed(tmp_path: Path) -> None:
    first = make(tmp_path)
    later(tmp_path)
    assert state(tmp_path, "step2_reward", model=str(first)) == "finished"
    assert state(tmp_path, "step2_reward", model=f"{first}/model") == "finished"
    with pytest.raises(UserError, match=r"finished, and model .* will be rerun; only --overwrite replaces a result"):
        state(tmp_path, "step2_reward", {"step1_sft": "pretrained"}, model=str(first))
    make(tmp_path, model="weights")
    assert state(tmp_path, "step2_reward", model=str(first)) == "finished", "the same again is the same"
    make(tmp_path, model="others!")
    with pytest.raises(UserError, match=r"has changed since it started from it; .*--overwrite"):
        state(tmp_path, "step2_reward", model=str(first))
    assert state(tmp_path, "step2_reward", model=str(first), overwrite=True) == "new"


def test_an_unfinished_stage_restarts_when_its_input_changed(tmp_path: Path) -> None:
    first = make(tmp_path)
    manifest = manifests.read_manifest(later(tmp_path))
    shutil.rmtree(tmp_path / "step2_reward")
    assert saving.save(tmp_path / "step2_reward", 1, about=saving.ABOUT | manifest) is None
    assert state(tmp_path, "step2_reward", model=str(first)) == "interrupted"
    make(tmp_path, model="others!")
    assert state(tmp_path, "step2_reward", model=str(first)) == "stale"
    edit(first, metrics={"score": 1})  # which says nothing of what the stage started from
    with pytest.raises(UserError, match=r"step1_sft/manifest.json: damaged or edited"):
        state(tmp_path, "step2_reward", model=str(first))


def test_a_stage_whose_checkpoints_are_all_damaged_is_not_new(tmp_path: Path) -> None:
    """It would begin again, and remove them."""
    assert saving.save(tmp_path / "step1_sft", 1) is None
    next(tmp_path.rglob("manifest.json")).write_text("")
    assert state(tmp_path) == "interrupted"


def test_a_tampered_output_is_not_skipped(tmp_path: Path) -> None:
    stage = make(tmp_path)
    flip(stage / "model" / "model.safetensors")
    with pytest.raises(UserError, match="--overwrite"):
        state(tmp_path)
    assert state(tmp_path, overwrite=True) == "new"

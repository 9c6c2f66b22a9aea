"""Files, models and stages of the user that change between a run's end and the same command."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.errors import UserError
from rlhf.storage import manifests
from rlhf.training import progress
from rlhf.training.run import Run
from step3_ppo.config import STAGE
from tests.support import tiny
from tests.support.killing import dying, ppo_options, run, sft_options

pytestmark = pytest.mark.usefixtures("here")


def test_files_of_the_user_that_changed_are_refused_by_name(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat template and a model directory that no stage made; with --allow-config-change a note, and no way around a
    finished stage."""
    template, model = here / "mine.jinja", here / "base"
    text = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    template.write_text(text, encoding="utf-8")
    model.mkdir()
    tiny.tokenizer().save_pretrained(model)
    tiny.causal_lm().save_pretrained(model)
    options = sft_options(model=str(model), chat_template=str(template))
    dying(monkeypatch, lambda: run(options), "train", 3)
    weights = model / "config.json"
    for file in (template, weights):
        before = file.read_text(encoding="utf-8")
        file.write_text(before + " ", encoding="utf-8")
        changed = template if file is template else model
        with pytest.raises(
            UserError, match=rf"with another content of {changed}, changed since; .*allow-config-change"
        ):
            run(options)
        file.write_text(before, encoding="utf-8")
    template.write_text(text + " ", encoding="utf-8")
    run(options.model_copy(update={"allow_config_change": True}))
    assert f"resumes with another content of {template}" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("out/step1_sft/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    template.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rf"finished with another content of {template}") as caught:
        run(options)
    assert "--allow-config-change" not in str(caught.value)


def test_files_in_score_sources(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine.py").write_text("def score(prompts, responses): return [0.0] * len(prompts)")
    (here / "of_theirs").mkdir()
    for name in ("__init__", "rules", "judges", "words"):
        (here / f"of_theirs/{name}.py").touch()
    monkeypatch.syspath_prepend(str(here))
    (here / "rm").mkdir()
    (here / "rm/config.json").write_text("{}")
    sources = (
        f"0.5*{here}/mine.py:score", f"learned,model={here}/rm,normalize=true", "length,target=3",
        "2*of_theirs.rules:f", "mine.py:score", "nothing.py:here", "data.sources.demo:true_score", "nowhere.rules:f",
        "match,pattern=of_theirs.words:f",
    )  # fmt: skip
    options = ppo_options().model_copy(update={"reward": sources, "judge": "python,function=of_theirs.judges:g"})
    digests = progress.user_files(options, {})
    assert set(digests) == {f"{here}/mine.py", "mine.py", f"{here}/rm", "of_theirs.rules", "of_theirs.judges"}
    assert "mine" not in sys.modules, "a file is executed once, as a plug-in"
    (here / "rm/config.json").write_text("{ }")
    (here / "of_theirs/judges.py").write_text("def g(prompts, responses): return [0.0] * len(prompts)")
    assert {path for path, digest in progress.user_files(options, {}).items() if digests[path] != digest} == {
        f"{here}/rm", "of_theirs.judges"
    }  # fmt: skip


def test_a_checkpoint_names_the_stage_that_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is made again while another one runs from it is not what that one started from."""
    Path("out/step3_ppo").mkdir(parents=True)
    digests = iter(["old", "new", "newer"])
    monkeypatch.setattr(manifests, "manifest_digest", lambda path: next(digests))
    with tiny.one_rank():
        stage = Run(STAGE, ppo_options(), "new", {"actor_model": "out/step1_sft"})
        entries = [stage._provenance()["inputs"]["actor_model"]["manifest_sha256"] for _ in range(2)]
        stage.recorder.close()
    assert entries == ["old", "old"]


def test_a_damaged_checkpoint_leaves_a_finished_stage_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot be extended, and is finished all the same."""
    run(sft_options(keep_last_checkpoint=True))
    stage = Path("out/step1_sft")
    weights = next(stage.glob("checkpoints/*/*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    manifest = (stage / "manifest.json").read_bytes()
    with pytest.raises(UserError, match="all checkpoints there are damaged"):
        run(sft_options(keep_last_checkpoint=True, num_train_epochs=2))
    assert (stage / "manifest.json").read_bytes() == manifest
    run(sft_options(keep_last_checkpoint=True))
    assert "already complete" in capsys.readouterr().out


def test_data_from_elsewhere_is_compared_when_it_has_been_read() -> None:
    manifest = {"data": {"hub/rows": "one", "gone": "x"}}
    progress.require_same_data(manifest, {"hub/rows": "one", "new": "y"})
    with pytest.raises(UserError, match="a run with other data: hub/rows changed since"):
        progress.require_same_data(manifest, {"hub/rows": "two"})


def test_the_first_stage_of_a_run_has_the_notes_of_the_run(tmp_path: Path) -> None:
    """Also when it is run again over a whole run."""
    data = SimpleNamespace(notes=("of the stage",), notes_of_run=("of the run",))
    first, second = tmp_path / "step1_sft", tmp_path / "step2_reward"
    for stage in (first, second):
        stage.mkdir()
    assert progress.notes_on(data, first) == ("of the stage", "of the run")
    assert progress.notes_on(data, second) == ("of the stage", "of the run"), "a stage alone"
    for stage in (first, second):
        (stage / "data.json").touch()
    assert progress.notes_on(data, first) == ("of the stage", "of the run")
    assert progress.notes_on(data, second) == ("of the stage",)

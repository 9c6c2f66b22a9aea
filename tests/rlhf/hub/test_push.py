"""Uploads against a stand-in of the hub's API, and what is refused before training."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from rlhf.chain import command as chain
from rlhf.cli import main as cli_main
from tests.support import programs, stand_in_hub
from tests.support.programs import Run
from tests.support.stand_in_hub import Hub

ID = "me/my-policy"
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with stand_in_hub.running(monkeypatch) as server:
        yield server


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return programs.runner("rlhf", cli_main, monkeypatch, capsys)


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    return stand_in_hub.stage(tmp_path / "run/step1_sft")


@pytest.mark.parametrize("private", [True, False])
def test_a_model_and_its_edited_card_are_uploaded(private: bool, hub: Hub, rlhf: Run, stage: Path) -> None:
    (stage / "model/README.md").write_text("---\nlicense: mit\n---\n# Mine")
    (stage / "model/.cache").write_text("x")
    code, out, err = rlhf("push", str(stage), ID, *(["--private"] if private else []))
    assert (code, out.strip(), err) == (0, f"{constants.ENDPOINT}/{ID}", "")
    files = {path.name: path.read_bytes() for path in (stage / "model").iterdir() if path.name[0] != "."}
    uploaded = hub.repositories[ID]
    assert uploaded["private"] is private
    assert {name: content for name, content in uploaded["files"].items() if name != ".gitattributes"} == files
    assert rlhf("push", str(stage / "model"), ID)[0] == 0  # a second time, into the repository that there is


def test_a_changed_model_is_not_uploaded(hub: Hub, rlhf: Run, stage: Path) -> None:
    (stage / "model/model.safetensors").write_bytes(b"weighty")
    code, _, err = rlhf("push", str(stage), ID)
    assert code == 2 and "model.safetensors: damaged" in err
    code, _, err = rlhf("push", str(stage.parent), ID)
    assert code == 2 and f"no model, expected a directory with config.json and *.safetensors; have {stage}/model" in err
    assert not hub.writes


REFUSALS = {
    "offline": "HF_HUB_OFFLINE is set; unset it, or do not push",
    "unreachable": "does not answer (",
    "no token": "no token; set HF_TOKEN to a token with write access, or log in with `hf auth login`",
    "wrong token": "the hub answers 401",
    "other owner": "the hub answers 403 (You have no rights there",
    "public": "the repository is public, and got --private; make it private on the hub, or name another",
    "no owner": "expected OWNER/NAME",
    "not an id": "expected OWNER/NAME",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_fail_at_the_end_is_refused_before_training(
    case: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chain, "run_all", lambda *_: pytest.fail("a stage was started"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "none"))
    if case == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif case == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif case == "no token":
        monkeypatch.delenv("HF_TOKEN")
    elif case == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "another-token")
    elif case == "public":
        hub.repositories[ID] = {"private": False, "files": {}}
    repository = {"other owner": "them/x", "no owner": "x", "not an id": "a/b/c"}.get(case, ID)
    run = programs.runner("train", chain.main, monkeypatch, capsys)
    words = ["--steps", "1", "--data-path", "demo,rows=400", "--output-dir", str(tmp_path / "out")]
    code, _, err = run(*words, "--push-to-hub", repository, "--private", "--rehearse")
    assert code == 2 and err.startswith(f"error: push to {repository}: ") and REFUSALS[case] in err
    assert err.count("\n") == 1 and not any("/commit/" in path for path in hub.writes)


def test_the_chain_uploads_its_last_model_and_only_when_it_is_told_to(
    hub: Hub, stage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option is not among the saved ones, so that the same directory is not uploaded again by another command."""
    monkeypatch.setattr(chain, "plan", lambda *_: {})
    run = programs.runner("train", chain.main, monkeypatch, capsys)
    words = ["--steps", "1", "--output-dir", str(stage.parent)]
    assert run(*words)[0] == 0 and not hub.writes
    code, out, err = run(*words, "--push-to-hub", ID, "--private")
    assert code == 0, err
    assert f"uploaded: {constants.ENDPOINT}/{ID}\n" in out and hub.repositories[ID]["private"]
    options = chain.chain_config([])(push_to_hub=ID, output_dir=str(stage.parent))
    chain.save(options)
    assert yaml.safe_load((stage.parent / "config.yaml").read_text())["push_to_hub"] is None


def test_an_export_merges_only(rlhf: Run) -> None:
    code, _, err = rlhf("export", "x")
    assert code == 2 and "PATH --merge OUT, or PATH --at 0.7 --merge OUT; llama.cpp's" in err


def test_the_commands_of_the_page(
    hub: Hub, rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/share.md, with the tutorial's config and finished stages, and an owner that the stand-in knows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chain, "plan", lambda *_: {})
    [config] = re.findall(r"```yaml\n(# tutorial.yaml.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    (tmp_path / "tutorial.yaml").write_text(config)
    for name, folder in (("step2_reward", "model"), ("step3_ppo", "actor")):
        stand_in_hub.stage(tmp_path / "runs/tutorial" / name, folder)
    page = (DOCS / "share.md").read_text(encoding="utf-8")
    lines = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines):
        words = shlex.split(line.replace("OWNER/NAME", f"me/model-{number}"))
        run = rlhf if words[0] == "rlhf" else programs.runner("train.py", chain.main, monkeypatch, capsys)
        code, _, err = run(*words[1 if words[0] == "rlhf" else 2 :])
        assert code == 0, err
    assert {name: repository["private"] for name, repository in hub.repositories.items()} == {
        "me/model-0": True, "me/model-1": False, "me/model-2": True,
    }  # fmt: skip

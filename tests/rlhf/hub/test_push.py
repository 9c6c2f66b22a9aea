"""Uploads against a stand-in of the hub's API, and what is refused before training."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from huggingface_hub import constants

from rlhf.chain import command as chain
from rlhf.cli import main as cli_main
from rlhf.storage import manifests
from tests.support import programs
from tests.support.programs import Run

TOKEN = "a-token-of-the-test"
ID = "me/my-policy"


class Hub(ThreadingHTTPServer):
    """Repositories by id: whether it is private, and its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub
    OWNERS: ClassVar = {"me"}

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer(401, {"error": "Invalid credentials"})
        return False

    def do_HEAD(self) -> None:
        self.answer(200, {})

    def do_GET(self) -> None:
        if self.allowed():
            self.answer(200, {"name": "me", "type": "user"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/validate-yaml":
            header = json.loads(body)["content"].split("---")[1]
            return self.answer(200, {"errors": [], "warnings": [], "keys": [*yaml.safe_load(header)]})
        if not self.allowed():
            return None
        self.server.writes.append(self.path)
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name'].rpartition('/')[2]}"
            if name.partition("/")[0] not in self.OWNERS:
                return self.answer(403, {"error": "You have no rights there"})
            private = wanted.get("private") or wanted.get("visibility") == "private"
            status = 409 if name in self.server.repositories else 200
            self.server.repositories.setdefault(name, {"private": bool(private), "files": {}})
            return self.answer(status, {"url": f"{constants.ENDPOINT}/{name}"})
        name = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for f in json.loads(body)["files"]]  # fmt: skip
            return self.answer(200, {"files": files})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {line["value"]["path"]: base64.b64decode(line["value"]["content"])
                 for line in lines if line["key"] == "file"}  # fmt: skip
        self.server.repositories[name]["files"] |= files
        url = f"{constants.ENDPOINT}/{name}/commit/{'b' * 40}"
        return self.answer(200, {"success": True, "commitOid": "b" * 40, "commitUrl": url})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return programs.runner("rlhf", cli_main, monkeypatch, capsys)


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A finished stage with a model of two small files and its card."""
    model = tmp_path / "run/step1_sft/model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Model")
    (model.parent / "config.yaml").write_text("seed: 0\n")
    (model.parent / "metrics.jsonl").write_text("")
    content = {"stage": "step1_sft", "inputs": {}, "config": {}, "metrics": {}, "models": ["model"]}
    digests = manifests.file_digests(model.parent, ["model"])
    assert "model/README.md" not in digests and len(digests) == 2
    manifests.write_manifest(model.parent / "manifest.json", content | {"files": digests})
    return model.parent


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
    repository = {"other owner": "them/x", "no owner": "x", "not an id": "a/b/c"}.get(case, ID)
    run = programs.runner("train", chain.main, monkeypatch, capsys)
    words = ["--steps", "1", "--data-path", "demo,rows=400", "--output-dir", str(tmp_path / "out")]
    code, _, err = run(*words, "--push-to-hub", repository)
    assert code == 2 and err.startswith(f"error: push to {repository}: ") and REFUSALS[case] in err
    assert err.count("\n") == 1 and not hub.repositories


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


def test_there_is_no_export(rlhf: Run) -> None:
    code, _, err = rlhf("export", "x", "--gguf")
    assert code == 2 and "adapters merged; llama.cpp's convert_hf_to_gguf.py makes a GGUF file of it" in err

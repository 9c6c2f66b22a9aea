"""A stand-in of the hub's API on loopback: who somebody is, new repositories, rights, and commits of whole files."""

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from huggingface_hub import constants

from rlhf.storage import manifests

TOKEN = "a-token-of-the-test"


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
        if not self.allowed():
            return
        if self.path == "/api/whoami-v2":
            return self.answer(200, {"name": "me", "type": "user"})
        name = "/".join(self.path.split("/")[3:5])
        if self.path.endswith("/auth-check/write") and name.partition("/")[0] not in self.OWNERS:
            return self.answer(403, {"error": "You have no rights there"})
        self.answer(200, {"id": name, "private": self.server.repositories.get(name, {}).get("private", False)})

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


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in in place of the hub, and its token in the environment."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


def stage(directory: Path, folder: str = "model") -> Path:
    """A finished stage with a model of two small files and its card."""
    model = directory / folder
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Model")
    (directory / "config.yaml").write_text("seed: 0\n")
    (directory / "metrics.jsonl").write_text("")
    content = {"stage": directory.name, "inputs": {}, "config": {}, "metrics": {}, "models": [folder]}
    digests = manifests.file_digests(directory, [folder])
    assert f"{folder}/README.md" not in digests and len(digests) == 2
    manifests.write_manifest(directory / "manifest.json", content | {"files": digests})
    return directory

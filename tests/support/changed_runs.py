"""A finished step 1 with something in it that was changed, and with digests that do not show it."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlhf.storage import manifests


def change_a_weight(stage: Path) -> None:
    file = stage / "model/model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][5] += 0.5
    save_file(weights, file, {"format": "pt"})


def change_a_number(stage: Path) -> None:
    manifest = json.loads((stage / "manifest.json").read_text())
    manifest["metrics"]["eval_perplexity"] *= 1.0001
    (stage / "manifest.json").write_text(json.dumps(manifest))


def swap_two_tokens(stage: Path) -> None:
    file = stage / "model/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["kind"], words["the"] = words["the"], words["kind"]
    file.write_text(json.dumps(tokenizer))


CHANGES = (change_a_weight, change_a_number, swap_two_tokens)


def reseal(stage: Path) -> None:
    """Write the manifest again, with the digests of the files as they are now."""
    manifest = json.loads((stage / "manifest.json").read_text())
    del manifest["sha256"]
    manifests.write_manifest(stage / "manifest.json", {**manifest, "files": manifests.file_digests(stage, ["model"])})

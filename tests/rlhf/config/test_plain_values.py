"""Files of other people: as deep as they like, and with aliases of aliases."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from data.sources.llama_factory import read_entry
from rlhf.config import deepspeed_json, plain_values, yaml_files
from rlhf.errors import UserError
from rlhf.hub import untrusted
from rlhf.report import records
from rlhf.storage import disk, manifests
from rlhf.text.messages import read_json

DEPTHS = (101, 900, 100_000)
"""beyond the limit; what Python's parsers still read; beyond any stack"""
BOMB = "a: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
"""9 ** 12 values in 12 lines"""


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


def test_what_people_write_is_read() -> None:
    assert plain_values.from_json(nested(99)) == json.loads(nested(99))
    aliases = "common: &common {a: 1}\nfirst: {<<: *common, b: 2}\nsecond: *common\n"
    assert plain_values.from_yaml(aliases) == yaml.safe_load(aliases)


@pytest.mark.parametrize("depth", DEPTHS)
def test_depth_is_an_error_of_the_value(depth: int) -> None:
    for text in (nested(depth), "[" * depth + "]" * depth):
        with pytest.raises(ValueError, match="nested in more than 100 levels"):
            plain_values.from_json(text)
        with pytest.raises(ValueError, match="nested in more than 100 levels"):
            plain_values.from_yaml(text)


def test_aliases_are_counted_as_if_written_out() -> None:
    with pytest.raises(ValueError, match="stands for more than 1,000,000 values"):
        plain_values.from_yaml(BOMB)
    with pytest.raises(ValueError, match="nested in more than 100 levels"):
        plain_values.from_yaml("&a [*a]")


def refused(read: Callable[[Path], object]) -> Callable[[Path], object]:
    def call(path: Path) -> object:
        with pytest.raises((UserError, ValueError), match=r"nested|damaged|stands for|expected JSON") as caught:
            read(path)
        assert "\n" not in str(caught.value)
        return None

    return call


READERS: dict[str, Callable[[Path], object]] = {
    "a manifest": lambda path: manifests.parse(path)[0] or None,
    "a report's options": lambda path: records._yaml(path) or None,
    "a report's account of rows": records._json,
    "--config": refused(yaml_files.read_yaml),
    "--deepspeed-config": refused(deepspeed_json.read),
    "dataset_info.json": refused(lambda path: read_entry(f"{path}:x")),
    "a model's config": refused(lambda path: untrusted.read_mappings("model", path.parent, [path.name])),
    "a file of a run": refused(disk.read_json),
    "a column": refused(lambda path: read_json(path.read_text(), "row 1")),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_it_in_one_line(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for depth in DEPTHS:
        path.write_text(nested(depth))
        assert READERS[reader](path) is None
    if reader in ("a report's options", "--config"):
        path.write_text(BOMB)
        assert READERS[reader](path) is None


def test_a_pipe_among_the_files_of_a_model_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: got a pipe or a device"):
        untrusted.refuse_model(str(tmp_path))

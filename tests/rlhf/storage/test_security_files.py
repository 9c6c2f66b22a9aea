"""A damaged cache and saved data sets that point elsewhere are one line that names the file and the cure."""

import json
import shutil
from pathlib import Path

import datasets
import pytest

from data.read.paths import is_hub_id
from rlhf.errors import UserError
from tests.data.test_security_data import WRITERS, opened, ran, rows, saved

__all__ = ("ran", "saved")  # fixtures


@pytest.mark.parametrize("kind", [*WRITERS, "nothing"])
@pytest.mark.parametrize("name", ["items.arrow", "train.npy", "evaluation.npy", "report.json"])
def test_a_damaged_cache_names_the_file_and_the_cure(name: str, kind: str, ran: Path) -> None:
    Path("x.jsonl").write_text("".join(f'{{"prompt": "w{i}", "response": "w{i} w5"}}\n' for i in range(4, 60)))
    before = opened()
    [folder] = [path for path in Path("cache").iterdir() if path.is_dir()]
    assert folder.parent.stat().st_mode & 0o077 == 0
    (folder / name).write_bytes(b"") if kind == "nothing" else WRITERS[kind](folder / name, ran)
    with pytest.raises(UserError, match=f"{name}: damaged .*remove the directory {folder}"):
        opened()
    shutil.rmtree(folder)
    assert opened() == before


@pytest.mark.parametrize("name", ["../outside.arrow", "ABSOLUTE", ".."])
def test_a_saved_data_set_has_its_files_beside_it(name: str, saved: Path, ran: Path) -> None:
    outside = saved.resolve().parent / "outside.arrow"
    shutil.copy(saved / "data-00000-of-00001.arrow", outside)
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = [{"filename": name.replace("ABSOLUTE", str(outside))}]
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"state\.json: names .*expected files in the same directory"):
        rows("saved")


@pytest.mark.parametrize("content", ["[]", "{}", '{"_data_files": 3}', '{"_data_files": []}'])
def test_a_saved_data_set_that_is_damaged_is_one_line(content: str, saved: Path) -> None:
    (saved / "state.json").write_text(content)
    with pytest.raises(UserError, match="saved: cannot be read"):
        rows("saved")


def test_splits_are_saved_data_sets_too(ran: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk("both")
    assert rows("both") == [{"prompt": "train"}]


@pytest.mark.parametrize("name", ["a/..", "../a", "a/b@..", "a/b@../../c", "a/b@refs/../../x"])
def test_a_name_on_the_hub_leads_nowhere_else(name: str) -> None:
    assert not is_hub_id(name) and is_hub_id("a/b@refs/convert/parquet") and is_hub_id("a.b/c..d")

"""Which source a location means."""

from pathlib import Path

import pytest

from data.config import DataOptions
from data.prepare.mixture import open_origin, origins, parse_data_path
from rlhf.errors import UserError
from rlhf.types import Row


@pytest.mark.parametrize(
    ("data_path", "spec", "path"),
    [
        ("demo", "demo", ""),
        ("demo,rows=10,seed=3", "demo,rows=10,seed=3", ""),
        ("hh_rlhf:../x/harmless-base.jsonl.gz", "hh_rlhf", "../x/harmless-base.jsonl.gz"),
        ("hh_rlhf,split=test:Anthropic/hh-rlhf", "hh_rlhf,split=test", "Anthropic/hh-rlhf"),
        ("rt_polarity:DIR", "rt_polarity", "DIR"),
        ("my_dataset.py", "my_dataset.py", ""),
        ("sub/my_dataset.py:DIR", "sub/my_dataset.py", "DIR"),
        ("sub/my_dataset.py,n=1", "sub/my_dataset.py,n=1", ""),
        ("rows.jsonl", "files", "rows.jsonl"),
        ("a/b/rows.csv.gz", "files", "a/b/rows.csv.gz"),
        ("files,split=test:owner/name", "files,split=test", "owner/name"),
        ("owner/name", "files", "owner/name"),
        ("./demo", "files", "./demo"),
        ("typo", "typo", ""),
    ],
)
def test_data_paths(data_path: str, spec: str, path: str) -> None:
    assert parse_data_path(data_path) == (spec, path, None)
    assert parse_data_path(data_path + "=0.25") == (spec, path, 0.25)


def test_what_is_there_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mydata").mkdir()
    (tmp_path / "a:b.jsonl").touch()
    (tmp_path / "demo").mkdir()
    (tmp_path / "lr=1").touch()
    (tmp_path / "own.py").touch()
    assert parse_data_path("mydata") == ("files", "mydata", None)
    assert parse_data_path("a:b.jsonl") == ("files", "a:b.jsonl", None)
    assert parse_data_path("lr=1") == ("files", "lr=1", None)
    assert parse_data_path("lr=1=3") == ("files", "lr=1", 3.0)
    assert parse_data_path("demo") == ("demo", "", None)
    assert parse_data_path("own.py") == ("own.py", "", None)


def test_a_loading_script_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("squad.py").write_text("import datasets\nraise SystemExit\nclass S(datasets.GeneratorBasedBuilder): ...\n")
    with pytest.raises(UserError, match=r"^squad.py: got a loading script of `datasets`, which is code and no longer"):
        open_origin("squad.py,rows=3:train")


def test_a_plug_in_of_ones_own_among_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlhf.config import Config\nfrom rlhf.types import Message, Row\n"
        "class Mine:\n"
        "    def __init__(self, place): self.place = place\n"
        "    def rows(self, phase): yield Row((Message('user', phase + self.place),), 'r')\n"
        "def build(config, path): return Mine(path)\n"
    )
    options = DataOptions(data_path=("demo,rows=2", f"{tmp_path}/mine.py:here"), ppo_only_data_path=("demo",))
    demo, mine = origins(options, "sft")
    assert len(list(demo.rows("sft"))) == 2
    [row] = mine.rows("sft")
    assert isinstance(row, Row)
    assert row.prompt[0].content == "sfthere"
    assert len(origins(options, "ppo")) == 3


def test_a_path_of_weight_0_is_left_out() -> None:
    options = DataOptions(data_path=("demo=0", "demo,seed=1=2"))
    assert [origin.data_path for origin in origins(options, "sft")] == ["demo,seed=1=2"]

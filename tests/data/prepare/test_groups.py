"""The group of each row: which column names it, that both stages keep it, and that it changes nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.config import DataOptions
from data.dataset import PhaseData, Recipe, open_datasets, require_rows
from data.prepare.split import PHASES
from data.read.columns import subset_of
from rlhf.errors import UserError
from rlhf.text.tokenizer import prepare_tokenizer
from tests.support import tiny


def opened(tmp_path: Path, phase: Any, columns: dict[str, Any], path: str = "{}", **options: Any) -> PhaseData[Any]:
    """60 pairs to 12 prompts; `columns` are those of every second row, with {} for its number modulo 3."""
    file = tmp_path / "pairs.jsonl"
    rows: list[dict[str, Any]] = []
    for i in range(60):
        more = {name: str(value).format(i % 3) for name, value in columns.items()} if i % 2 else {}
        row = {"prompt": f"w{i % 12} w1", "chosen": f"w{i} w2", "rejected": f"w3 w{i}"}
        rows.append(row | {"note": "x"} | more)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = tuple(float(name == phase) for name in PHASES)
    data = DataOptions(
        data_path=(path.format(file),), data_split=shares, eval_fraction=0.4, data_cache=str(tmp_path / "c"), **options
    )
    result = open_datasets(data, Recipe(phase), prepare_tokenizer(tiny.tokenizer(), "plain"))
    require_rows(result, data, 1)
    return result


def test_the_column_of_a_group() -> None:
    columns = {"group": "a", "subset": "b", "voter": 7, "list": ["c"], "empty": ""}
    names = {None: "a", "voter": "7", "subset": "b", "list": "", "empty": "", "other": ""}
    assert {name: subset_of(columns, name) for name in names} == names
    assert subset_of({"subset": "b"}) == "b" and subset_of({"list": "c"}) == ""


@pytest.mark.parametrize("phase", ["reward", "ppo"])
def test_the_held_out_rows_have_their_groups_and_their_order(tmp_path: Path, phase: Any) -> None:
    """The column of the option, the default one, and that of a path name the same rows. And the rows of one prompt,
    of which training takes some first, have the order that they have without groups."""
    plain = opened(tmp_path, phase, {})
    assert plain.train.subsets == plain.evaluation.subsets == ()
    for columns, options in (({"group": "g{}"}, {}), ({"voter": "g{}"}, {"group_column": "voter"})):
        data = opened(tmp_path, phase, columns, **options)
        for split, other in ((data.train, plain.train), (data.evaluation, plain.evaluation)):
            assert len(split) == len(other) > 3
            if phase == "ppo":  # which of the rows with one prompt is taken depends on all columns
                assert [item.ids for item in split] == [item.ids for item in other]
                assert split.subsets == tuple(item.row.columns.get(next(iter(columns)), "") for item in split)
                continue
            assert [item.chosen for item in split] == [item.chosen for item in other]
            numbers = [int(tiny.tokenizer().decode([item.chosen[item.prompt_length]])[1:]) for item in split]
            assert split.subsets == tuple(f"g{i % 3}" if i % 2 else "" for i in numbers)
    whole = opened(tmp_path, phase, {}, "files,group=all:{}")
    assert {*whole.evaluation.subsets} == {"all"} and np.array_equal(whole.evaluation.lengths, plain.evaluation.lengths)


def test_a_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--group-column votr: no held-out row has this column"):
        opened(tmp_path, "reward", {"voter": "g{}"}, group_column="votr")
    opened(tmp_path, "sft", {"voter": "g{}"}, group_column="votr")

"""What is counted, named and written of numbers that are not finite, on one rank."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.engine.nonfinite import NonFiniteError, Tolerance, save_batch
from tests.support import tiny


def test_what_is_left_out_is_counted_and_the_last_in_a_row_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    tolerance, names = Tolerance(3), ["loss is nan", "loss is nan", "kl is inf"]
    tolerance.skip("step 1", names, [7, 2, 7], None)
    tolerance.skip("step 2", names[:1], range(9), None)
    tolerance.reset()
    tolerance.skip("step 4", names[:1], range(8), None)
    tolerance.skip("step 5", names[:1], [], None)
    assert [line.removeprefix("warning, ") for line in capsys.readouterr().out.splitlines()] == [
        f"{what}; skipped, nothing was learned from it ({count} of 3 in a row)"
        for what, count in (
            ("step 1: loss is nan, kl is inf (training rows 2, 7)", 1),
            ("step 2: loss is nan (training rows 0, 1, 2, 3, 4, 5, 6, 7 and 1 more)", 2),
            ("step 4: loss is nan (training rows 0, 1, 2, 3, 4, 5, 6, 7)", 1),
            ("step 5: loss is nan", 2),
        )
    ]
    with pytest.raises(NonFiniteError, match=r"^step 6: loss is nan \(training rows 5\), 3 times in a row; ") as end:
        tolerance.skip("step 6", names[:1], [5], "the batch")
    assert end.value.batch == "the batch" and end.value.rows == (5,)
    with pytest.raises(NonFiniteError, match=r"^step 1: loss is nan; expected"):
        Tolerance(1).skip("step 1", names[:1], [], None)
    assert NonFiniteError("without a batch").rows == ()


def test_a_batch_is_written_by_the_paths_of_its_tensors_with_its_texts(tmp_path: Path) -> None:
    rows = tiny.sequences([3, 2], prompts=[1, 1])
    number = torch.ones((), requires_grad=True)
    error = NonFiniteError("it went wrong", [(rows, number), rows[1:]], rows=[4, 9])
    folder = tmp_path / "step1_sft" / "bad_batch"
    for tokenizer in (None, tiny.tokenizer()):
        save_batch(folder, error, tokenizer)
        texts = [] if tokenizer is None else [tokenizer.decode(rows.ids[i][rows.mask[i]]) for i in (0, 1, 1)]
        written = json.loads((folder / "rank-0.json").read_text(encoding="utf-8"))
        assert written == {"message": "it went wrong", "rows": [4, 9], "texts": texts}
    tensors = load_file(folder / "rank-0.safetensors")
    names = ("ids", "mask", "loss_mask")
    assert set(tensors) == {"0.1", *(f"{path}.{name}" for path in ("0.0", "1") for name in names)}
    for name in names:
        assert torch.equal(tensors[f"0.0.{name}"], getattr(rows, name))
        assert torch.equal(tensors[f"1.{name}"], getattr(rows, name)[1:])

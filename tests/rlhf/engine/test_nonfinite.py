"""What is counted and named of numbers that are not finite, on one rank."""

import pytest

from rlhf.engine.nonfinite import NonFiniteError, Tolerance


def test_what_is_left_out_is_counted_and_the_last_in_a_row_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    tolerance, names = Tolerance(3), ["loss is nan", "loss is nan", "kl is inf"]
    tolerance.skip("step 1", names, [7, 2, 7])
    tolerance.skip("step 2", names[:1], range(9))
    tolerance.reset()
    tolerance.skip("step 4", names[:1], range(8))
    tolerance.skip("step 5", names[:1], [])
    assert [line.removeprefix("warning, ") for line in capsys.readouterr().out.splitlines()] == [
        f"{what}; skipped, nothing was learned from it ({count} of 3 in a row)"
        for what, count in (
            ("step 1: loss is nan, kl is inf (training rows 2, 7)", 1),
            ("step 2: loss is nan (training rows 0, 1, 2, 3, 4, 5, 6, 7 and 1 more)", 2),
            ("step 4: loss is nan (training rows 0, 1, 2, 3, 4, 5, 6, 7)", 1),
            ("step 5: loss is nan", 2),
        )
    ]
    with pytest.raises(NonFiniteError, match=r"^step 6: loss is nan \(training rows 5\), 3 times in a row; "):
        tolerance.skip("step 6", names[:1], [5])
    with pytest.raises(NonFiniteError, match=r"^step 1: loss is nan; expected"):
        Tolerance(1).skip("step 1", names[:1], [])

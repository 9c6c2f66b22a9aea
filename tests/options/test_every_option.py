"""Every option that can change a number changes it as its formula says (on two ranks: test_on_two_ranks.py).

Each run is a stage from its Config to its end, beside float64 (reference.py and its neighbours) that reads the same
options. A number that is predicted is asserted to TOLERANCE; predicted with an option ignored or doubled, some number
must be FAR off. A new option without a case fails here.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.errors import UserError
from tests.options import cases, harness
from tests.options.cases import ALGORITHMS, Bundle, Case
from tests.options.comparison import Comparison
from tests.options.harness import Observed
from tests.options.prediction import config_of, require_predicted, require_run, wrong_values

OF_CASE = {str(case): bundle for bundle in cases.bundles() for case in bundle.cases}
FAR = 5.0
"""tolerances by which some number is off that is predicted with a wrong value"""

TEXT_AND_PLACES = {
    "model", "data_path", "sft_only_data_path", "reward_only_data_path", "ppo_only_data_path", "eval_data_path",
    "chat_template", "chat_template_kwargs", "algorithm", "add_tokens", "extend_tokenizer",
}  # fmt: skip
"""which rows and which model; every algorithm has its own table"""
OF_THE_ROWS = {"data_seed", "data_split", "eval_fraction", "max_length", "max_prompt_length"}
"""every run has values of its own for them, and trains on the rows that they choose"""
TESTED_ELSEWHERE = {"truncate", "max_dropped", "skip_bad_rows", "max_bad_steps", "dropout", "resample_groups"}
"""tests/data/prepare/, test_thresholds.py, tests/rlhf/models/test_dropout.py, tests/step3_ppo/test_resampling.py"""
HELD = {"dtype", "adapter", "quantize", "rollout_backend", "share_trunk", "optim"}
"""how numbers and models are held, and plug-ins: tests/rlhf/engine, tests/contracts"""
REPORTED = {"export_rollouts", "multiple_choice"}
SPEED_ALONE = {"micro_batch_size", "rollout_batch_size", "rescore"}
"""options that change no number in fp32: their runs are as predicted of any value"""
SEEDS_OF_ORDER = {("step1_sft", "seed")}
"""another seed is another order of the rows, which is taken from the run: test_another_seed_is_another_order"""


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[[Bundle], Observed]:
    """`run(bundle)` in this process: once, and as predicted."""
    results: dict[str, Observed] = {}

    def once(bundle: Bundle) -> Observed:
        if str(bundle) not in results:
            observed = harness.run(bundle.stage, config_of(folder, bundle))
            require_run(folder, bundle, observed)
            results[str(bundle)] = observed
        return results[str(bundle)]

    return once


def fields(name: str) -> set[str]:
    return set(cases.config_class("step3_ppo" if name in ALGORITHMS else name, name).model_fields)


def test_every_option_has_a_case() -> None:
    """Of options that every algorithm has, or that a room below the algorithms reads, one is asked."""
    classes = (cases.config_class(name if name not in ALGORITHMS else "step3_ppo", name) for name in cases.TABLES)
    free = frozenset().union(*(options.declared("FREE") for options in classes))
    exempt = free - {"max_bad_steps", *SPEED_ALONE}
    exempt = exempt | TEXT_AND_PLACES | OF_THE_ROWS | TESTED_ELSEWHERE | HELD | REPORTED
    of_all = set.intersection(*map(fields, ALGORITHMS))
    for name, table in cases.TABLES.items():
        read_below = (of_all | set(cases.STEERED) if name in ALGORITHMS[1:] else set()) | (
            set(cases.SCHEDULES) if name != "step1_sft" else set()
        )
        required = fields(name) - exempt - read_below
        assert required <= set(table), f"{name}: no case for {', '.join(sorted(required - set(table)))}"
        assert set(table) <= fields(name), f"{name}: no options {', '.join(sorted(set(table) - fields(name)))}"
    assert exempt <= set.union(*map(fields, cases.TABLES))


def test_a_number_that_is_off_names_the_run_and_the_cure(folder: Path) -> None:
    """The first loss of a run of eight options, and of a run of one."""
    shared, single = (next(b for b in cases.bundles() if len(b.cases) == size) for size in (cases.AT_ONCE, 1))
    for bundle in (shared, single):
        observed = harness.run(bundle.stage, config_of(folder, bundle))
        observed.metrics[0]["loss"] += 1.0
        with pytest.raises(AssertionError) as failed:
            require_run(folder, bundle, observed)
        message = str(failed.value)
        assert all(f"{case.option}={case.value}" in message for case in bundle.cases)
        assert "loss of step 1 is" in message and ("alone(VALUE)" in message) == (bundle is shared)


@pytest.mark.parametrize("case", cases.cases(), ids=str)
def test_an_option_changes_what_its_formula_says(case: Case, run: Callable[[Bundle], Observed], folder: Path) -> None:
    bundle = OF_CASE[str(case)]
    observed, config = run(bundle), config_of(folder, bundle)
    base = getattr(cases.config_of(folder, case.stage, case.algorithm), case.option)
    value = getattr(config, case.option)
    assert value != base
    assert type(value) not in (int, float) or value != type(config).model_fields[case.option].default
    if case.option in SPEED_ALONE or (case.stage, case.option) in SEEDS_OF_ORDER:
        return
    for wrong in wrong_values(base, value):
        with pytest.raises((AssertionError, UserError)):
            require_predicted(config, Comparison(observed, room=FAR), **{case.option: wrong})

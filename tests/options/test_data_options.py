"""Every option of the data: the rows that each stage opens are those of rows.py, and others by another value."""

from pathlib import Path
from typing import Any

import pytest

from data.build.encode import Demonstration, Preference, Prompt
from rlhf.errors import UserError
from step1_sft.stage import FINE_TUNING as sft
from step2_reward.stage import REWARD_MODELLING as reward
from step3_ppo import inputs as ppo
from tests.options import cases, rows
from tests.options.prediction import wrong_values

STAGES: dict[str, tuple[Any, str]] = {
    "step1_sft": (sft, "sft"),
    "step2_reward": (reward, "reward"),
    "step3_ppo": (ppo, "ppo"),
}
ALL = {"max_train_rows": None, "max_eval_rows": 50}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "data_seed": (6, {}),
    "data_split": ((3, 1, 1), {}),
    "eval_fraction": (0.45, {}),
    "max_train_rows": (5, {}),
    "max_eval_rows": (3, {}),
    "max_length": (18, {}),
    "max_prompt_length": (7, {}),
    "truncate": ("tokens", {"max_prompt_length": 7}),
}
stages = pytest.mark.parametrize("stage", STAGES)


def config_of(folder: Path, stage: str, **changes: Any) -> Any:
    options = ALL | {"max_dropped": 0.95} | changes
    return cases.config_of(folder, stage, "ppo" if stage == "step3_ppo" else "", **options)


def opened(stage: str, config: Any) -> tuple[list[Any], list[Any]]:
    module, phase = STAGES[stage]
    data = module.open_data(config, config.actor_model if phase == "ppo" else config.model)[1]
    return [plain(item) for item in data.train], [plain(item) for item in data.evaluation]


def plain(item: Any) -> tuple[Any, ...]:
    if isinstance(item, Preference):
        assert item.margin is not None
        ratings = tuple((name, (chosen, rejected)) for name, chosen, rejected in item.ratings)
        return item.chosen, item.rejected, item.prompt_length, round(item.margin, 5), ratings  # kept in fp32
    assert isinstance(item, Demonstration | Prompt)
    return (item.ids,)


def predicted(stage: str, o: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    phase = STAGES[stage][1]
    train, held_out = rows.divided(rows.read(Path(o["data_path"][0])), o, phase)
    return rows.items(rows.not_held_out(train, held_out, o, phase), o, phase), rows.items(held_out, o, phase)


@stages
@pytest.mark.parametrize("option", CASES)
def test_an_option_of_the_data(stage: str, option: str, folder: Path) -> None:
    value, context = CASES[option]
    config = config_of(folder, stage, **context, **{option: value})
    items = opened(stage, config)
    assert items == predicted(stage, config.model_dump()) and min(map(len, items)) > 1
    base = getattr(config_of(folder, stage), option)
    for wrong in wrong_values(base, value):
        other = predicted(stage, config.model_dump() | {option: wrong})
        assert (other == items) == (stage == "step3_ppo" and option == "max_length")


@stages
def test_max_dropped(stage: str, folder: Path) -> None:
    """The rows that are too long are dropped and counted; as many as the option says may be."""
    short = {"max_prompt_length": 7}
    options, phase = config_of(folder, stage, **short).model_dump(), STAGES[stage][1]
    train, _ = rows.divided(rows.read(folder / "pairs.jsonl"), options, phase)
    share = 1 - len(rows.items(train, options, phase)) / len(train)
    assert 0.1 < share < 0.5
    opened(stage, config_of(folder, stage, **short, max_dropped=share + 1e-9))
    with pytest.raises(UserError, match="--max-dropped"):
        opened(stage, config_of(folder, stage, **short, max_dropped=share - 1e-9))


@stages
def test_skip_bad_rows(stage: str, folder: Path) -> None:
    whole = (folder / "pairs.jsonl").read_text(encoding="utf-8")
    broken = folder / "broken.jsonl"
    broken.write_text(whole + '{"prompt": 5, "chosen": "w1", "rejected": "w2"}\n{"prompt": 5}\n[3]\n')
    paths = (str(broken),)
    assert opened(stage, config_of(folder, stage, data_path=paths, skip_bad_rows=3)) == opened(
        stage, config_of(folder, stage)
    )
    with pytest.raises(UserError, match="3 "):
        opened(stage, config_of(folder, stage, data_path=paths, skip_bad_rows=2))


def test_max_length_of_step_3(folder: Path) -> None:
    """It must hold the longest prompt and the longest response: 16 and 6 tokens."""
    ppo.check(config_of(folder, "step3_ppo", max_length=22))
    with pytest.raises(UserError, match="got 22 tokens, expected at most --max-length 21"):
        ppo.check(config_of(folder, "step3_ppo", max_length=21))

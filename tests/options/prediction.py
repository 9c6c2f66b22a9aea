"""What the options of a run predict of it, stage by stage."""

from pathlib import Path
from typing import Any

from step1_sft.stage import FINE_TUNING as sft
from step3_ppo import inputs, ptx
from tests.options import cases, rows
from tests.options.cases import Bundle
from tests.options.comparison import Comparison
from tests.options.harness import Ids, Observed
from tests.options.reference_rl import Reinforcement
from tests.options.reference_supervised import fine_tuning, reward_model


def config_of(folder: Path, bundle: Bundle) -> Any:
    return cases.config_of(folder, bundle.stage, bundle.algorithm, **bundle.changes)


def require_run(folder: Path, bundle: Bundle, observed: Observed) -> None:
    """The run of a bundle is as predicted. Raises: AssertionError that names every option of the run."""
    try:
        require_predicted(config_of(folder, bundle), Comparison(observed))
    except AssertionError as error:
        raise AssertionError(f"run of {bundle}: {error}{bundle.cure}") from error


def require_predicted(config: Any, run: Comparison, **wrong: Any) -> None:
    """Every number of the run is the one that the options of its config predict, some of them replaced by `wrong`."""
    o = config.model_dump() | wrong
    phase = "ppo" if "actor_model" in o else "reward" if "head_learning_rate" in o else "sft"
    if o.get("objective") == "text":
        return fine_tuning(o, run, *packed(config, o["max_length"]))
    if phase == "ppo":
        return reinforcement(config, run, **wrong).run()
    train, held_out = sides(o, phase)
    if phase == "reward":
        return reward_model(o, run, train, held_out)
    return fine_tuning(o, run, *([ids for (ids,) in side] for side in (train, held_out)))


def reinforcement(config: Any, run: Comparison, **wrong: Any) -> Reinforcement:
    """What is predicted of a run of step 3, to be run."""
    o = config.model_dump() | wrong
    prompts, held_out = ([ids for (ids,) in side] for side in sides(o, "ppo"))
    pairs = sides(o, "reward") if o["critic_pretraining_epochs"] else ([], [])
    return Reinforcement(o, run, prompts, held_out, ptx_rows(config, o) if o["ptx_coef"] else [], pairs[0])


def sides(o: dict[str, Any], phase: str) -> list[list[Any]]:
    """What a phase trains on, and what is held out."""
    divided = rows.divided(rows.read(Path(o["data_path"][0])), o, phase)
    return [rows.items(side, o, phase) for side in divided]


def packed(config: Any, length: int) -> list[list[Ids]]:
    """Contexts of plain text, all of one length: training and held out."""
    data = sft.open_data(config, config.model)[1]
    sides = [[item.ids for item in side] for side in (data.train, data.evaluation)]
    assert all(max(map(len, side)) == length for side in sides)
    return sides


def ptx_rows(config: Any, o: dict[str, Any]) -> list[Ids]:
    """What the actor is fine-tuned on beside its rewards: fine-tuning's share of the rows, or a file of its own."""
    tokenizer, _ = inputs.open_data(config, config.actor_model)
    dataset = ptx.open_ptx(config, tokenizer)
    assert dataset is not None
    texts = [item.ids for item in dataset]
    if o["ptx_objective"] == "text":
        assert max(map(len, texts)) == o["max_length"]
        return texts
    if not o["ptx_data_path"]:
        train, _ = rows.divided(rows.read(Path(o["data_path"][0])), o, "sft")
        assert texts == [ids for (ids,) in rows.items(train, o, "sft")]
    else:
        assert set(texts) <= {(*row.prompt(), *row.chosen) for row in rows.read(Path(o["ptx_data_path"][0]))}
    return texts


def wrong_values(base: Any, value: Any) -> list[Any]:
    """What the option would be if it were ignored or doubled."""
    if isinstance(value, str) and "=" in value:  # a plug-in: each of its options may be ignored, too
        name, *options = value.split(",")
        return [base, *(",".join([name, *(other for other in options if other != each)]) for each in options)]
    doubled = isinstance(value, int | float) and not isinstance(value, bool) and 2 * value not in (base, value)
    return [base, 2 * value] if doubled else [base]

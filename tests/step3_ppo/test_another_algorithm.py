"""A file that is for one algorithm serves another: what only the first one accepts is left out, and said."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.chain import command as train
from rlhf.config import parse, read_yaml
from rlhf.errors import UserError
from rlhf.shipped import CONFIGS
from step3_ppo import algorithm_options, algorithms
from step3_ppo.config import Step3Config

STORIES = CONFIGS / "recipes" / "stories260k-sentiment-cpu.yaml"
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))
NAMES = sorted(path.stem for path in Path(algorithms.__file__).parent.glob("[!_]*.py"))


def chain(*words: str) -> Any:
    argv = list(words)
    return train.read(argv)


@pytest.mark.parametrize(
    ("algorithm", "left_out", "own"),
    [
        ("best_of_n", {"kl_coef": 0.05}, {"num_generations": 4, "num_ppo_epochs": 2}),
        ("a2c", {"num_ppo_epochs": 2}, {"num_ppo_epochs": 1, "kl_coef": 0.05}),
        ("rloo", {}, {"num_ppo_epochs": 2, "kl_coef": 0.05}),
    ],
)
def test_only_what_the_algorithm_refuses_is_left_out(
    algorithm: str, left_out: dict[str, Any], own: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = chain("--config", str(STORIES), "--ppo.algorithm", algorithm).ppo
    assert type(options) is algorithm_options.options(algorithm)
    tuned = {name: value for name, value in read_yaml(STORIES)["ppo"].items() if name not in {*left_out, *own}}
    assert {name: getattr(options, name) for name in (*tuned, *own)} == tuned | own
    warnings = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert [line.partition("refuses it: ")[2] for line in warnings] == [
        f"{name} {value}" for name, value in left_out.items()
    ]
    assert all(str(STORIES) in line for line in warnings)


PAIRS = sorted({*((path, NAMES[i % len(NAMES)]) for i, path in enumerate(RECIPES)), *((STORIES, n) for n in NAMES)})
"""every recipe with some algorithm, and every algorithm with the recipe of most options"""


@pytest.mark.parametrize(("recipe", "algorithm"), PAIRS, ids=lambda value: getattr(value, "stem", value))
def test_a_recipe_serves_another_algorithm(recipe: Path, algorithm: str) -> None:
    words = ("--actor-model", "gpt2", "--reward-model", "gpt2", "--data-path", "pairs.jsonl")
    assert chain("--config", str(recipe), "--ppo.algorithm", algorithm, *words).ppo.algorithm == algorithm


def test_a_later_file_chooses_too(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text("ppo: {algorithm: best_of_n, num_generations: 8}")
    options = chain("--config", str(STORIES), str(tmp_path / "best.yaml")).ppo
    assert (options.num_generations, options.batch_size) == (8, 64)


def test_step_3_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("{kl_coef: 0.1, batch_size: 64}")
    argv = ["--config", str(tmp_path / "mine.yaml"), "--algorithm", "best_of_n"]
    cls: type[Step3Config] = algorithm_options.options("best_of_n")
    assert parse(cls, argv, "step3_ppo", "").batch_size == 64


@pytest.mark.parametrize(
    "section",
    ["{kl_coeff: 0.1}", "{batch_size: -1}", "{algorithm: best_of_n, kl_coef: 0.1}", "{algorithm: rlo, kl_coef: 0.1}"],
)
def test_a_mistake_stays_one(section: str, tmp_path: Path) -> None:
    """An option of no algorithm, a value that none accepts, and one of a file that names the chosen algorithm."""
    (tmp_path / "mine.yaml").write_text(f"ppo: {section}")
    with pytest.raises(UserError):
        chain("--config", str(tmp_path / "mine.yaml"), "--ppo.algorithm", "best_of_n")

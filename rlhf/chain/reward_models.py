"""`--reward-models NAME=PATH ...`: several reward models in one chain, each trained on its own pairs.

Llama 2 (arXiv 2307.09288, section 3.2.2) trains one for helpfulness and one for safety, and combines their scores by a
rule (rlhf.rewards.Sources). Models of the same pairs are an ensemble (Coste et al. 2023, arXiv 2310.02743).
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import plugins
from rlhf.chain.options import ChainConfig, without_one_time_options
from rlhf.chain.stages import STAGES
from rlhf.config import parser
from rlhf.errors import UserError

if TYPE_CHECKING:
    from rlhf.rewards import Scoring

SAFE, OTHER = "safe", "helpful"
CHAIN, OPTIONS = "chain.yaml", "reward_models.yaml"
LOCK = ".reward-models"
"""the directory whose lock a call holds: those of its runs lock theirs"""
RunChain = Callable[[list[str]], ChainConfig | None]
"""runs the chain with a command line, and returns its options"""


def named_data(chain: ChainConfig) -> dict[str, str]:
    """The data of each reward model, by its name. Raises: UserError for a word that is not NAME=PATH."""
    named: dict[str, str] = {}
    for word in chain.reward_models:
        name, _, path = word.partition("=")
        if not name.isidentifier() or not path or name in named:
            raise UserError(f"--reward-models {word}: expected NAME=PATH, each name once, as in helpful=pairs.jsonl")
        named[name] = path
    if len(named) < 2:
        raise UserError(f"--reward-models: got {len(named)} model, expected two or more; --data-path trains one")
    for option in ("steps", "overwrite", "push_to_hub"):
        if getattr(chain, option):
            raise UserError(
                f"--{option.replace('_', '-')}: got it with --reward-models, expected none; use it without, on one "
                "directory"
            )
    return named


def sources(named: dict[str, str], models: Callable[[str], str]) -> list[str]:
    """The score sources of step 3: the safety model first, which decides where its score is low."""
    return [plugins.spec("learned", model=models(name)) for name in sorted(named, key=lambda name: name != SAFE)]


def combination(named: dict[str, str]) -> str | None:
    """How step 3 combines the models named so, unless an option says it; None: by its own default."""
    if set(named) == {SAFE, OTHER}:
        return "safety"
    return "uncertain" if len(set(named.values())) == 1 else None


def scoring_of(run: Path) -> "Scoring | None":
    """The score that step 3 of a finished run learned from, if all its sources are reward models with a path.

    Other sources are None: to open one can execute a user's file. Raises: UserError for a damaged manifest.
    """
    from rlhf.rewards import Scoring, split_weight  # imported here because it imports torch
    from rlhf.storage import manifests

    stage = run / STAGES[3].name
    if not (stage / manifests.MANIFEST).is_file():
        return None
    config = manifests.read_manifest(stage)["config"]
    specs = []
    for spec in config.get("reward", ()):
        name, options = plugins.parse_spec(split_weight(spec)[1])
        if name != "learned" or not options.get("model"):
            return None
        path = Path(options["model"])
        moved = run / path.parent.name / path.name  # with the whole run
        specs.append(spec if path.exists() or not moved.is_dir() else spec.replace(str(path), str(moved)))
    if not specs:
        return None
    combination = {name: config[name] for name in ("safety_threshold", "uncertainty_coef") if name in config}
    return Scoring(tuple(specs), config["reward_combine"], **combination)


def train(
    chain: ChainConfig, origins: parser.Origins, run: Callable[[list[str]], ChainConfig | None]
) -> ChainConfig | None:
    """Fine-tuning, one reward model after the other in OUT/reward-NAME, and step 3 with all of them.

    Returns: the options of step 3.
    All options are saved, for a later call that names the output directory only.
    Model k has the seed of step 2 plus k: another head and another order of the pairs, of which the same are held out.
    The critic starts from `helpful`, else from the first model that is not `safe`.
    """
    from rlhf.storage import disk, manifests  # imported here because it imports torch

    named, folder = named_data(chain), Path(chain.output_dir)
    manifests.require_writable(str(folder))
    models = {name: str(folder / f"reward-{name}" / STAGES[2].name) for name in named}
    others = [name for name in named if name != SAFE]
    critic = models[OTHER if OTHER in named else others[0]]
    words = ["--ppo.reward", *sources(named, models.__getitem__), "--ppo.reward-model", critic]
    combine = None if "ppo.reward_combine" in origins else combination(named)
    saved = without_one_time_options(chain)
    if combine is not None:
        words += ["--ppo.reward-combine", combine]
        saved = saved.model_copy(update={"ppo": saved.ppo.model_copy(update={"reward_combine": combine})})
    base = ["--config", str(folder / CHAIN)]
    with manifests.locked(folder / LOCK):
        disk.write_text(folder / OPTIONS, parser.to_yaml(saved))
        tree = chain.model_dump(mode="json", exclude={"reward_models"})
        disk.write_text(folder / CHAIN, parser.tree_to_yaml(tree))
        run([*base, "--steps", "1"])
        for number, (name, path) in enumerate(named.items()):
            own = ["--output-dir", str(folder / f"reward-{name}"), "--data-path", path]
            run([*base, "--steps", "2", *own, "--reward.seed", str(chain.reward.seed + number)])
        return run([*base, "--steps", "3", *words])

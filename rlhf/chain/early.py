"""Mistakes that are answered before torch is imported, which takes seconds, beside those of options: unknown plug-ins,
missing files. What is not plain is left to the checks that follow. Torch-free."""

import re
from pathlib import Path

from data.config import SUFFIXES
from rlhf import plugins
from rlhf.chain.options import SECTIONS, ChainConfig
from rlhf.chain.stages import STAGES
from rlhf.errors import UserError

FOLDERS = {
    ("reward", "objective"): "step2_reward.objectives",
    ("ppo", "reward"): "rlhf.rewards",
    ("ppo", "judge"): "rlhf.rewards",
}
"""where the plug-ins of an option of a section are"""
NO_NAME = re.compile(r".*(?:[:/]|\.py$).*")
"""a path, or a function of the user"""
LOCAL_FILE = re.compile(r"(?:files(?:,[^:]*)?:)?([^:*?\[]+?)(?:=[\d.]+)?")
LOCAL_MODEL = re.compile(r"(?:\.{1,2})?/.*(?<!\.yaml)(?<!\.yml)")


def refuse_plain_mistakes(chain: ChainConfig) -> None:
    """Raises: UserError for a plug-in, a data file or a model's directory that is not there."""
    for (section, option), folder in FOLDERS.items():
        _refuse_unknown_plugin(getattr(getattr(chain, section), option), folder)
    if not chain.plan and not any((Path(chain.output_dir) / stage.name).exists() for stage in STAGES.values()):
        _refuse_missing_files(chain)


def _refuse_unknown_plugin(value: str | tuple[str, ...] | None, folder: str) -> None:
    """value: plug-ins, each with a weight that may stand before it, or one plug-in"""
    specs = [plugins.split_weight(spec)[1] for spec in value] if isinstance(value, tuple) else [value or ""]
    for name in (plugins.parse_spec(spec)[0] for spec in specs):
        if name and not NO_NAME.fullmatch(name) and name not in plugins.names(folder):
            raise plugins.unknown(folder, name)


def _refuse_missing_files(chain: ChainConfig) -> None:
    """Raises: UserError for a data file or a model's directory of the first stage that is not there."""
    if not chain.steps and chain.ppo.actor_model is not None:  # then step 3 may be the only one
        return
    step = min(chain.steps or STAGES)
    options, stage = getattr(chain, SECTIONS[step]), "" if chain.ALONE else f"{STAGES[step].name}: "
    for path in (*options.data_path, *options.eval_data_path):
        file = LOCAL_FILE.fullmatch(path)
        if not file or Path(file[1].lower().removesuffix(".gz")).suffix not in SUFFIXES:
            continue
        if not Path(path).exists() and not Path(file[1]).expanduser().exists():
            raise UserError(f"{stage}{file[1]}: no such file or directory")
    model = getattr(options, "model", None) or getattr(options, "actor_model", None) or ""
    if LOCAL_MODEL.fullmatch(model) and not Path(model).exists():
        raise UserError(f"{stage}{model}: no such directory; expected a model directory, a hub id or a .yaml file")

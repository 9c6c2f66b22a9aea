"""Mistakes that are plain before torch is imported, which takes seconds: names and values of options, missing files.

Whatever is not plain is left to the checks that follow, which answer with the same words. Torch-free: the options of an
algorithm are read in its file, by name and kind.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, create_model

from data.config import FILE_TYPES, SUFFIXES
from rlhf.chain.options import SECTIONS, ChainConfig, combine, spread
from rlhf.chain.stages import STAGES
from rlhf.config import Tree, parser
from rlhf.errors import UserError
from rlhf.shipped import ROOT
from step3_ppo.config import Step3Config
from step3_ppo.kl import KLOptions

ALGORITHMS = ROOT / "step3_ppo/algorithms"
OPTION = re.compile(r"^    (\w+): (.+?) = ", re.MULTILINE)
IMPORTED = re.compile(r"^from step3_ppo\.algorithms\.(\w+) import", re.MULTILINE)
LOCAL_FILE = re.compile(r"(?:files(?:,[^:]*)?:)?([^:*?\[]+?)(?:=[\d.]+)?")
LOCAL_MODEL = re.compile(r"(?:\.{1,2})?/.*(?<!\.yaml)(?<!\.yml)")


class _AnyAlgorithm(KLOptions):
    """Options of step 3 that keep what a file says for another algorithm."""

    @classmethod
    def adopt(cls, values: Tree, source: object) -> Tree:
        return super(Step3Config, cls).adopt(values, source)


def refuse_plain_mistakes(argv: list[str], overlay: parser.Overlay) -> None:
    """Raises: UserError for what `read`, or the check of the first stage, would refuse too."""
    algorithm = parser.peek(argv, "ppo.algorithm", "ppo")
    if not (ALGORITHMS / f"{algorithm}.py").is_file():
        return
    of_algorithm: dict[str, Any] = {
        name: (kind, None) for name, kind in _options(algorithm) if name not in KLOptions.model_fields
    }
    section: Any = create_model("Step3Config", __base__=_AnyAlgorithm, **of_algorithm)
    described: Any = (section, Field(section(algorithm=algorithm)))
    options = create_model("ChainConfig", __base__=ChainConfig, ppo=described)
    layers = [spread(layer) for layer in parser.layers(options, argv, overlay)]
    try:
        chain = combine(options, layers)
    except UserError as error:
        invalid = error.__context__.errors() if isinstance(error.__context__, ValidationError) else []
        origins = parser.origins(layers)
        of_values = all(each["type"] not in ("value_error", "extra_forbidden") for each in invalid)
        names = [".".join(part for part in each["loc"] if isinstance(part, str)) for each in invalid]
        typed = all(origins.get(name) == parser.COMMAND_LINE for name in names)
        if of_values and typed and not of_algorithm.keys() & {name.removeprefix("ppo.") for name in origins}:
            raise
        return
    if not chain.plan and not any((Path(chain.output_dir) / stage.name).exists() for stage in STAGES.values()):
        _refuse_missing_files(chain)


def _options(algorithm: str) -> Iterator[tuple[str, Any]]:
    """(name, kind) of each option in an algorithm's file, and in those that it imports: whether it is a flag or a list
    decides which words follow it."""
    text = (ALGORITHMS / f"{algorithm}.py").read_text(encoding="utf-8")
    for name, kind in OPTION.findall(text):
        yield name, bool if kind == "bool" else tuple[Any, ...] if kind.startswith("tuple") else Any
    for other in IMPORTED.findall(text):
        yield from _options(other)


def _refuse_missing_files(chain: ChainConfig) -> None:
    """Raises: UserError for a data file or a model's directory of the first stage that is not there."""
    if not chain.steps and chain.ppo.actor_model is not None:  # then step 3 may be the only one
        return
    step = min(chain.steps or STAGES)
    options, name = getattr(chain, SECTIONS[step]), STAGES[step].name
    for path in (*options.data_path, *options.eval_data_path):
        file = LOCAL_FILE.fullmatch(path)
        if not file or Path(file[1].lower().removesuffix(".gz")).suffix not in SUFFIXES:
            continue
        if not Path(path).exists() and not Path(file[1]).expanduser().exists():
            raise UserError(f"{name}: {file[1]}: no such file or directory; expected {FILE_TYPES}")
    model = getattr(options, "model", "")  # step 3 has others
    if LOCAL_MODEL.fullmatch(model) and not Path(model).exists():
        raise UserError(f"{name}: {model}: no such directory; expected a model directory, a hub id or a .yaml file")

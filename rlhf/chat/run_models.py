"""Which models a run has: its policies by name, what they were trained from, and the model that scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf import plugins
from rlhf.config import Tree
from rlhf.config.declaration import Declaration
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import policy_path
from rlhf.hub.short_names import resolve
from rlhf.storage.manifests import MANIFEST, read_manifest, stage_of

BASE = "base"
"""the name of the model that the first stage started from"""


@dataclass(frozen=True, slots=True)
class RunModels:
    """Paths, or hub ids, of the models of a run. Nothing is loaded."""

    run: str
    policies: Mapping[str, str]
    """by name"""
    newest: str
    """name of the policy that was trained last"""
    references: Mapping[str, str]
    """what each policy was trained from, as far as the run says"""
    reward: str | None
    """the score source that is its reward model; None if the run has none"""

    def path(self, name: str) -> str:
        """The path of a policy: of the run by its name, or any other model. Raises: UserError."""
        if name in self.policies:
            return policy_path(self.policies[name])
        if not Path(name).exists() and resolve(name) == name and "/" not in name:
            raise UserError(
                f"policy '{name}': got no policy of {self.run}, expected one of {', '.join(self.policies)}, or the "
                "path of a model"
            )
        return policy_path(name)


def run_models(run: str, stages: Mapping[str, Declaration]) -> RunModels:
    """The models of a chain's output directory, of one stage's directory, or of a model.

    stages: by the short names under which people know their policies
    Raises: UserError for a run without a finished policy, and for damaged files.
    """
    directory = Path(run)
    if any((directory / stage.name).is_dir() for stage in stages.values()):
        return _of_chain(directory, stages)
    stage = stage_of(run)
    name = directory.name or run
    if stage is None:
        return RunModels(run, {name: resolve(run)}, name, {}, None)
    manifest = read_manifest(stage)
    declared = next((each for each in stages.values() if each.name == manifest["stage"]), None)
    if declared is None or not declared.policies:
        raise UserError(f"{run}: got a stage without a policy, expected one of a run that responds to prompts")
    reference = input_path(manifest, declared.reference, stage.parent)
    return RunModels(run, {name: policy_path(run)}, name, {} if reference is None else {name: reference}, None)


def _of_chain(directory: Path, stages: Mapping[str, Declaration]) -> RunModels:
    policies: dict[str, str] = {}
    references: dict[str, str] = {}
    newest, reward = "", None
    for name, declared in stages.items():
        folder = directory / declared.name
        if not (folder / MANIFEST).is_file():
            continue
        manifest = read_manifest(folder)
        available = [model for model in declared.policies if model in manifest["models"]]
        if declared.scorer in manifest["models"]:
            reward = plugins.spec("learned", model=str(folder / declared.scorer))
        if not available:
            continue
        newest, reference = name, input_path(manifest, declared.reference, directory)
        if not policies and reference is not None:
            policies[BASE] = reference
        for model in available:
            policy = name if model == available[0] else f"{name}/{model}"
            policies[policy] = str(folder / model)
            if reference is not None:
                references[policy] = reference
    if not newest:
        raise UserError(f"{directory}: no stage with a policy is finished; run one to its end, or name a model")
    return RunModels(str(directory), policies, newest, references, reward)


def input_path(manifest: Tree, name: str, run: Path) -> str | None:
    """The path of an input; if the whole run was moved, its path in the new directory."""
    entry = manifest["inputs"].get(name)
    if entry is None:
        return None
    path = Path(str(entry["path"]))
    moved = [run / path.name, run / path.parent.name / path.name]
    for candidate in [] if path.exists() else moved:
        if candidate.is_dir():
            return str(candidate)
    return str(entry["path"])

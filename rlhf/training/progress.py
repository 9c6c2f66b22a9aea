"""The status of a stage, from its files: whether it is finished, and whether its options and data have changed."""

import contextlib
import hashlib
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import try_to_load_from_cache

from rlhf import console, plugins
from rlhf.config import Tree
from rlhf.config.declaration import Declaration
from rlhf.config.foreign_options import gone
from rlhf.config.options import RunOptions
from rlhf.distributed import collectives
from rlhf.distributed.rendezvous import VISIBLE_S, wait_until
from rlhf.errors import UserError
from rlhf.hub import short_names
from rlhf.storage import manifests
from rlhf.training import checkpoints

SAVED = (*manifests.WEIGHTS, ".json")
"""suffixes of a model's files"""
CURE = "choose another --output-dir, or add --overwrite (with --steps for some stages of a chain)"
"""what to do if the stage cannot resume"""
CHANGE = f"{CURE}, or --allow-config-change to resume from it nevertheless"

StageStatus = Literal["new", "interrupted", "finished", "stale", "extended"]
"""`interrupted`: it resumes from a checkpoint. `stale`: it has a checkpoint, but starts from scratch, because a stage
that it starts from has changed or will be rerun. `extended`: it is finished, has a checkpoint, and is to run longer"""
Content = Callable[[], Mapping[str, str]]
"""Returns a digest of the data at each local path."""
Changes = dict[str, tuple[Any, Any]]
"""option -> its value before, and now"""


def stage_status(
    stage: Declaration, options: RunOptions, inputs: Mapping[str, str], content: Content, planned: Mapping[str, object]
) -> StageStatus:
    """The status of `stage`; the stages in `planned` run before it.

    Raises: UserError if its result-changing options or its data have changed, its output is damaged, or it is finished
    and a stage that it started from has changed or will be rerun: only --overwrite replaces a result.
    """
    directory = Path(options.output_dir) / stage.name
    if options.overwrite:
        return "new"
    finished = (directory / manifests.MANIFEST).is_file()
    manifest = manifests.read_manifest(directory) if finished else checkpoints.newest_manifest(directory)
    if manifest is None:
        return "interrupted" if checkpoints.exist(directory) else "new"
    digests = {name: manifests.manifest_digest(path) for name, path in inputs.items()}
    inputs_then = {name: entry["manifest_sha256"] for name, entry in manifest["inputs"].items()}
    if not finished:
        for name, value in _gone(manifest["config"], options):
            console.say(f"note: {directory} resumes without {name} {value}, an option of before")
    changed = _changed(manifest, options, inputs_then, digests)
    longer = finished and _is_longer(directory, changed, options)
    _require_same_options(directory, finished and not longer, changed, options, manifest)
    other = _differing(manifest.get("data", {}), content())
    if other:
        raise _refusal(directory, finished, f"other data: {', '.join(other)} changed since", CURE)
    _require_same_files(directory, finished, manifest.get("user_files", {}), options, inputs)
    pending = {name for name, path in inputs.items() if manifests.planned_start(path, options.output_dir, planned)}
    other = [name for name in inputs if name in pending or digests[name] != inputs_then.get(name)]
    if other and finished:
        listed = ", ".join(f"{name} ({inputs[name]})" for name in other)
        when = "will be rerun" if pending else "has changed since it started from it"
        raise UserError(f"{directory}: finished, and {listed} {when}; only --overwrite replaces a result: {CURE}")
    if other:
        return "stale"
    return "extended" if longer else "finished" if finished else "interrupted"


def _is_longer(directory: Path, changed: Changes, options: RunOptions) -> bool:
    """Whether a finished stage is to be extended. Raises: UserError if it has no checkpoint to resume from."""
    totals = options.declared("TOTALS")
    longer = [f"{name} {before} to {now}" for name, (before, now) in changed.items() if name in totals and now > before]
    if not longer or not set(changed) <= _noted(options):
        return False
    if not checkpoints.exist(directory):
        raise UserError(
            f"{directory}: finished, and has no checkpoint to be extended from ({', '.join(longer)}); "
            f"--keep-last-checkpoint keeps one; {CURE}"
        )
    return True


def _noted(options: RunOptions) -> frozenset[str]:
    return options.declared("TOTALS") | options.declared("NOTED")


def _changed(
    manifest: Tree,
    options: RunOptions,
    inputs_then: Mapping[str, str | None],
    digests: Mapping[str, str | None],
) -> Changes:
    """The options that have changed, except free options and inputs that are the same model under another name."""
    options_then = type(options)().model_dump(mode="json") | manifest["config"]  # with defaults for newer options
    then, now = map(options.of_results, (options_then, options.model_dump(mode="json")))
    changed = {name: (then.get(name), value) for name, value in now.items() if then.get(name) != value}
    for name in [name for name in changed if name in digests]:
        same_digest = inputs_then.get(name) is not None and inputs_then[name] == digests[name]
        if same_digest or _same_model(*changed[name]):
            del changed[name]
    return changed


def _gone(config_then: Tree, options: RunOptions) -> Iterator[tuple[str, object]]:
    """The options that had an effect then, and are gone."""
    for name, default in gone().items():
        if name not in type(options).model_fields and config_then.get(name, default) != default:
            yield name, config_then[name]


def _require_same_options(
    directory: Path, finished: bool, changed: Changes, options: RunOptions, manifest: Tree
) -> None:
    changes = [f"{name} was {before!r}, now {now!r}" for name, (before, now) in changed.items()]
    if not finished and (options.allow_config_change or set(changed) <= _noted(options)):
        for line in changes:
            console.say(f"note: {directory} resumes with another option: {line}")
        return
    if changed:
        listed = f"{', '.join(changes[:4])}{', ...' if len(changes) > 4 else ''}"
        other = f"other options ({listed}){manifests.other_writer(manifest)}"  # perhaps with other defaults
        raise _refusal(directory, finished, other, CURE if finished else CHANGE)


def user_files(options: RunOptions, inputs: Mapping[str, str]) -> dict[str, str]:
    """A digest of each local file and model of the user that `options` name, by its path, except data and stages.

    Python files, those of a `module:function` too; the chat template, questions to a judge; models in `inputs` that no
    stage made; models of score sources (`learned,model=M`), of a stage or not. What a file imports is not compared.
    """
    words = set(re.split(r"[\s\"\[\]{},:=*]+", json.dumps(options.model_dump(mode="json"), ensure_ascii=False)))
    sources = [*(getattr(options, "reward", None) or ()), *filter(None, [getattr(options, "judge", None)])]
    texts = {str(plugins.parse_spec(plugins.split_weight(source)[1])[1].get("prompt")) for source in sources}
    texts.add(str(getattr(options, "chat_template", None)))
    functions = [plugins.function_of(plugins.split_weight(source)[1]) for source in sources]
    modules = [name for name, function in functions if function and not name.endswith(".py")]
    digests = {name: str(manifests.digest(file)["sha256"]) for name in modules if (file := plugins.module_file(name))}
    models = {*inputs.values()}
    for word in sorted(words - {"", options.output_dir} | models):
        path = Path(word)
        if not path.exists() or (word in models and manifests.stage_of(word) is not None):
            continue  # the manifest of that stage is compared
        if path.is_file() and (path.suffix == ".py" or word in texts):
            digests[word] = str(manifests.digest(path)["sha256"])
        elif (path / "config.json").is_file():
            digests[word] = _digest_of_model(path)
        elif (digest := manifests.manifest_digest(word)) is not None:
            digests[word] = digest
    return digests


def input_record(path: str) -> Tree:
    """What a manifest says of a model from which a stage starts; the weights on rank 0 only, which writes it."""
    weights = _digest_of_weights(path) if collectives.is_main() else None
    return {"path": path, "manifest_sha256": manifests.manifest_digest(path), "weights": weights}


def _digest_of_weights(path: str) -> str | None:
    """A digest of the weights of a model on this machine; of random ones, of the .yaml that describes them; of a model
    of the hub its commit. None if nothing of it is here."""
    model = Path(short_names.resolve(path))
    if model.is_file():
        return str(manifests.digest(model)["sha256"])
    if model.is_dir():
        return _digest_of_model(model, manifests.WEIGHTS)
    config = try_to_load_from_cache(str(model), "config.json")
    return Path(config).parent.name if isinstance(config, str) else None


def _digest_of_model(path: Path, suffixes: tuple[str, ...] = SAVED) -> str:
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.suffix in suffixes]
    return hashlib.sha256(json.dumps([(f.name, manifests.digest(f)["sha256"]) for f in files]).encode()).hexdigest()


def _require_same_files(
    directory: Path, finished: bool, then: Mapping[str, str], options: RunOptions, inputs: Mapping[str, str]
) -> None:
    """Raises: UserError if a file or model of the user has another content; with allow_config_change a note."""
    other = _differing(then, user_files(options, inputs))
    if other and options.allow_config_change and not finished:
        console.say(f"note: {directory} resumes with another content of {', '.join(other)}")
    elif other:
        files = f"another content of {', '.join(other)}, changed since"
        raise _refusal(directory, finished, files, CURE if finished else CHANGE)


def notes_on(data: Any, stage: Path) -> tuple[str, ...]:
    """What is printed of the data of a stage (data.dataset.PhaseData): notes of the run only if no stage before it, by
    the names of their folders, has read data there."""
    earlier = [file for file in stage.parent.glob("*/data.json") if file.parent.name < stage.name]
    return (*data.notes, *(() if earlier else data.notes_of_run))


def require_same_data(manifest: Tree, data: Mapping[str, str]) -> None:
    """Raises: UserError if data has changed since the checkpoint of `manifest`; data that is not on this machine is
    known only when it has been read. data: a digest of each path"""
    other = _differing(manifest.get("data", {}), data)
    if other:
        raise UserError(f"the checkpoint is of a run with other data: {', '.join(other)} changed since; {CURE}")


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The paths whose digest has changed; one that was not known then has not."""
    return [path for path, digest in now.items() if then.get(path, digest) != digest]


def _refusal(directory: Path, finished: bool, change: str, cure: str) -> UserError:
    return UserError(f"{directory}: {'finished' if finished else 'has a checkpoint of a run'} with {change}; {cure}")


def _same_model(model: str | None, other_model: str | None) -> bool:
    """Whether two strings name the same model: a short name and its hub id, a relative and an absolute path."""
    if model is None or other_model is None:
        return False
    return Path(short_names.resolve(model)).resolve() == Path(short_names.resolve(other_model)).resolve()


def report_status(stage: Declaration, options: RunOptions, inputs: Mapping[str, str], content: Content) -> StageStatus:
    """The status of the stage that is to run now; prints it if there is nothing to do or it starts from scratch."""
    status = stage_status(stage, options, inputs, content, {})
    if status == "finished":
        console.say(f"{stage.name}: already complete in {options.output_dir}, skipped")
        if collectives.is_main():
            sweep_finished(Path(options.output_dir) / stage.name)
    elif status == "stale":
        console.say(
            f"{stage.name}: starts from scratch, because a stage that it starts from has changed; its checkpoints are "
            "removed"
        )
    return status


def sweep_finished(directory: Path) -> None:
    """Remove the checkpoints of a finished stage, and files of an interrupted write, in case the process was killed
    before it could remove them."""
    keep_last = manifests.read_manifest(directory)["config"].get("keep_last_checkpoint", False)
    checkpoints.sweep(directory, everything=True, keep=int(keep_last))
    for path in [*directory.rglob(".tmp-*"), *directory.glob(".old-*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def versions_changed(manifest: Tree) -> Iterator[str]:
    """`torch 2.12 -> 2.13` for each library whose version has changed since a checkpoint was written."""
    now = manifests.versions()
    for name, before in ({manifests.PROGRAM: "older"} | manifest.get("versions", {})).items():
        if now.get(name) != before:
            yield f"{name} {before} -> {now.get(name)}"


@contextlib.contextmanager
def locked_directory(directory: Path, replace: bool) -> Iterator[None]:
    """Rank 0 creates the directory and holds its lock for all ranks.

    Raises: UserError if another process has the lock, or has finished the stage since the check, or a host does not see
    the directory.
    """
    with contextlib.ExitStack() as stack:
        refusal = None
        if collectives.is_main():
            try:
                stack.enter_context(manifests.locked(directory))
                if (directory / manifests.MANIFEST).exists() and not replace:
                    refusal = f"{directory}: another process has just finished this stage; there is nothing left to do"
            except UserError as error:
                refusal = str(error)
        refusal = collectives.gather_objects(refusal)[0]
        if refusal is not None:
            raise UserError(refusal)
        lock = directory / manifests.LOCK  # it names its process: one that a killed run has left is another
        text = collectives.gather_objects(lock.read_text() if collectives.is_main() else "")[0]
        is_visible = wait_until(lambda: lock.is_file() and lock.read_text() == text, VISIBLE_S)
        hosts = collectives.gather_objects("" if is_visible else socket.gethostname())
        if any(hosts):
            raise UserError(
                f"{directory}: {', '.join(dict.fromkeys(filter(None, hosts)))} does not see what rank 0 writes there; "
                "--output-dir must be one directory that all hosts share"
            )
        yield

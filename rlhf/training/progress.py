"""How far a stage has come, by what it left: which options and data made it, and whether these are still the same."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf import console
from rlhf.config.declaration import Declaration
from rlhf.config.options import RunOptions
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.hub import short_names
from rlhf.storage import manifests
from rlhf.training import checkpoints

AGAIN = "name another --output-dir, or add --overwrite (with --steps for some stages of a chain)"
"""what to do where nothing can be gone on from"""

Standing = Literal["new", "interrupted", "finished", "stale", "extended"]
"""`interrupted`: there is a checkpoint to go on from. `stale`: the same, but a stage that it started from was made
again since, or will be, so that it begins anew. `extended`: it is finished, and now longer; there is a checkpoint"""
Content = Callable[[], Mapping[str, str]]
"""Gives a digest of the data at each local place."""


def standing(
    stage: Declaration, options: RunOptions, inputs: Mapping[str, str], content: Content, planned: Mapping[str, str]
) -> Standing:
    """How far `stage` has come; `planned` stages run before it.

    Raises: UserError if it was begun with options or data that make something else, its output is damaged, or it is
    finished and a stage that it started from was made again, or will be: a result goes for --overwrite alone.
    """
    directory = Path(options.output_dir) / stage.name
    manifests.require_folders(directory, stage.models)
    if options.overwrite:
        return "new"
    finished = (directory / manifests.MANIFEST).is_file()
    manifest = manifests.read_manifest(directory) if finished else checkpoints.newest_manifest(directory)
    if manifest is None:
        return "interrupted" if checkpoints.is_there(directory) else "new"
    digests = {name: manifests.manifest_digest(place) for name, place in inputs.items()}
    made_from = {name: entry["manifest_sha256"] for name, entry in manifest["inputs"].items()}
    changed = _changed(manifest, options, made_from, digests)
    longer = finished and _is_longer(directory, changed, options)
    _require_same_options(directory, finished and not longer, changed, options)
    known = manifest.get("data", {})
    other = [place for place, digest in content().items() if known.get(place, digest) != digest]
    if other:
        raise UserError(f"{_begun(directory, finished)} other data: {', '.join(other)} changed since; {AGAIN}")
    awaited = {name for name, place in inputs.items() if manifests.planned_start(place, options.output_dir, planned)}
    other = [name for name in inputs if name in awaited or digests[name] != made_from.get(name)]
    if other and finished:
        listed = ", ".join(f"{name} ({inputs[name]})" for name in other)
        when = "is to be made again" if awaited else "is another now than the one it started from"
        raise UserError(f"{directory}: finished, and {listed} {when}; no result is replaced unasked: {AGAIN}")
    if other:
        return "stale"
    return "extended" if longer else "finished" if finished else "interrupted"


def _is_longer(directory: Path, changed: Mapping[str, tuple[Any, Any]], options: RunOptions) -> bool:
    """Whether a finished stage is to be extended. Raises: UserError if it kept no checkpoint to go on from."""
    totals = options.declared("TOTALS")
    longer = [f"{name} {made} to {now}" for name, (made, now) in changed.items() if name in totals and now > made]
    if not longer or not set(changed) <= _noted(options):
        return False
    if not checkpoints.is_there(directory):
        raise UserError(
            f"{directory}: finished, and kept no checkpoint to be extended from ({', '.join(longer)}); "
            f"--keep-last-checkpoint keeps one; {AGAIN}"
        )
    return True


def _noted(options: RunOptions) -> frozenset[str]:
    return options.declared("TOTALS") | options.declared("NOTED")


def _changed(
    manifest: Mapping[str, Any],
    options: RunOptions,
    made_from: Mapping[str, str | None],
    digests: Mapping[str, str | None],
) -> dict[str, tuple[Any, Any]]:
    """The options that are not as they were, free ones aside, and inputs that are the same under another name."""
    made = type(options)().model_dump(mode="json") | manifest["config"]  # an option it did not have was at its default
    changed = {
        name: (made[name], value)
        for name, value in options.model_dump(mode="json").items()
        if name not in options.declared("FREE") and made[name] != value
    }
    for name in [name for name in changed if name in digests]:
        same_made = made_from.get(name) is not None and made_from[name] == digests[name]
        if same_made or _same_place(*changed[name]):
            del changed[name]
    return changed


def _require_same_options(
    directory: Path, finished: bool, changed: Mapping[str, tuple[Any, Any]], options: RunOptions
) -> None:
    said = [f"{name} was {before!r}, now {now!r}" for name, (before, now) in changed.items()]
    if not finished and (options.allow_config_change or set(changed) <= _noted(options)):
        for line in said:
            console.say(f"note: {directory} goes on with another option: {line}")
        return
    if changed:
        raise UserError(
            f"{_begun(directory, finished)} other options ({', '.join(said[:4])}{', ...' if len(said) > 4 else ''}); "
            + _cure(finished)
        )


def _begun(directory: Path, finished: bool) -> str:
    return f"{directory}: {'finished' if finished else 'has a checkpoint of a run'} with"


def _cure(finished: bool) -> str:
    return AGAIN if finished else f"{AGAIN}, or --allow-config-change to go on from it all the same"


def _same_place(one: str | None, other: str | None) -> bool:
    """Whether two words mean one model: a short name and its hub id, a relative path and an absolute one."""
    if one is None or other is None:
        return False
    return Path(short_names.resolve(one)).resolve() == Path(short_names.resolve(other)).resolve()


def find(stage: Declaration, options: RunOptions, inputs: Mapping[str, str], content: Content) -> Standing:
    """How far the stage that is to run now has come; says so."""
    found = standing(stage, options, inputs, content, {})
    if found == "finished":
        console.say(f"{stage.name}: already complete in {options.output_dir}, skipped")
        if collectives.is_main():
            sweep_finished(Path(options.output_dir) / stage.name)
    elif found == "stale":
        console.say(f"{stage.name}: begins anew, for a stage that it started from was made again; its checkpoints go")
    return found


def sweep_finished(directory: Path) -> None:
    """Remove the checkpoints that a process has left which ended between its last two deeds."""
    kept = manifests.read_manifest(directory)["config"].get("keep_last_checkpoint", False)
    checkpoints.sweep(directory, everything=True, but=int(kept))


def versions_changed(manifest: Mapping[str, Any]) -> Iterator[str]:
    """`torch 2.12 -> 2.13` for each library that is another than when a checkpoint was written."""
    now = manifests.versions()
    for name, before in manifest.get("versions", {}).items():
        if now.get(name) != before:
            yield f"{name} {before} -> {now.get(name)}"

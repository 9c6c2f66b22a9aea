"""One stage's run: its directory, its process group, its record, and the manifest that says it is finished."""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf import checkpoint, config, dist, launch, names, plugins, record, spikes
from rlhf.config import UserError
from rlhf.engine import compute_dtype
from rlhf.models.load import require_context
from rlhf.nonfinite import NonFiniteError, save_batch
from rlhf.options import EngineOptions, RunOptions
from rlhf.templates import template_name
from rlhf.text import describe_template, load_tokenizer, prepare_tokenizer
from rlhf.types import Metrics

FREE = {
    "output_dir", "report_to", "sample_rows", "overwrite", "convert_template",
    "micro_batch_size", "data_workers", "data_cache", "max_bad_steps", "abort_kl", "abort_kl_iterations",
    "zero_stage", "offload_optimizer", "offload_param", "gradient_checkpointing",
}  # fmt: skip
"""Options that change what is shown, or memory and speed, but not what a stage makes."""
MODELS = {"model", "actor", "critic", "best", "ema"}
"""Folders that stages make."""
BAD_BATCH = "bad_batch"
"""The folder of a stage in which the batch lies that ended the run."""


class Run:
    """What a stage needs besides its method: a place to write, a recorder, and the end."""

    def __init__(self, stage: str, options: RunOptions) -> None:
        self.stage = stage
        # Overwriting is for once, and no property of the result.
        self.options = options.model_copy(update={"overwrite": False})
        self.directory = Path(options.output_dir) / stage
        if dist.is_main():
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / checkpoint.MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.directory / BAD_BATCH, ignore_errors=True)
            (self.directory / checkpoint.RUN_CONFIG).write_text(config.to_yaml(self.options), encoding="utf-8")
        self.recorder = record.Recorder(self.directory, options.report_to)
        self.manifest: dict[str, Any] = {}  # what is known before the end
        self.models: list[str] = []
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def describe(self, data: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Say how many rows there are, and which were dropped and why; the whole account goes to data.json.

        Raises: UserError if the ranks do not have the same rows.
        """
        self.tokenizer = tokenizer
        self.manifest |= {
            "template": describe_template(tokenizer),
            "data": {place["place"]: place["fingerprint"] for place in data.report["places"]},
        }
        said = (sorted(self.manifest["data"].items()), len(data.train), len(data.evaluation))
        for rank, other in enumerate(dist.gather_objects(said)):
            if other != said:
                raise UserError(
                    f"{self.stage}: rank {rank} found other data than rank {dist.rank()}: {other[1:]} rows against "
                    f"{said[1:]}; a place must hold the same on every host, and give the same rows every time"
                )
        if dist.is_main():
            checkpoint.write_json(self.directory / "data.json", data.report)
            bad = [message for place in data.report["places"] for message in place["bad"]]
            report = self.directory / "bad_rows.txt"
            report.unlink(missing_ok=True)  # an earlier run's, of data that was mended since
            if bad:
                report.write_text("\n".join(bad) + "\n", encoding="utf-8")
        dropped = ", ".join(f"{count} {reason}" for reason, count in data.train.dropped.items())
        record.say(
            f"{self.stage}: {len(data.train)} rows to train on, {len(data.evaluation)} held out"
            + (f"; dropped {dropped}" if dropped else "")
        )

    def follow(self, steps: Iterable[Metrics], total: int, shown: Sequence[str]) -> None:
        """Run the training loop `steps` to its end under the bar, and warn where a loss spikes."""
        watch = spikes.Spikes()
        for step, metrics in enumerate(self.recorder.follow(steps, total, self.stage, shown), start=1):
            found = watch.look(metrics)
            if found is not None:
                self.recorder.warn(step, spikes.NAME, found, spikes.ADVICE)

    def save(self, folder: str, save: Callable[[Path], None]) -> None:
        """Write a model into its folder, in place of what it had; the folder appears whole or not at all."""
        with self._appearing(folder) as staging:
            save(staging)
        dist.barrier()
        if folder not in self.models:
            self.models.append(folder)

    def finish(
        self,
        models: Mapping[str, Callable[[Path], None]],
        inputs: Mapping[str, str],
        metrics: Metrics,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Write each model into its folder, then the manifest. `inputs` names the places the stage started from;
        `state`, what was learned beside weights, goes to state.json.

        Raises: UserError if the disk is full, say; the stage is then unfinished.
        """
        try:
            for folder, save in models.items():
                self.save(folder, save)
            self.recorder.write("eval", 0, metrics)
            if dist.is_main():
                if state is not None:
                    checkpoint.write_json(self.directory / "state.json", state)
                self._write_manifest(self.models, inputs, metrics)
                for folder in MODELS - set(self.models):  # of a run with other options
                    shutil.rmtree(self.directory / folder, ignore_errors=True)
        except OSError as error:
            raise UserError(f"{self.directory}: cannot be written ({error}); make room there and run again") from error
        dist.barrier()
        record.say(f"{self.stage}: {record.metrics_line(metrics)}")
        record.say(f"{self.stage}: wrote {', '.join(str(self.directory / folder) for folder in self.models)}")

    def _write_manifest(self, models: list[str], inputs: Mapping[str, str], metrics: Metrics) -> None:
        manifest = self.manifest | {
            "stage": self.stage,
            "inputs": {n: {"place": p, "manifest_sha256": checkpoint.manifest_digest(p)} for n, p in inputs.items()},
            "models": models,
            "metrics": metrics,
            "config": self.options.model_dump(mode="json"),
            "versions": checkpoint.versions(),
            "world_size": dist.world_size(),
            "files": checkpoint.file_digests(self.directory, models),
        }
        checkpoint.write_json(self.directory / checkpoint.MANIFEST, manifest)

    @contextlib.contextmanager
    def _appearing(self, folder: str) -> Iterator[Path]:
        """The same staging directory on every rank; rank 0 makes it and renames it."""
        final = self.directory / folder
        if dist.is_main():
            with checkpoint.appearing(final) as staging:
                yield staging
        else:
            yield final.with_name(f".tmp-{folder}")


@contextlib.contextmanager
def open_run(stage: str, options: RunOptions) -> Iterator[Run]:
    """The run of one stage inside its process group, with every random source seeded.

    Numbers that are not finite, too many in a row, end the process with code 3 and one line; the batch is kept.
    """
    with dist.process_group():
        torch.manual_seed(options.seed)
        run = Run(stage, options)
        try:
            yield run
        except NonFiniteError as error:
            kept = ""
            if error.batch is not None:
                kept = f"; it lies in {run.directory / BAD_BATCH}"
                try:
                    save_batch(run.directory / BAD_BATCH, error, run.tokenizer)
                except OSError as full:
                    kept = f"; it could not be written ({full})"
                dist.barrier()
            launch.give_up(f"error: {stage}: {error}{kept}", launch.NON_FINITE)
        finally:
            run.recorder.close()


Content = Callable[[], Mapping[str, str]]
"""Gives a digest of the data at each local place."""


def state(
    stage: str, options: RunOptions, inputs: Mapping[str, str], content: Content, planned: Mapping[str, str]
) -> str:
    """`unfinished`, `finished`, or `stale`: one of its `inputs` was made again since, or will be by a `planned` stage.

    Raises: UserError if it was finished with options or data that make something else, or its output is damaged.
    """
    directory = Path(options.output_dir) / stage
    if options.overwrite or not (directory / checkpoint.MANIFEST).is_file():
        return "unfinished"
    manifest = checkpoint.read_manifest(directory)
    made = type(options)().model_dump(mode="json") | manifest["config"]  # an option it did not have was at its default
    made_from = {name: entry["manifest_sha256"] for name, entry in manifest["inputs"].items()}
    digests = {name: checkpoint.manifest_digest(place) for name, place in inputs.items()}
    changed = {
        name: (made[name], value)
        for name, value in options.model_dump(mode="json").items()
        if name not in FREE and made[name] != value
    }
    for name in [name for name in changed if name in inputs]:
        same_made = made_from.get(name) is not None and made_from[name] == digests[name]
        if same_made or _same_place(*changed[name]):
            del changed[name]
    if changed:
        said = [f"{name} was {before!r}, now {now!r}" for name, (before, now) in changed.items()]
        raise UserError(
            f"{directory}: finished with other options ({', '.join(said[:4])}{', ...' if len(said) > 4 else ''}); "
            "name another --output-dir, or add --overwrite (with --steps for some stages of a chain)"
        )
    data = manifest.get("data", {})
    other = [place for place, digest in content().items() if data.get(place, digest) != digest]
    if other:
        raise UserError(
            f"{directory}: finished with other data: {', '.join(other)} changed since; "
            "name another --output-dir, or add --overwrite (with --steps for some stages of a chain)"
        )
    awaited = any(checkpoint.planned_start(place, options.output_dir, planned) for place in inputs.values())
    return "stale" if awaited or digests != made_from else "finished"


def _same_place(one: str | None, other: str | None) -> bool:
    """Whether two words mean one model: a short name and its hub id, a relative path and an absolute one."""
    if one is None or other is None:
        return False
    return Path(names.resolve(one)).resolve() == Path(names.resolve(other)).resolve()


def skip(stage: str, options: RunOptions, inputs: Mapping[str, str], content: Content) -> bool:
    """Whether the stage is finished already; says so, or why a finished one is made again."""
    found = state(stage, options, inputs, content, {})
    if found == "finished":
        record.say(f"{stage}: already complete in {options.output_dir}, skipped")
    elif found == "stale":
        record.say(f"{stage}: what it started from was made again, so it is too")
    return found == "finished"


def check_engine(options: EngineOptions) -> None:
    """Raises: UserError for options that do not go together on this device, or a mistake in the adapter's."""
    compute_dtype(options, dist.local_device())
    if options.offload_param and options.zero_stage < 3:
        raise UserError(f"--offload-param: needs --zero-stage 3, got {options.zero_stage}")
    if options.adapter is not None:
        check_plugin("rlhf.adapters", options.adapter)


def check_plugin(folder: str, spec: str) -> None:
    """Raises: UserError for an unknown name or option of a plug-in that is built later."""
    name, options = plugins.parse_spec(spec)
    config.validate(plugins.find(folder, name).Config, options, f"{folder}.{name}")


def check_start(place: str, chat_template: str, tokens: int, convert_template: bool = False) -> None:
    """Refuse a place that cannot be started from; with `convert_template`, one made with another template will do.

    Raises: UserError if there is no model or no tokenizer, it has no room for `tokens`, or another stage made it
    with another chat template or end token.
    """
    found = load_tokenizer(names.resolve(place))
    asked = prepare_tokenizer(found, chat_template)
    if chat_template != "auto" and not convert_template and checkpoint.stage_of(place) is not None:
        made, now = describe_template(found), describe_template(asked)
        if made != now:
            name = template_name(made["chat_template"]) or "of its own"
            raise UserError(
                f"{place}: made with chat template {name} and end token {made['eos_token']}, but --chat-template "
                f"{chat_template} (end token {now['eos_token']}) is asked for; leave --chat-template auto, or add "
                "--convert-template to go on with the new one"
            )
    require_context(place, tokens)


def check_ranks(batch_size: int, ranks: int, parts: int = 1, name: str = "batch_size") -> None:
    """Raises: UserError unless every rank gets the same share of a batch, and of each of its `parts`."""
    if batch_size % (ranks * parts):
        share = f"{ranks} processes" + (f" x --num-mini-batches {parts}" if parts > 1 else "")
        near = max(1, round(batch_size / (ranks * parts))) * ranks * parts
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"{option} {batch_size}: expected a multiple of {ranks * parts} ({share}); try {near}")

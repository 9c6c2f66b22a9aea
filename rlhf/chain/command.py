"""The chain: supervised fine-tuning, reward model, PPO. Each stage runs in its own process or group of processes.

python train.py                                                      the demo
python train.py --actor-model opt-1.3b --reward-model opt-350m --deployment-type single_node
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlhf import console, streams
from rlhf.chain import early
from rlhf.chain.deployment import resolve_deployment
from rlhf.chain.options import (
    SECTIONS,
    SHORT_HELP,
    ChainConfig,
    StageOptions,
    chain_config,
    changed,
    overlay,
    prefix,
    read,
    require_agreement,
    typed_names,
    without_one_time_options,
)
from rlhf.chain.stages import STAGES, load
from rlhf.config import deepspeed_json, parser
from rlhf.config.options import RunOptions
from rlhf.config.short_help import full_help, short_help
from rlhf.errors import UserError
from rlhf.launch import launcher, rank_variables, supervisor
from rlhf.launch.failure_summary import command_to_resume, failure_summary
from rlhf.launch.hosts import Deployment
from rlhf.shipped import CONFIGS, config_file
from rlhf.training import stage_process

TEXTS = {"--help", "-h", "--help-all", "--plan"}
"""options with which the chain only prints a text"""
DEMO, RECIPES = CONFIGS / "demo.yaml", CONFIGS / "recipes"
UNFINISHED = (
    "exit code 0 without a manifest.json (look for sys.exit and os._exit in your reward function and other files of "
    "your own)"
)


def plan(chain: ChainConfig, processes: int) -> dict[int, StageOptions]:
    """The options of the stages to run, by step. Prints which other stages are finished or not needed.

    Every stage is checked before the first is started. Raises: UserError.
    """
    from rlhf.adapters import require_merging
    from rlhf.chain.steps import chosen_steps, describe_skipped
    from rlhf.roles import Role, inputs, load_once
    from rlhf.storage import manifests
    from rlhf.training import progress

    planned: dict[str, Role] = {}
    load_tokenizer = load_once()
    todo: dict[int, StageOptions] = {}
    finished = []
    for step in chosen_steps(chain):
        options, name, stage = getattr(chain, SECTIONS[step]), STAGES[step].name, load(step)
        manifests.require_writable(chain.output_dir, name)
        content = partial(stage.content, options)
        named = inputs(stage.named_roles(options))
        state = progress.stage_status(STAGES[step], options, named, content, planned)
        if state == "finished":
            finished.append(name)
            continue
        try:
            if 1 in todo:
                require_merging(todo[1].adapter, f"{name}, which follows it,")
            stage.check(options, planned, processes, load_tokenizer)
        except UserError as error:
            subject = "" if chain.ALONE else f"{name}: "
            raise UserError(f"{subject}{console.as_typed(str(error), typed_names(chain, SECTIONS[step]))}") from None
        todo[step] = options
        if step < 3:
            planned[name] = stage.roles(options, planned, load_tokenizer)[0]
    for line in describe_skipped(chain):
        print(line, flush=True)
    for name in finished:
        progress.sweep_finished(Path(chain.output_dir) / name)
        print(f"{name}: already complete in {chain.output_dir}, skipped", flush=True)
    return todo


def run_stage(
    step: int, options: StageOptions, run: Callable[[str, list[str]], launcher.ExitStatus]
) -> launcher.ExitStatus:
    """Run one stage to its end with `run`, and return its exit status."""
    from rlhf.storage import disk

    path = launcher.options_file(options.output_dir, STAGES[step].name)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        disk.write_text(path, parser.to_yaml(options))
        return run(STAGES[step].name, ["--config", str(path)])
    finally:
        path.unlink(missing_ok=True)


def run_with_restarts(
    step: int, options: StageOptions, run: Callable[[str, list[str]], launcher.ExitStatus], restarts: int
) -> launcher.ExitStatus:
    """Run one stage. After a crash, run it again from its newest checkpoint, at most `restarts` times.

    A stage that ends with code 0 but without a new manifest has crashed too: a user's code may call os._exit.
    """
    stage = Path(options.output_dir) / STAGES[step].name
    old = manifest_version(stage)
    for number in range(restarts + 1):
        # once the old result is gone, --overwrite would remove the checkpoints of this run
        overwrite = options.overwrite and (number == 0 or manifest_version(stage) == old is not None)
        status = run_stage(step, options.model_copy(update={"overwrite": overwrite}), run)
        if status == 0 and manifest_version(stage) not in (None, old):
            break
        if status == 0:
            status = launcher.ExitStatus(1, UNFINISHED, crashed=True)
        if not status.crashed:
            break
        if number < restarts:
            print(f"\n{stage.name}: {status.cause}; restart {number + 1} of {restarts}", file=sys.stderr, flush=True)
    return status


def manifest_version(stage: Path) -> tuple[int, int] | None:
    """Inode and modification time of a stage's manifest; None if the stage has none."""
    with contextlib.suppress(FileNotFoundError):
        os.listdir(stage)  # on NFS this updates what this host knows of a directory that another one has written
        status = (stage / "manifest.json").stat()
        return status.st_ino, status.st_mtime_ns
    return None


def exit_with_failure(
    chain: ChainConfig, step: int, status: launcher.ExitStatus, todo: dict[int, StageOptions]
) -> NoReturn:
    """End the chain with the exit code of a failed stage; print a summary unless the stage explained the failure.

    The report shows how far it came, unless a signal asks for the end: then the time may be short.
    """
    from rlhf.chain import gates

    directory = Path(chain.output_dir)
    if (status.crashed or status in (supervisor.NON_FINITE, gates.MISSED)) and any(directory.glob("*/metrics.jsonl")):
        from rlhf.chain.report import write_at_end

        console.say(write_at_end(str(directory)))
    if status not in supervisor.EXPLAINED:
        unfinished = [s for s in todo if s > step or (s == step and status != gates.MISSED)]
        overwritten = {
            prefix(chain, SECTIONS[s]): directory / STAGES[s].name / "manifest.json"
            for s in unfinished
            if todo[s].overwrite
        }
        words = gates.without_missed(sys.orig_argv, chain, step) if status == gates.MISSED else sys.orig_argv
        summary = failure_summary(directory / STAGES[step].name, status, command_to_resume(words, overwritten))
        print(f"\n{summary}", file=sys.stderr)
    raise SystemExit(int(status) if status > 0 else 128 - status)


class Command(NamedTuple):
    """A command line that the chain runs."""

    chain: ChainConfig
    typed: list[str]
    note: str = ""
    """a line on where options come from that are not typed"""


ReadCommand = Callable[[list[str], str], Command | None]
"""(words, program) -> the command; None if only a text was asked for, which is printed"""


def main(argv: Sequence[str] | None = None, program: str = "python train.py") -> int:
    """Run the chain."""
    return run(console.words(argv), program, read_command, typed_output_dir)


def run(words: list[str], program: str, read: ReadCommand, output_dir: Callable[[list[str]], str]) -> int:
    """Run a command line. If another launcher has started several processes, rank 0 runs it and the others follow.

    output_dir: of the words, as every rank reads its own. Raises: UserError.
    """
    rank_variables.adopt(os.environ)
    if rank_variables.world_size() == 1:
        return _run_and_say_next(read(words, program), program)
    from rlhf.launch import team

    if rank_variables.rank() > 0:
        team.follow(partial(output_dir, words), [stage.name for stage in STAGES.values()])
    with team.lead() as ranks:
        return _run_and_say_next(read(words, program), program, ranks)


def typed_output_dir(words: list[str]) -> str:
    """The output directory of this process's command line. Raises: UserError."""
    argv, _ = with_base(deepspeed_json.plain_words(words))
    return output_dir_of(argv, ChainConfig)


def output_dir_of(argv: list[str], options: type[RunOptions]) -> str:
    """The output directory of a command line with these options. Raises: UserError."""
    return os.path.expanduser(parser.peek(argv, "output-dir", str(options.model_fields["output_dir"].default)))


def read_command(words: list[str], program: str) -> Command | None:
    """The chain of a command line. Raises: UserError."""
    typed = deepspeed_json.plain_words(words)
    argv, note = with_base(typed)
    over = max(int(argv != typed), shipped_runs(argv))
    shown = parser.PRINT_OPTIONS & {*argv} if "--print-config" in argv else set()
    streams.ignore_broken_streams(report=not shown and not TEXTS & {*argv})
    argv = [word for word in argv if word not in shown]
    console.loading(program.removeprefix("python "), argv, bool(shown))
    about = (__doc__ or "").split("\n")[0]
    if {"--help", "-h"} & {*argv}:
        print(short_help(chain_config(argv), program, about, SHORT_HELP))
        return None
    if "--help-all" in argv:
        print(full_help(chain_config(argv), program, about))
        return None
    settings = overlay(argv, over)
    chain = read(argv, settings) if shown else read(argv, settings, early.refuse_plain_mistakes)
    require_agreement(argv, chain)
    if shown:
        print(parser.tree_to_yaml(changed(chain)) if "--changed" in shown else parser.to_yaml(chain), end="")
        return None
    return Command(chain, typed, note)


def _run_and_say_next(command: Command | None, program: str, ranks: Any = None) -> int:
    """ranks: the team of processes that this process leads, or None"""
    chain = _run(command, program, ranks) if command is not None else None
    if chain is not None:
        from rlhf.chain.steps import next_step  # imported here because it imports torch

        print(next_step(chain, program))
    return 0


def _run(command: Command, program: str, ranks: Any) -> ChainConfig | None:
    """Returns: the options with which the chain ran, or None after a plan."""
    chain = command.chain
    with stage_process.fast_imports():
        console.quiet_libraries()
        from rlhf.chain import gates, planning, report  # imported here because they import torch
        from rlhf.chain.steps import chosen_steps

    if chain.plan:
        try:
            processes = 1 if chain.devices else resolve_deployment(chain).processes
        except UserError as error:
            raise UserError(f"{error}; to plan for another machine, --devices N --device KIND in its place") from None
        print(command.note + planning.forecast(chain, processes, program, command.typed))
        return None
    from rlhf.storage import manifests

    manifests.require_writable(chain.output_dir)
    console.status("checking options, models and data")
    with stage_process.requeue_on_signal(), contextlib.ExitStack() as stack:
        if not chain.ALONE:  # which locks its own directory only: other stages may run beside it
            stack.enter_context(manifests.locked(Path(chain.output_dir)))
            sweep(Path(chain.output_dir))
        deployment = resolve_deployment(chain)
        chain = planning.resolve_zero_stages(chain, deployment.processes)
        gates.read_gates(chain)
        todo = plan(chain, deployment.processes)
        for step in sorted({*chosen_steps(chain)} - {*todo}):
            if status := judged(chain, step):
                exit_with_failure(chain, step, status, todo)
        if todo:
            print(command.note, end="", flush=True)
            if chain.rehearse:
                from rlhf.chain.rehearsal import rehearse

                once = replace(deployment, options=deployment.options.model_copy(update={"max_restarts": 0}))
                rehearse(todo, deployment.processes, partial(run_all, chain, deployment=once, ranks=ranks))
            save(chain)
            with report.written_while_going(chain.output_dir):
                failed = run_all(chain, todo, deployment, ranks)
            if failed is not None:
                exit_with_failure(chain, *failed, todo)
    if todo or not (Path(chain.output_dir) / report.REPORT).exists():
        stages = [STAGES[step] for step in (chain.steps if chain.ALONE and chain.steps else STAGES)]
        console.say(report.write_at_end(chain.output_dir, stages))
    return chain


def run_all(
    chain: ChainConfig, todo: dict[int, StageOptions], deployment: Deployment, ranks: Any
) -> tuple[int, launcher.ExitStatus] | None:
    """Run the stages in order. Returns the first step that fails and its exit status, or None if all finish."""
    with contextlib.ExitStack() as stack:
        if deployment.hosts:
            from rlhf.launch import team

            names = [stage.name for stage in STAGES.values()]
            ranks = stack.enter_context(team.start(deployment, next(iter(todo.values())).output_dir, names))
        one_host = partial(launcher.run, target=deployment)
        run = one_host if ranks is None else partial(ranks.run, options=deployment.options)
        for step, options in todo.items():
            with console.option_names(typed_names(chain, SECTIONS[step])):
                status = run_with_restarts(step, options, run, deployment.options.max_restarts)
            if status == 0 and options.output_dir == chain.output_dir:  # not of a rehearsal
                status = judged(chain, step)
            if status != 0:
                return step, status
    return None


def judged(chain: ChainConfig, step: int) -> launcher.ExitStatus:
    """Of a finished stage: 0, or the code for conditions of --require that it misses."""
    from rlhf.chain import gates

    reasons = gates.reasons(chain, step)
    return launcher.ExitStatus(gates.MISSED if reasons else 0, "; ".join(reasons.values()))


def save(chain: ChainConfig) -> None:
    """Write all options to config.yaml in the output directory, for --config; without the one-time ones. A stage alone
    has its own file, and leaves that of a chain as it is."""
    if chain.ALONE:
        return
    from rlhf.storage import disk

    disk.write_text(Path(chain.output_dir) / "config.yaml", parser.to_yaml(without_one_time_options(chain)))


def sweep(directory: Path) -> None:
    """Remove the option files of stages that a killed chain has left."""
    for stage in STAGES.values():
        for path in directory.glob(f".{stage.name}-*.yaml"):
            path.unlink(missing_ok=True)


def shipped_runs(argv: list[str]) -> int:
    """How many of the first --config files are the demo or a recipe of this project: the user wrote none of their
    options."""
    files, _ = parser.split_config_files(argv)
    resolved = (config_file(file).resolve() for file in files)
    return len([*takewhile(lambda file: file == DEMO.resolve() or file.parent == RECIPES.resolve(), resolved)])


def _data_paths(argv: list[str]) -> Iterator[str]:
    """The data paths of a command line, also those of one stage."""
    option = ""
    for word in argv:
        if word.startswith("--"):
            option, _, word = word.partition("=")
        if word and option.replace("_", "-").endswith("data-path"):
            yield word


def with_base(argv: list[str]) -> tuple[list[str], str]:
    """A command line without --config or --actor-model gets a base: the options saved in its output directory, else the
    demo.

    Returns the command line and a line about its base.
    """
    if any(re.match(r"--(config|actor[-_]model|help)|-h$", word) for word in argv):
        return argv, ""
    saved = Path(parser.peek(argv, "output-dir", "runs/demo")).expanduser() / "config.yaml"
    if saved.is_file():
        return [f"--config={saved}", *argv], f"options that are not set: as in {saved}\n"
    if all(path.partition(",")[0] == "demo" for path in _data_paths(argv)):
        return [f"--config={DEMO}", *argv], ""
    note = "no --actor-model: this trains the demo's tiny model, which knows the demo's words only\n"
    return [f"--config={DEMO}", "--ppo.judge=None", *argv], note  # the demo's judge knows the demo's prompts only

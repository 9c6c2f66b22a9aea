"""The chain: supervised fine-tuning, reward model, PPO, each a process (or a group of them) of its own.

python train.py                                                      the demo
python train.py --actor-model opt-1.3b --reward-model opt-350m --deployment-type single_node
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rlhf import console, streams
from rlhf.chain.options import SECTIONS, SHORT_HELP, ChainConfig, chain_config, changed, resolve
from rlhf.chain.stages import STAGES, load
from rlhf.config import parser
from rlhf.config.short_help import short_help
from rlhf.errors import UserError
from rlhf.launch import launcher, rank_variables, supervisor
from rlhf.launch.failure_summary import command_again, last_words
from rlhf.launch.hosts import Deployment, LaunchOptions, open_deployment
from rlhf.plan.options import PlanOptions
from rlhf.shipped import CONFIGS
from rlhf.training import stage_process

TEXTS = {"--help", "-h", "--help-all", "--plan"}
"""options that make the chain print a text and end"""
DEMO = CONFIGS / "demo.yaml"
UNFINISHED = (
    "exit code 0 without a manifest.json (look for sys.exit and os._exit in your reward function and other files of "
    "your own)"
)


def deployment(chain: ChainConfig) -> Deployment:
    """Where a stage runs, and in how many processes; another launcher has decided both.

    Raises: UserError if the hosts or devices are not there.
    """
    import torch

    own = LaunchOptions(**{name: getattr(chain, name) for name in LaunchOptions.model_fields})
    if rank_variables.world_size() > 1:
        return Deployment(rank_variables.world_size(), options=own)
    if chain.deployment_type == "multi_node":
        if chain.num_processes is not None:
            raise UserError(
                f"--num-processes {chain.num_processes}: got it with multi_node, expected slots= in the hostfile"
            )
        return open_deployment(own)
    for name in ("hostfile", "include", "exclude", "num_nodes", "launcher_args", "master_addr", "master_port"):
        if getattr(own, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(own, name)}: got --deployment-type {chain.deployment_type}, "
                "expected multi_node"
            )
    if chain.deployment_type == "single_gpu":
        if (chain.num_processes or 1) > 1:
            raise UserError(
                f"--num-processes {chain.num_processes}: one GPU has one; add --deployment-type single_node"
            )
        return Deployment(1, options=own)
    gpus = torch.cuda.device_count()
    wanted = chain.num_processes or max(1, gpus)
    most = gpus or max(2, launcher.cores())
    if wanted > most:
        there = f"{gpus} GPUs are visible" if gpus else f"this machine has no GPU and {launcher.cores()} cores"
        raise UserError(f"--num-processes {wanted}: {there}, expected at most {most}")
    return Deployment(wanted, options=own)


def _workloads(chain: Any) -> tuple[dict[str, Any], PlanOptions, dict[str, str]]:
    """(options and workload function of each chosen stage, options of the plan, models that step 3 starts from)."""
    from rlhf.chain.steps import chosen
    from step3_ppo.plan import earlier_models

    plan_options = PlanOptions(**{name: getattr(chain, name) for name in PlanOptions.model_fields})
    stages = {SECTIONS[step]: (getattr(chain, SECTIONS[step]), load(step).workload) for step in chosen(chain)}
    planned = {"actor_model": chain.sft.model, "reward_model": chain.reward.model}
    return stages, plan_options, earlier_models(chain.output_dir, planned)


def forecast(chain: Any) -> str:
    """What `--plan` prints: memory, time and disk of every stage."""
    from rlhf.plan.command import format_plans

    stages, plan_options, model_paths = _workloads(chain)
    return format_plans(stages, plan_options, 1 if chain.devices else deployment(chain).processes, model_paths)


def settle(chain: Any, count: int) -> Any:
    """The chain with `--zero-stage auto` replaced by what fits; says by what. Raises: UserError if nothing does."""
    from rlhf.plan.command import resolve_zero_stage

    stages, plan_options, model_paths = _workloads(chain)
    for section, (options, workload) in stages.items():
        resolved, line = resolve_zero_stage(options, workload, plan_options, count, model_paths)
        print(line, end="\n" if line else "", flush=True)
        chain = chain.model_copy(update={section: resolved})
    return chain


def plan(chain: Any, count: int) -> dict[int, Any]:
    """The stages to run, by step, with their options; says which of the others are finished, or not needed.

    Every stage is checked before any is started. Raises: UserError.
    """
    from rlhf.chain.steps import chosen, left_out
    from rlhf.storage import manifests
    from rlhf.training import progress

    planned: dict[str, str] = {}
    todo: dict[int, Any] = {}
    finished = []
    for step in chosen(chain):
        options, name, stage = getattr(chain, SECTIONS[step]), STAGES[step].name, load(step)
        manifests.require_writable(chain.output_dir, name)
        content = partial(stage.content, options)
        state = progress.standing(STAGES[step], options, stage.inputs(options), content, planned)
        if state == "finished":
            finished.append(name)
            continue
        try:
            stage.check(options, planned, count)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        todo[step] = options
        if step < 3:
            planned[name] = manifests.planned_start(options.model, chain.output_dir, planned) or options.model
    for line in left_out(chain):
        print(line, flush=True)
    for name in finished:
        progress.sweep_finished(Path(chain.output_dir) / name)
        print(f"{name}: already complete in {chain.output_dir}, skipped", flush=True)
    return todo


def run_stage(step: int, options: Any, run: Callable[[str, list[str]], launcher.Ended]) -> launcher.Ended:
    """Have `run` start one stage and wait: how it ended."""
    from rlhf.storage import disk

    path = Path(options.output_dir).absolute() / f".{STAGES[step].name}-{os.getpid()}.yaml"  # which every host must see
    try:
        disk.write_text(path, parser.to_yaml(options))
        return run(STAGES[step].name, ["--config", str(path)])
    finally:
        path.unlink(missing_ok=True)


def run_with_restarts(
    step: int, options: Any, run: Callable[[str, list[str]], launcher.Ended], restarts: int
) -> launcher.Ended:
    """Start one stage, and after a crash again from its newest checkpoint, at most `restarts` times: its last end.

    A stage that ends with code 0 without a new manifest has crashed: code of the user has called os._exit, say.
    """
    stage = Path(options.output_dir) / STAGES[step].name
    old = manifest_version(stage)
    for number in range(restarts + 1):
        # once the old result is gone, --overwrite would remove the checkpoints of this run
        overwrite = options.overwrite and (number == 0 or manifest_version(stage) == old is not None)
        ended = run_stage(step, options.model_copy(update={"overwrite": overwrite}), run)
        if ended == 0 and manifest_version(stage) not in (None, old):
            break
        if ended == 0:
            ended = launcher.Ended(1, UNFINISHED, crashed=True)
        if not ended.crashed:
            break
        if number < restarts:
            print(f"\n{stage.name}: {ended.cause}; restart {number + 1} of {restarts}", file=sys.stderr, flush=True)
    return ended


def manifest_version(stage: Path) -> tuple[int, int] | None:
    """Inode and modification time of a stage's manifest; None if the stage has none."""
    with contextlib.suppress(FileNotFoundError):
        os.listdir(stage)  # on NFS this updates what this host knows of a directory that another one has written
        status = (stage / "manifest.json").stat()
        return status.st_ino, status.st_mtime_ns
    return None


def leave(step: int, ended: launcher.Ended, todo: dict[int, Any]) -> NoReturn:
    """End the chain with the code of a stage that failed, and with a line about it unless it has said one."""
    if ended not in supervisor.SAID:
        made = {
            SECTIONS[s]: Path(o.output_dir) / STAGES[s].name / "manifest.json" for s, o in todo.items() if o.overwrite
        }
        words = last_words(Path(todo[step].output_dir) / STAGES[step].name, ended, command_again(made))
        print(f"\n{words}", file=sys.stderr)
    raise SystemExit(int(ended) if ended > 0 else 128 - ended)


def main() -> int:
    """The chain. Of several processes that another launcher has started, rank 0 is the chain and the others follow."""
    rank_variables.adopt(os.environ)
    if rank_variables.world_size() == 1:
        return run_chain()
    from rlhf.launch import team

    if rank_variables.rank() > 0:
        team.follow()
    with team.lead() as led:
        return run_chain(led)


def run_chain(led: Any = None) -> int:
    """Run what the command line asks for, in the processes of the team that this process leads, if it leads one."""
    program = console.program("python train.py")
    argv, note = _with_base(rank_variables.without_local_rank(sys.argv[1:]))
    shown = parser.PRINT_OPTIONS & {*argv} if "--print-config" in argv else set()
    streams.ignore_broken_streams(report=not shown and not TEXTS & {*argv})
    argv = [word for word in argv if word not in shown]
    console.loading(program.removeprefix("python "), argv, bool(shown))
    options, about = chain_config(argv), (__doc__ or "").split("\n")[0]
    if {"--help", "-h"} & {*argv}:
        print(short_help(options, program, about, SHORT_HELP))
        return 0
    chain = parser.parse(options, argv, program, about)
    chain = resolve(chain, argv)
    if shown:
        print(parser.tree_to_yaml(changed(chain)) if "--changed" in shown else parser.to_yaml(chain), end="")
        return 0
    launcher.require_open_files()
    console.quiet_libraries()
    if chain.plan:
        print(forecast(chain))
        return 0
    from rlhf.storage import manifests

    manifests.require_writable(chain.output_dir)
    console.status("checking options, models and data")
    with stage_process.requeued_when_asked(), manifests.locked(Path(chain.output_dir)):
        sweep(Path(chain.output_dir))
        where = deployment(chain)
        chain = settle(chain, where.processes)
        todo = plan(chain, where.processes)
        if todo:
            print(note, end="", flush=True)
            save(chain)
            failed = run_all(todo, where, led)
            if failed is not None:
                leave(*failed, todo)
    from rlhf.chain.steps import next_step

    print(next_step(chain))
    return 0


def run_all(todo: dict[int, Any], where: Deployment, led: Any) -> tuple[int, launcher.Ended] | None:
    """Run the stages, one after the other. The first that fails, and how it ended; None if all are finished."""
    with contextlib.ExitStack() as stack:
        if where.hosts:
            from rlhf.launch import team

            led = stack.enter_context(team.start(where))
        one_host = partial(launcher.run, where=where)
        run = one_host if led is None else partial(led.run, options=where.options)
        for step, options in todo.items():
            ended = run_with_restarts(step, options, run, where.options.max_restarts)
            if ended != 0:
                return step, ended
    return None


def save(chain: Any) -> None:
    """The whole tree into the run's directory, from where --config takes it. `overwrite` and `steps` are for once."""
    once = {name: getattr(chain, name).model_copy(update={"overwrite": False}) for name in SECTIONS.values()}
    from rlhf.storage import disk

    text = parser.to_yaml(chain.model_copy(update={**once, "overwrite": False, "steps": None}))
    disk.write_text(Path(chain.output_dir) / "config.yaml", text)


def sweep(directory: Path) -> None:
    """Remove the stages' options that a chain which was killed has left."""
    for stage in STAGES.values():
        for left in directory.glob(f".{stage.name}-*.yaml"):
            left.unlink(missing_ok=True)


def _with_base(argv: list[str]) -> tuple[list[str], str]:
    """The command line over what it is laid on when it names neither files nor models, and a line that says so.

    That is the run in the output directory, else the demo.
    """
    if any(re.match(r"--(config|actor[-_]model|help)|-h$", word) for word in argv):
        return argv, ""
    before = Path(parser.peek(argv, "output-dir", "runs/demo")).expanduser() / "config.yaml"
    if before.is_file():
        return [f"--config={before}", *argv], f"options that are not given: as in {before}\n"
    known = parser.peek(argv, "data-path", "demo").startswith("demo")
    note = "" if known else "no --actor-model: this trains the demo's tiny model, which knows the demo's words only\n"
    return [f"--config={DEMO}", *argv], note

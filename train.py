"""The chain: supervised fine-tuning, reward model, PPO, each a process (or a group of them) of its own.

python train.py                                                      the demo
python train.py --actor-model opt-1.3b --reward-model opt-350m --deployment-type single_node
"""

import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import Field, create_model

from data.config import DataOptions
from rlhf import config, launch, plugins
from rlhf.config import UserError
from rlhf.hosts import Deployment, LaunchOptions, open_deployment
from rlhf.last_words import command_again, last_words
from rlhf.options import EngineOptions, RunOptions
from rlhf.plan.options import PlanOptions
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig

STAGES = {1: "step1_sft", 2: "step2_reward", 3: "step3_ppo"}
SECTIONS = {1: "sft", 2: "reward", 3: "ppo"}
DEMO = Path(__file__).parent / "configs" / "demo.yaml"


class ChainConfig(DataOptions, EngineOptions, RunOptions, LaunchOptions, PlanOptions):
    """All three stages. An option given here holds for every stage that does not set its own."""

    actor_model: str = "opt-1.3b"
    """pretrained model that becomes the policy: directory, hub id, short name or .yaml"""
    reward_model: str = "opt-350m"
    """pretrained model that becomes reward model and critic: directory, hub id, short name or .yaml"""
    deployment_type: Literal["single_gpu", "single_node", "multi_node"] = "single_gpu"
    """single_gpu: one process, on the CPU where there is no GPU; single_node: one process per visible GPU;
    multi_node: the same on every host of --hostfile"""
    num_processes: int | None = Field(None, ge=1)
    """processes of single_node; by default the number of visible GPUs"""
    steps: tuple[Literal[1, 2, 3], ...] = Field((1, 2, 3), min_length=1)
    """the part of the chain to run; inputs of the rest are found in the output directory"""
    output_dir: str = "runs/rlhf"
    """directory of the run: step1_sft/, step2_reward/, step3_ppo/"""
    sft: SFTConfig = SFTConfig()
    """step 1, supervised fine-tuning; what is not set here is as at the top"""
    reward: RewardConfig = RewardConfig()
    """step 2, the reward model; what is not set here is as at the top"""


def chain_config(argv: list[str]) -> type[ChainConfig]:
    """ChainConfig with the options of the chosen algorithm as its `ppo` section."""
    algorithm = config.peek(argv, "ppo.algorithm", "ppo")
    options = plugins.find("step3_ppo.algorithms", algorithm).Config
    described = Field(options(algorithm=algorithm), description="step 3, PPO; what is not set here is as at the top")
    return create_model("ChainConfig", __base__=ChainConfig, ppo=(options, described))


def followed(section: str) -> dict[str, str]:
    """The options of a section that follow one at the top, and the name of that."""
    shared = [*DataOptions.model_fields, *EngineOptions.model_fields, *RunOptions.model_fields]
    model = {"sft": {"model": "actor_model"}, "reward": {"model": "reward_model"}}.get(section, {})
    return dict(zip(shared, shared, strict=True)) | model


def set_apart(argv: list[str]) -> set[str]:
    """The options that sections set for themselves, as `sft.max_length`: all that the command line names, and what a
    file gives another value than at its top. (A saved config.yaml has every value written out.)"""
    files, _ = config.split_config_files(argv)
    found = given(argv)
    for tree in map(config.read_yaml, files):
        for section in SECTIONS.values():
            own = tree.get(section) or {}
            follows = followed(section)
            found |= {
                f"{section}.{name}"
                for name, value in own.items()
                if name not in follows or follows[name] not in tree or tree[follows[name]] != value
            }
    return found


def given(argv: list[str]) -> set[str]:
    """The options on the command line, spelled `sft.max_length`."""
    names = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return names | {re.sub(r"(^|\.)no_", r"\1", name) for name in names}


def resolve(chain: Any, argv: list[str]) -> Any:
    """The chain with every section's options filled in from the top.

    Raises: UserError if a section names a directory of its own.
    """
    own = set_apart(argv)
    sections = {}
    for section in SECTIONS.values():
        if f"{section}.output_dir" in own:
            raise UserError(
                f"{section}.output_dir: the stages of a chain share one directory; name it with --output-dir"
            )
        taken = {name: getattr(chain, top) for name, top in followed(section).items() if f"{section}.{name}" not in own}
        sections[section] = getattr(chain, section).model_copy(update=taken)
    sections["ppo"] = sections["ppo"].model_copy(update=dict(_inputs_named_above(chain, argv)))
    return chain.model_copy(update=sections)


def _inputs_named_above(chain: Any, argv: list[str]) -> Iterator[tuple[str, str]]:
    """With step 3 alone, a model on the command line is one that PPO starts from, unless it is what the stage in the
    output directory started from: then the user repeats a command, and means that stage's."""
    for step, name in ((1, "actor_model"), (2, "reward_model")):
        place = getattr(chain, name)
        if step in chain.steps or getattr(chain.ppo, name) is not None or name not in given(argv):
            continue
        made = Path(chain.output_dir) / STAGES[step]
        if not made.is_dir():
            yield name, place
            continue
        from rlhf import checkpoint

        start = checkpoint.read_manifest(made)["config"]["model"]
        if start != place:
            option = name.replace("_", "-")
            raise UserError(
                f"--{option} {place}: {made} was made from '{start}'; leave the option out to go on from there, "
                f"or write --ppo.{option} to start from another"
            )


def deployment(chain: ChainConfig) -> Deployment:
    """Where a stage runs, and in how many processes. Raises: UserError if the hosts or devices are not there."""
    import torch

    own = LaunchOptions(**{name: getattr(chain, name) for name in LaunchOptions.model_fields})
    if chain.deployment_type == "multi_node":
        if chain.num_processes is not None:
            raise UserError(
                f"--num-processes {chain.num_processes}: got it with multi_node, expected slots= in the hostfile"
            )
        return open_deployment(own)
    for name in ("hostfile", "include", "exclude", "num_nodes", "master_addr", "master_port", "ssh_port"):
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
    most = gpus or max(2, launch.cores())
    if wanted > most:
        there = f"{gpus} GPUs are visible" if gpus else f"this machine has no GPU and {launch.cores()} cores"
        raise UserError(f"--num-processes {wanted}: {there}, expected at most {most}")
    return Deployment(wanted, options=own)


def _needs(chain: Any) -> tuple[dict[str, Any], PlanOptions, dict[str, str]]:
    """The chosen stages' sections and what they need, the devices asked about, the models step 3 will start from."""
    from rlhf.plan.command import starts

    asked = PlanOptions(**{name: getattr(chain, name) for name in PlanOptions.model_fields})
    stages = {
        SECTIONS[step]: (getattr(chain, SECTIONS[step]), importlib.import_module(f"{STAGES[step]}.plan").needs)
        for step in sorted(set(chain.steps))
    }
    return stages, asked, starts(chain.output_dir, chain.sft.model, chain.reward.model)


def forecast(chain: Any) -> str:
    """What `--plan` prints: memory, time and disk of every stage."""
    from rlhf.plan.command import show

    stages, asked, made = _needs(chain)
    return show(stages, asked, 1 if chain.devices else deployment(chain).processes, made)


def settle(chain: Any, count: int) -> Any:
    """The chain with `--zero-stage auto` replaced by what fits; says by what. Raises: UserError if nothing does."""
    from rlhf.plan.command import settle

    stages, asked, made = _needs(chain)
    for section, (options, needs) in stages.items():
        held, line = settle(options, needs, asked, count, made)
        print(line, end="\n" if line else "", flush=True)
        chain = chain.model_copy(update={section: held})
    return chain


def plan(chain: Any, count: int) -> dict[int, Any]:
    """The stages to run, by step, with their options; says which of the others are finished.

    Every stage is checked before any is started. Raises: UserError.
    """
    from rlhf import checkpoint, progress, record

    checkpoint.require_writable(chain.output_dir)
    planned: dict[str, str] = {}
    todo: dict[int, Any] = {}
    finished = []
    for step in sorted(set(chain.steps)):
        options, name = getattr(chain, SECTIONS[step]), STAGES[step]
        stage = importlib.import_module(f"{name}.stage")
        state = progress.standing(name, options, stage.inputs(options), partial(stage.content, options), planned)
        if state == "finished":
            finished.append(name)
            continue
        try:
            record.require_trackers(options.report_to)
            stage.check(options, planned, count)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        todo[step] = options
        if step < 3:
            planned[name] = checkpoint.planned_start(options.model, chain.output_dir, planned) or options.model
    for name in finished:
        print(f"{name}: already complete in {chain.output_dir}, skipped", flush=True)
    return todo


def run_stage(step: int, options: Any, where: Deployment) -> launch.Ended:
    """Start one stage and wait: how it ended."""
    stage = STAGES[step]
    shared = options.output_dir if where.hosts else None  # every host must see the file
    with tempfile.TemporaryDirectory(prefix=f".{stage}-", dir=shared) as folder:
        path = Path(folder).absolute() / "config.yaml"
        path.write_text(config.to_yaml(options), encoding="utf-8")
        return launch.run(stage, ["--config", str(path)], where)


def leave(step: int, ended: launch.Ended, todo: dict[int, Any]) -> NoReturn:
    """End the chain with the code of a stage that failed, and with a line about it unless it has said one."""
    if ended not in launch.SAID:
        manifests = {
            SECTIONS[s]: Path(o.output_dir) / STAGES[s] / "manifest.json" for s, o in todo.items() if o.overwrite
        }
        words = last_words(Path(todo[step].output_dir) / STAGES[step], ended, command_again(manifests))
        print(f"\n{words}", file=sys.stderr)
    raise SystemExit(int(ended) if ended > 0 else 128 - ended)


def main() -> None:
    launch.speak_plainly()
    argv, note = _with_base(sys.argv[1:])
    shown = "--print-config" in argv
    argv = [word for word in argv if word != "--print-config"]
    chain = config.parse(chain_config(argv), argv, "python train.py", (__doc__ or "").split("\n")[0])
    chain = resolve(chain, argv)
    if shown:
        print(config.to_yaml(chain), end="")
        return
    launch.require_alone()
    from rlhf.record import quiet_libraries

    quiet_libraries()
    if chain.plan:
        print(forecast(chain))
        return
    with launch.requeued_when_asked():
        where = deployment(chain)
        chain = settle(chain, where.processes)
        todo = plan(chain, where.processes)
        if todo:
            print(note, end="", flush=True)
            save(chain)
        for step, options in todo.items():
            ended = run_stage(step, options, where)
            if ended != 0:
                leave(step, ended, todo)
    print(next_step(chain))


def save(chain: Any) -> None:
    """The whole tree into the run's directory, from where --config takes it. `overwrite` is for once."""
    once = {name: getattr(chain, name).model_copy(update={"overwrite": False}) for name in SECTIONS.values()}
    directory = Path(chain.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    text = config.to_yaml(chain.model_copy(update={**once, "overwrite": False}))
    (directory / "config.yaml").write_text(text, encoding="utf-8")


def _with_base(argv: list[str]) -> tuple[list[str], str]:
    """The command line over what it is laid on when it names neither files nor models, and a line that says so.

    That is the run which a part of the chain continues, else the demo.
    """
    if any(word.startswith(("--config", "--actor-model", "--actor_model")) for word in argv):
        return argv, ""
    before = Path(config.peek(argv, "output-dir", "runs/demo")) / "config.yaml"
    if any(word.startswith("--steps") for word in argv) and before.is_file():
        return [f"--config={before}", *argv], f"with the options of {before} where none are given\n"
    known = config.peek(argv, "data-path", "demo").startswith("demo")
    note = "" if known else "no --actor-model: this trains the demo's tiny model, which knows the demo's words only\n"
    return [f"--config={DEMO}", *argv], note


def next_step(chain: ChainConfig) -> str:
    """What to do with the result."""
    from rlhf.checkpoint import MANIFEST

    left = [step for step, stage in STAGES.items() if not (Path(chain.output_dir) / stage / MANIFEST).is_file()]
    if left:
        return f"next: python train.py --steps {' '.join(map(str, left))} --output-dir {chain.output_dir}"
    return (
        f"\nThe tuned policy is {chain.output_dir}/step3_ppo/actor: AutoModelForCausalLM.from_pretrained loads it.\n"
        f"Numbers: {chain.output_dir}/step*/metrics.jsonl and manifest.json. Your own data and models:\n"
        "  python train.py --actor-model DIR --reward-model DIR --data-path my_pairs.jsonl --output-dir runs/mine"
    )


if __name__ == "__main__":
    raise SystemExit(config.run_as_user(main))

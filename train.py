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
from typing import Any, Literal

from pydantic import Field, create_model

from data.config import DataOptions
from rlhf import config, launch, plugins
from rlhf.config import UserError
from rlhf.options import EngineOptions, RunOptions
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig

STAGES = {1: "step1_sft", 2: "step2_reward", 3: "step3_ppo"}
SECTIONS = {1: "sft", 2: "reward", 3: "ppo"}
DEMO = Path(__file__).parent / "configs" / "demo.yaml"


class ChainConfig(DataOptions, EngineOptions, RunOptions):
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
    hostfile: str | None = None
    """hosts of multi_node, one 'name slots=N' a line"""
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


def processes(chain: ChainConfig) -> int:
    """How many processes a stage gets. Raises: UserError if the devices are not there."""
    import torch

    if chain.deployment_type == "multi_node":
        hosts = "" if chain.hostfile is None else f" on the hosts of {chain.hostfile}"
        raise UserError(
            f"--deployment-type multi_node: this version does not start processes{hosts}; expected single_gpu or "
            "single_node; start each stage on every node with torchrun --nnodes N ... -m step1_sft"
        )
    if chain.hostfile is not None:
        raise UserError(
            f"--hostfile {chain.hostfile}: got --deployment-type {chain.deployment_type}, expected multi_node"
        )
    if chain.deployment_type == "single_gpu":
        if (chain.num_processes or 1) > 1:
            raise UserError(
                f"--num-processes {chain.num_processes}: one GPU has one; add --deployment-type single_node"
            )
        return 1
    gpus = torch.cuda.device_count()
    wanted = chain.num_processes or max(1, gpus)
    most = gpus or max(2, launch.cores())
    if wanted > most:
        there = f"{gpus} GPUs are visible" if gpus else f"this machine has no GPU and {launch.cores()} cores"
        raise UserError(f"--num-processes {wanted}: {there}, expected at most {most}")
    return wanted


def plan(chain: Any, count: int) -> dict[int, Any]:
    """The stages to run, by step, with their options; says which of the others are finished.

    Every stage is checked before any is started. Raises: UserError.
    """
    from rlhf import checkpoint, record, run

    checkpoint.require_writable(chain.output_dir)
    planned: dict[str, str] = {}
    todo: dict[int, Any] = {}
    finished = []
    for step in sorted(set(chain.steps)):
        options, name = getattr(chain, SECTIONS[step]), STAGES[step]
        stage = importlib.import_module(f"{name}.stage")
        state = run.state(name, options, stage.inputs(options), partial(stage.content, options), planned)
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


def run_stage(step: int, options: Any, count: int) -> None:
    """Start one stage and wait. Leaves with the stage's exit code if that is not 0."""
    stage = STAGES[step]
    with tempfile.TemporaryDirectory(prefix=f"{stage}-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(config.to_yaml(options), encoding="utf-8")
        code = launch.run(stage, ["--config", str(path)], count)
    if code != 0:
        if code not in launch.SAID:
            print(f"\n{stage} ended with {launch.name_of(code)}; no later stage was started", file=sys.stderr)
        raise SystemExit(code if code > 0 else 128 - code)


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
    from rlhf.record import quiet_libraries

    quiet_libraries()
    count = processes(chain)
    todo = plan(chain, count)
    if todo:
        print(note, end="", flush=True)
        save(chain)
    for step, options in todo.items():
        run_stage(step, options, count)
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

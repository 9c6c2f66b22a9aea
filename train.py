"""The chain: supervised fine-tuning, reward model, PPO, each a process (or a group of them) of its own.

    python train.py                                                      the demo
    python train.py --actor-model opt-1.3b --reward-model opt-350m --deployment-type single_node
"""

import importlib
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import create_model

from data.config import DataOptions
from rlhf import config, plugins
from rlhf.config import Config, UserError
from rlhf.options import EngineOptions, RunOptions
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import Step3Config

STAGES = {1: "step1_sft", 2: "step2_reward", 3: "step3_ppo"}
SECTIONS = {1: "sft", 2: "reward", 3: "ppo"}
DEMO = Path(__file__).parent / "configs" / "demo.yaml"
REPORTING = {"output_dir", "report_to", "sample_rows"}


class ChainConfig(DataOptions, EngineOptions, RunOptions):
    """All three stages. An option given here holds for every stage that does not set its own."""

    actor_model: str = "opt-1.3b"
    """pretrained model that becomes the policy: directory, hub id, short name or .yaml"""
    reward_model: str = "opt-350m"
    """pretrained model that becomes reward model and critic"""
    deployment_type: Literal["single_gpu", "single_node", "multi_node"] = "single_gpu"
    """single_gpu: one process, on the CPU where there is no GPU; single_node: one process per visible GPU;
    multi_node: the same on every host of --hostfile"""
    num_processes: int | None = None
    """processes of single_node; by default the number of visible GPUs"""
    hostfile: str | None = None
    """hosts of multi_node, one 'name slots=N' a line"""
    steps: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    """the part of the chain to run; inputs of the rest are found in the output directory"""
    overwrite: bool = False
    """run these steps again even if they are finished"""
    output_dir: str = "runs/rlhf"
    """directory of the run: step1_sft/, step2_reward/, step3_ppo/"""
    sft: SFTConfig = SFTConfig()
    reward: RewardConfig = RewardConfig()


def chain_config(argv: list[str]) -> type[ChainConfig]:
    """ChainConfig with the options of the chosen algorithm as its `ppo` section."""
    algorithm = config.peek(argv, "ppo.algorithm", "ppo")
    options = plugins.find("step3_ppo.algorithms", algorithm).Config
    return create_model("ChainConfig", __base__=ChainConfig, ppo=(options, options(algorithm=algorithm)))


def stage_config(chain: Any, step: int) -> Any:
    """The options of one stage: its section, with what it leaves at the default taken from the top."""
    section = getattr(chain, SECTIONS[step])
    shared = [*DataOptions.model_fields, *EngineOptions.model_fields, *RunOptions.model_fields]
    taken = {
        name: getattr(chain, name)
        for name in shared
        if getattr(section, name) == type(section).model_fields[name].default
    }
    if isinstance(section, SFTConfig):
        taken["model"] = chain.actor_model
    elif isinstance(section, RewardConfig):
        taken["model"] = chain.reward_model
    elif isinstance(section, Step3Config):
        taken |= _inputs_named_above(chain, section)
    return section.model_copy(update=taken)


def _inputs_named_above(chain: Any, section: Step3Config) -> dict[str, str]:
    """A model that this chain neither trains nor has trained is the one named at the top."""
    taken = {}
    for step, name in ((1, "actor_model"), (2, "reward_model")):
        trained = step in chain.steps or (Path(chain.output_dir) / STAGES[step]).is_dir()
        if not trained and getattr(section, name) is None and getattr(chain, name) != ChainConfig.model_fields[name].default:
            taken[name] = getattr(chain, name)
    return taken


def processes(chain: ChainConfig) -> int:
    """How many processes a stage gets. Raises: UserError if the devices are not there."""
    import torch

    gpus = torch.cuda.device_count()
    if chain.deployment_type == "multi_node":
        raise UserError(
            "--deployment-type multi_node: this version starts one node only; start each stage on every node with "
            "torchrun --nnodes N -m step1_sft ..., or use single_node"
        )
    if chain.deployment_type == "single_gpu":
        return 1
    wanted = chain.num_processes or max(1, gpus)
    if gpus and wanted > gpus:
        raise UserError(f"--num-processes {wanted}: {gpus} GPUs are visible; expected at most that many")
    return wanted


def is_finished(stage: str, options: Any) -> bool:
    """Whether the stage's output is whole and was made with these options.

    Raises: UserError with the first differences if it was made with others, or is damaged.
    """
    from rlhf import checkpoint

    directory = Path(options.output_dir) / stage
    if not (directory / checkpoint.MANIFEST).is_file():
        return False
    before = checkpoint.read_manifest(directory)["config"]
    now = options.model_dump(mode="json")
    changed = [n for n in now if n not in REPORTING and n in before and before[n] != now[n]]
    if changed:
        lines = ", ".join(f"{name} was {before[name]!r}, now {now[name]!r}" for name in changed[:4])
        raise UserError(f"{directory}: finished with other options ({lines}); name another --output-dir, or --overwrite")
    return True


def run_stage(step: int, options: Any, count: int) -> None:
    """Start one stage and wait. Leaves with the stage's exit code if that is not 0."""
    from rlhf import checkpoint, launch

    stage = STAGES[step]
    path = Path(options.output_dir) / stage / checkpoint.RUN_CONFIG
    path.write_text(config.to_yaml(options), encoding="utf-8")
    code = launch.run(stage, ["--config", str(path)], count)
    if code != 0:
        print(f"{stage} ended with exit code {code}; later stages were not started", file=sys.stderr)
        raise SystemExit(code if code > 0 else 128 - code)


def main() -> None:
    argv = sys.argv[1:]
    if not any(word.startswith(("--config", "--actor-model", "--actor_model")) for word in argv):
        argv = ["--config", _base_config(argv), *argv]
    chain = config.parse(chain_config(argv), argv, "python train.py", (__doc__ or "").split("\n")[0])
    from rlhf.record import quiet_libraries
    from rlhf.run import require_writable

    quiet_libraries()

    count = processes(chain)
    stages = {step: stage_config(chain, step) for step in sorted(set(chain.steps))}
    for step, options in stages.items():
        require_writable(options, STAGES[step])
    todo = {s: o for s, o in stages.items() if chain.overwrite or not is_finished(STAGES[s], o)}
    for step in stages:
        if step not in todo:
            print(f"{STAGES[step]}: already complete in {chain.output_dir}, skipped")
    for step, options in todo.items():
        importlib.import_module(f"{STAGES[step]}.stage").check(options, planned=set(map(STAGES.get, todo)))
    (Path(chain.output_dir) / "config.yaml").write_text(config.to_yaml(chain), encoding="utf-8")
    for step, options in todo.items():
        run_stage(step, options, count)
    print(next_step(chain))


def _base_config(argv: list[str]) -> str:
    """What the command line is laid over: the run that a part of the chain continues, else the demo."""
    before = Path(config.peek(argv, "output-dir", "runs/demo")) / "config.yaml"
    if "--steps" in argv and before.is_file():
        print(f"continuing with the options of {before}")
        return str(before)
    return str(DEMO)


def next_step(chain: ChainConfig) -> str:
    """What to do with the result."""
    actor = Path(chain.output_dir) / "step3_ppo" / "actor"
    if not actor.is_dir():
        return f"next: python train.py --steps 3 --output-dir {chain.output_dir}"
    return (
        f"\nThe tuned policy is {actor}: AutoModelForCausalLM.from_pretrained loads it.\n"
        f"Numbers: {chain.output_dir}/step*/metrics.jsonl and manifest.json. Your own data and models:\n"
        "  python train.py --actor-model DIR --reward-model DIR --data-path my_pairs.jsonl --output-dir runs/mine"
    )


if __name__ == "__main__":
    raise SystemExit(config.run_as_user(main))

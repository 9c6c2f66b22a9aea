"""`python -m benchmarks.ppo_quality`: does step 3 learn, and at which KL, compared with TRL's PPOTrainer?

From one SFT model and one reward model (steps 1 and 2 of a recipe), PPO runs here and in TRL with each seed: the same
prompts in the same order, the same sampling, episodes, epochs, minibatches and learning rates. The true score is that
of the recipe's judge, which no stage trains on. It is computed for every response that either system trained on, and
for both final policies on held-out prompts.

    python -m benchmarks.ppo_quality --data-path rt_polarity:DIR

Differences between the libraries: TRL has no gradient clipping (ours: norm 1), changes its learning rate once per
iteration (to the mean of ours), has one loss for both models (vf_coef 0.1, which AdamW's normalisation cancels), and
computes in fp32 (ours: bf16 where that is fast, fp32 master weights). PPOTrainer takes old log-probs from generation:
rounding them to bf16 would add noise to its ratios, so fp32 is its best case.

Cost, with the default recipe on one core of an AMD EPYC with AVX512-BF16: an iteration takes about 90 seconds here and
140 in TRL, so the 22 iterations of 3 seeds take 5 hours, after 20 minutes for steps 1 and 2; on two cores about half.
6 GB of memory, 2 GB of disk per seed. The CSV has the seconds of every iteration. Finished parts are skipped, so a run
can be interrupted, and --parts and --seeds can be divided among several calls.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from benchmarks.cells import ROOT, resolve_chain
from rlhf import errors
from rlhf.config import Config, parser
from rlhf.errors import UserError
from rlhf.storage import disk

RECIPE = ROOT / "configs" / "recipes" / "smollm2-135m-sentiment-cpu.yaml"
SHARED = (
    "batch_size", "rollout_batch_size", "num_mini_batches", "num_ppo_epochs", "response_length", "temperature",
    "missing_eos_penalty", "kl_coef", "cliprange", "cliprange_value", "gamma", "lam",
    "learning_rate", "critic_learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
)  # fmt: skip
"""options that TRL gets unchanged"""


class Options(Config):
    """What to run, and where."""

    parts: tuple[Literal["base", "ours", "trl", "evaluate", "report"], ...] = (
        "base", "ours", "trl", "evaluate", "report",
    )  # fmt: skip
    """base: SFT and reward model; ours, trl: PPO with each seed; evaluate: all policies on held-out prompts; report:
    tables, CSV and picture of the finished runs"""
    seeds: tuple[int, ...] = (0, 1, 2)
    """seeds of PPO; all use the same SFT and reward model"""
    recipe: str = str(RECIPE)
    """YAML file of a chain"""
    data_path: tuple[str, ...] = ()
    """paths of the data instead of the recipe's"""
    model: str | None = None
    """pretrained model for policy and reward model instead of the recipe's"""
    base: str | None = None
    """directory with step1_sft and step2_reward; by default OUT/base, where the part base trains them"""
    total_episodes: int | None = None
    """instead of the recipe's"""
    output_dir: str = "runs/ppo_quality"
    """runs, models and rollouts"""
    results: str = "docs/results"
    """directory of the report"""
    name: str = "sentiment"
    """name of the report's files"""

    @property
    def base_dir(self) -> Path:
        return Path(self.base or f"{self.output_dir}/base")

    def run_dir(self, system: str, seed: int) -> Path:
        return Path(self.output_dir) / f"{system}-{seed}"


def base_command(options: Options) -> list[str]:
    """Steps 1 and 2 of the recipe."""
    command = ["train.py", "--config", options.recipe, "--steps", "1", "2", "--output-dir", str(options.base_dir)]
    if options.data_path:
        command += ["--data-path", *options.data_path]
    if options.model is not None:
        command += ["--actor-model", options.model, "--reward-model", options.model]
    return [sys.executable, *command]


def ppo_options(options: Options, seed: int) -> Any:
    """Step 3 of the recipe, from the base's models, with the judge as a reward source of weight 0."""
    data = ["--data-path", *options.data_path] if options.data_path else []
    ppo = resolve_chain(["--config", options.recipe, *data]).ppo
    if ppo.judge is None or ppo.algorithm != "ppo" or ppo.num_generations != 1:
        raise UserError(f"{options.recipe}: expected PPO with a judge, one response a prompt")
    changes = {
        "actor_model": str(options.base_dir / "step1_sft"),
        "reward_model": str(options.base_dir / "step2_reward"),
        "reward": ("learned", f"0*{ppo.judge}"),
        "export_rollouts": True,
        "seed": seed,
        "output_dir": str(options.run_dir("ours", seed)),
    }
    if options.total_episodes is not None:
        changes["total_episodes"] = options.total_episodes
    return ppo.model_copy(update=changes)


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    """env: further environment variables. Raises: UserError if the command fails; it has printed the reason."""
    print("+", " ".join(command), flush=True)
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false"} | (env or {})
    code = subprocess.run(command, cwd=ROOT, check=False, env=env).returncode
    if code:
        raise UserError(f"{' '.join(command[:3])} ... ended with code {code}")


def make_base(options: Options) -> None:
    if all((options.base_dir / stage / "manifest.json").is_file() for stage in ("step1_sft", "step2_reward")):
        print(f"base: {options.base_dir} is there")
    else:
        run(base_command(options))


def run_ours(options: Options, seed: int) -> None:
    """Run step 3, unless it is finished."""
    ppo = ppo_options(options, seed)
    path = options.run_dir("ours", seed) / "ppo.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(parser.to_yaml(ppo), encoding="utf-8")
    run([sys.executable, "-m", "step3_ppo", "--config", str(path)])


def run_trl(options: Options, seed: int) -> None:
    """Run TRL, and score its rollouts with our judge, unless that is finished. rollouts.jsonl has the columns that
    step 3 exports. Raises: UserError if it is finished with other settings."""
    from benchmarks import trl_judging

    folder = options.run_dir("trl", seed)
    folder.mkdir(parents=True, exist_ok=True)
    ppo = ppo_options(options, seed)
    plan = trl_judging.plan(ppo)
    settings = trl_settings(ppo, folder, plan)
    trained, judged = ((folder / name).is_file() for name in ("versions.json", "rollouts.jsonl"))  # each written last
    if trained or judged:
        require_same_settings(folder, settings)
    if judged:
        print(f"trl: {folder} is there")
        return
    if not trained:
        train_in_trl(folder, settings)
    trl_judging.judge(ppo, plan, folder)


def train_in_trl(folder: Path, settings: dict[str, Any], env: dict[str, str] | None = None) -> None:
    """TRL's PPOTrainer with the settings of `trl_settings`; leaves its policy in `folder`/model. env: as of `run`"""
    from benchmarks import peers

    disk.write_text(folder / "settings.json", json.dumps(settings))
    command = [sys.executable, "-m", "benchmarks.trl_ppo", str((folder / "settings.json").resolve())]
    run(command, peers.environment(peers.PPO) | (env or {}))


def require_same_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raises: UserError if TRL ran in `folder` with other settings."""
    stored, own = disk.read_json(folder / "settings.json"), json.loads(json.dumps(settings))
    changed = [name for name in own if name != "output_dir" and stored.get(name) != own[name]]
    if changed:
        raise UserError(
            f"{folder}: got a finished run with other settings ({', '.join(changed)}), expected those of this call; "
            f"name another --output-dir, or remove {folder}"
        )


def trl_settings(ppo: Any, folder: Path, plan: Any) -> dict[str, Any]:
    """The settings of TRL's half. plan: the token ids of prompts, and the learning rate, of every iteration."""
    from rlhf.storage.manifests import resolve_model_path

    return {name: getattr(ppo, name) for name in SHARED} | {
        "actor_model": str(Path(resolve_model_path(ppo.actor_model, "model")).resolve()),
        "reward_model": str(Path(resolve_model_path(ppo.reward_model, "model")).resolve()),
        "output_dir": str(folder.resolve()),
        "seed": ppo.seed,
        "learning_rate_factors": plan.learning_rate_factors,
        "prompts": plan.ids,
    }


def policies(options: Options) -> Iterator[tuple[str, int, Path]]:
    """(system, seed, path) of every finished policy."""
    ends = ("ours", "step3_ppo", "step3_ppo/manifest.json"), ("trl", "model", "rollouts.jsonl")
    for system, model, last_file in ends:
        for seed in options.seeds:
            folder = options.run_dir(system, seed)
            if (folder / last_file).is_file():
                yield system, seed, folder / model


def evaluate_command(ppo: Any, policy_paths: list[str], prompts: Path, output: Path) -> list[str]:
    """The judge on held-out prompts; the SFT model is the baseline and the reference of the KL."""
    arguments = ["--policies", str(ppo.actor_model), *policy_paths, "--prompts", str(prompts)]
    arguments += ["--reward", str(ppo.judge)]
    arguments += ["--response-length", str(ppo.response_length), "--temperature", str(ppo.temperature)]
    arguments += ["--micro-batch-size", str(ppo.micro_batch_size), "--rollout-batch-size", str(ppo.rollout_batch_size)]
    return [sys.executable, "-m", "rlhf", "evaluate", *arguments, "--output", str(output), "--overwrite"]


def evaluate(options: Options) -> None:
    """Evaluate all finished policies on the prompts that the recipe holds out; again if more have finished."""
    from benchmarks import trl_judging

    policy_paths = [str(path) for _, _, path in policies(options)]
    output = Path(options.output_dir) / "heldout"
    finished = output / "policies.json"
    if finished.is_file() and json.loads(finished.read_text(encoding="utf-8")) == policy_paths:
        print(f"evaluate: {output} is there")
        return
    output.mkdir(parents=True, exist_ok=True)
    ppo = ppo_options(options, options.seeds[0])
    trl_judging.write_heldout(ppo, output / "prompts.jsonl")
    run(evaluate_command(ppo, policy_paths, output / "prompts.jsonl", output))
    finished.write_text(json.dumps(policy_paths), encoding="utf-8")


def main() -> int:
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.ppo_quality", "PPO here and in TRL.")
    if "base" in options.parts:
        make_base(options)
    for seed in options.seeds:
        if "ours" in options.parts:
            run_ours(options, seed)
        if "trl" in options.parts:
            run_trl(options, seed)
    if "evaluate" in options.parts:
        evaluate(options)
    if "report" in options.parts:
        from benchmarks import ppo_report

        ppo_report.report(
            {(system, seed): options.run_dir(system, seed) for system, seed, _ in policies(options)},
            Path(options.output_dir) / "heldout" / "results.json",
            Path(options.results),
            options.name,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

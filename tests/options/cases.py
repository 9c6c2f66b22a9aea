"""Which value every option is changed to, from a run in which all of them are at work.

Each number of the base differs from the default and from its neighbours, and so does each value beside it: an option
that is ignored, doubled, or read from another makes other weights.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf import plugins
from rlhf.config import Config
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig

SCORES = Path(__file__).with_name("scores.py")
AT_ONCE = 8
"""options changed together in one run"""
ALGORITHMS = ("ppo", *(name for name in plugins.names("step3_ppo.algorithms") if name != "ppo"))
Table = dict[str, list[Any]]


@dataclass(frozen=True)
class Case:
    """One option of one stage at `value`, beside `context` where the base leaves the option without effect."""

    stage: str
    option: str
    value: Any
    context: dict[str, Any] = field(default_factory=dict)
    algorithm: str = ""
    alone: bool = False

    @property
    def changes(self) -> dict[str, Any]:
        return {**self.context, self.option: self.value}

    def __str__(self) -> str:
        return f"{self.algorithm or self.stage} {self.option}={self.value}".replace(str(SCORES.parent), "")


@dataclass(frozen=True)
class Alone:
    """A value that shares its run with no other option, beside the `context` that its option needs."""

    value: Any
    context: dict[str, Any]


def alone(value: Any, **context: Any) -> Alone:
    return Alone(value, context)


COMMON: dict[str, Any] = {
    "chat_template": "human_assistant",
    "dtype": "fp32",
    "data_workers": 1,
    "overwrite": True,
    "sample_rows": 0,
    "seed": 3,
    "data_seed": 5,
    "data_split": (1, 1, 2),
    "eval_fraction": 0.2,
    "max_prompt_length": 16,
    "max_length": 32,
    "max_eval_rows": 6,
    "micro_batch_size": 5,
    "warmup_ratio": 0.3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 0.05,
    "weight_decay": 0.1,
    "max_grad_norm": 0.7,
}
SUPERVISED = {"batch_size": 4, "max_train_rows": 8, "num_train_epochs": 2, "learning_rate": 0.04}
RL: dict[str, Any] = {
    "batch_size": 8,
    "num_generations": 2,
    "total_episodes": 16,
    "response_length": 6,
    "temperature": 0.8,
    "rollout_batch_size": 5,
    "num_ppo_epochs": 2,
    "learning_rate": 0.04,
    "critic_learning_rate": 0.03,
    "entropy_coef": 0.02,
    "ema_decay": 0.6,
    "missing_eos_penalty": 0.7,
    "eval_samples": 4,
    "reward": ("0.7*learned", f"1.5*{SCORES}:score", "length,target=3"),
    # of some algorithms only
    "use_score_scaling": True,
    "use_score_norm": True,
    "score_clip": 1.3,
    "kl_coef": 0.2,
    "kl_estimator": "k3",
    "gamma": 0.9,
    "lam": 0.8,
    "cliprange": 0.15,
    "cliprange_value": 0.1,
}
OWN: dict[str, dict[str, Any]] = {
    "a2c": {"num_ppo_epochs": 1},
    "best_of_n": {"use_score_scaling": False, "use_score_norm": False, "score_clip": None},
}

OPTIMIZER: Table = {
    "learning_rate": [0.011],
    "lr_scheduler_type": ["constant_with_warmup", "cosine"],
    "warmup_ratio": [0.5],
    "adam_beta1": [0.5],
    "adam_beta2": [0.6],
    "max_grad_norm": [0.0, 0.25],
    "micro_batch_size": [3],
    "seed": [4],
    "adam_epsilon": [0.2],
    "weight_decay": [0.7],
}
BATCHES: Table = {
    "batch_size": [2],
    "group_by_length": [alone(False)],
    "num_train_epochs": [3],
    "max_train_rows": [10],
    "max_eval_rows": [2],
}
SCHEDULES: Table = {
    "lr_scheduler_type": [*OPTIMIZER["lr_scheduler_type"], alone("constant"), alone("inverse_sqrt")],
    "lr_power": [alone(1.7, lr_scheduler_type="polynomial")],
    "lr_num_cycles": [alone(2, lr_scheduler_type="cosine_with_restarts", num_train_epochs=3)],
    "warmup_steps": [alone(2)],
}
"""of the engine, which is one for all stages: step 1 has their cases"""
PTX: dict[str, Any] = {"ptx_coef": 0.6, "ptx_batch_size": 6, "ptx_data_path": ("{folder}/other.jsonl",)}
WATCHED: dict[str, Any] = {
    "eval_every": 1,
    "judge": f"{SCORES}:score",
    "keep_best": "eval_judge",
    "patience": 2,
    "total_episodes": 48,
}
STEP3: Table = {
    "critic_learning_rate": [0.013],
    "eval_samples": [2],
    "batch_size": [4],
    "num_generations": [alone(4)],
    "total_episodes": [24],
    "num_mini_batches": [alone(2)],
    "num_ppo_epochs": [3],
    "rescore": [alone(False, num_ppo_epochs=1)],
    "response_length": [9],
    "temperature": [1.7],
    "rollout_batch_size": [2],
    "target_kl": [alone(0.09, num_ppo_epochs=4, total_episodes=16)],
    "critic_warmup_iterations": [alone(1, total_episodes=24)],
    "critic_pretraining_epochs": [alone(1.2, batch_size=4)],
    "entropy_coef": [0.3],
    **{name: [alone(value, **PTX)] for name, value in PTX.items()},
    "ptx_objective": [alone("text", ptx_coef=0.4, ptx_batch_size=4, ptx_data_path=("{folder}/texts.jsonl",))],
    "ema_decay": [0.25],
    "use_score_scaling": [alone(False, use_score_norm=False)],
    "use_score_norm": [False],
    "score_clip": [0.6, None],
    "missing_eos_penalty": [2.1],
    "reward_model": ["{folder}/critic"],
    "reward": [
        ("0.7*learned", f"-0.4*{SCORES}:score", "0*length,target=3"),
        ("learned,model={folder}/critic", f"{SCORES}:far", "length,target=2,penalty=0.05"),
    ],
    "reward_combine": ["min", alone("uncertain", uncertainty_coef=0.37)],
    "uncertainty_coef": [alone(0.37, reward_combine="uncertain")],
    "actor_model": ["{folder}/other"],
    "critic_model": ["{folder}/reward", alone("policy"), alone("shared")],
    "vf_coef": [alone(0.6, critic_model="shared", critic_warmup_iterations=1, total_episodes=24)],
    "max_eval_rows": [2],
    "max_train_rows": [8],
    **{name: [alone(value, **WATCHED)] for name, value in WATCHED.items() if name != "total_episodes"},
}
CLIPPED: Table = {
    "cliprange": [0.05],
    "cliprange_high": [0.3],
    "dual_clip": [alone(1.001, num_ppo_epochs=3)],
    "loss_aggregation": ["sequence"],
    "tis_cap": [0.6],
}
KL: Table = {"kl_coef": [0.6]}
STEERED: Table = {
    "kl_budget": [alone(0.6, total_episodes=24, kl_coef=0.05)],
}
"""near the KL of the last iteration but one: e times further away, all budgets steer alike. One controller steers
every algorithm: PPO has its case."""

GAE: Table = {"gamma": [0.4], "lam": [0.3], "whiten_advantages": [False]}
GROUPED: Table = {"num_generations": [alone(6, batch_size=12, total_episodes=24)]}
EVERY_TOKEN = (alone("every_token,centering=0.07,token_coef=0.7", micro_batch_size=2), alone("every_token"))
TEXT = alone("text", data_path=("{folder}/texts.jsonl",), max_train_rows=None, max_length=12)


def watched(metric: str, **context: Any) -> Table:
    """Evaluations of steps 1 and 2, whose best model is kept, and which end a run at a rate that is too high."""
    values = {"eval_every": "0.5epochs", "keep_best": metric, "patience": 2, "num_train_epochs": 5, **context}
    return {name: [alone(values[name], **values)] for name in ("eval_every", "keep_best", "patience")}


TABLES: dict[str, Table] = {
    "step1_sft": OPTIMIZER | SCHEDULES | BATCHES | watched("eval_perplexity")
    | {"loss_on": ["every", "all"], "objective": [TEXT], "batch_tokens": [60]},
    "step2_reward": OPTIMIZER | BATCHES | watched("eval_loss")
    | {"batch_tokens": [72], "head_learning_rate": [0.013]}
    | {"objective": ["pairwise,centering=0.5,label_smoothing=0.3", *EVERY_TOKEN]},
    "ppo": OPTIMIZER | STEP3 | KL | STEERED | CLIPPED | GAE
    | {"cliprange_value": [0.04], "loss_aggregation": ["sequence", "constant"]},
    "a2c": KL | GAE | {"whiten_advantages": [True]},
    "reinforce": KL | CLIPPED | {"gamma": [0.4]},
    "rloo": KL | CLIPPED | GROUPED | {"whiten_advantages": [True]},
    "grpo": KL | CLIPPED | GROUPED
    | {"kl_estimator": ["k2"], "scale_rewards": [False], "scale_rewards_by": [alone("batch")]}
    | {"importance_sampling_level": ["sequence"]},
    "best_of_n": GROUPED,
}  # fmt: skip


def cases() -> list[Case]:
    result = []
    for name, table in TABLES.items():
        stage, algorithm = ("step3_ppo", name) if name in ALGORITHMS else (name, "")
        for option, values in table.items():
            for value in values:
                by_itself = isinstance(value, Alone)
                value, context = (value.value, value.context) if by_itself else (value, {})
                result.append(Case(stage, option, value, context, algorithm, by_itself))
    return result


@dataclass(frozen=True)
class Bundle:
    """Cases that share one run."""

    cases: tuple[Case, ...]

    @property
    def stage(self) -> str:
        return self.cases[0].stage

    @property
    def algorithm(self) -> str:
        return self.cases[0].algorithm

    def __str__(self) -> str:
        options = ", ".join(str(case).partition(" ")[2] for case in self.cases)
        return f"{self.algorithm or self.stage} {options}"

    @property
    def cure(self) -> str:
        """What to try if the run is not as predicted."""
        if len(self.cases) == 1:
            return ""
        return (
            "\nThese options are changed in one run, and a new case moves others into it. Write the new case as "
            "alone(VALUE) in tests/options/cases.py, which gives it a run of its own: a number that is still off is a "
            "fault; if none is, together they made rounding larger, and the case stays alone."
        )

    @property
    def changes(self) -> dict[str, Any]:
        return {name: value for case in self.cases for name, value in case.changes.items()}


def bundles() -> list[Bundle]:
    """All cases in few runs, AT_ONCE options in each at most. What is predicted of a run depends on all its options."""
    groups: list[list[Case]] = []
    for case in cases():
        bundle = next((bundle for bundle in groups if fits(case, bundle)), None)
        if bundle is None:
            groups.append([case])
        else:
            bundle.append(case)
    return [Bundle(tuple(bundle)) for bundle in groups]


JOINT = {
    "group_by_length", "eval_every", "objective", "num_generations", "num_mini_batches", "target_kl", "ptx_coef",
    "vf_coef", "kl_budget", "critic_pretraining_epochs",
}  # fmt: skip
"""options with a run of their own whose numbers ranks make together"""


def on_two_ranks() -> list[Bundle]:
    """Every run that several options share, the first of each algorithm, and one for each of JOINT. Left out are
    schedules of the learning rate, and options of single rows: ranks exchange nothing for them."""
    chosen: list[Bundle] = []
    for bundle in bundles():
        first = bundle.cases[0]
        covered = {(other.stage, other.cases[0].option) for other in chosen}
        joint = first.option in JOINT and (first.stage, first.option) not in covered
        if not first.alone or joint or bundle.algorithm not in {other.algorithm for other in chosen}:
            chosen.append(bundle)
    return chosen


def sharded() -> list[Bundle]:
    """The first bundle of each stage, and one whose critic is on the actor: on two ranks, its models lie in parts
    (ZeRO-3)."""
    first: dict[str, Bundle] = {}
    for bundle in bundles():
        first.setdefault(bundle.stage, bundle)
    return [*first.values(), *(bundle for bundle in bundles() if "vf_coef" in bundle.changes)]


def fits(case: Case, bundle: list[Case]) -> bool:
    first = bundle[0]
    if (first.stage, first.algorithm, first.alone) != (case.stage, case.algorithm, case.alone):
        return False
    if case.alone:
        return first.changes == case.changes
    return len(bundle) < AT_ONCE and case.option not in {other.option for other in bundle}


def config_class(stage: str, algorithm: str = "") -> type[Config]:
    if stage == "step3_ppo":
        cls: type[Config] = plugins.find("step3_ppo.algorithms", algorithm).Config
        return cls
    return {"step1_sft": SFTConfig, "step2_reward": RewardConfig}[stage]


def config_of(folder: Path, stage: str, algorithm: str = "", **changes: Any) -> Any:
    """The base with `changes`; FOLDER is where world.make wrote."""
    cls = config_class(stage, algorithm)
    options: dict[str, Any] = {
        "data_path": ("{folder}/pairs.jsonl",),
        "data_cache": "{folder}/cache",
        "output_dir": "{folder}/out",
        **COMMON,
    }
    if stage == "step3_ppo":
        models = {f"{name}_model": f"{{folder}}/{name}" for name in ("actor", "reward", "critic")}
        options |= RL | models | {"algorithm": algorithm} | OWN.get(algorithm, {})
    else:
        options |= SUPERVISED | {"model": "{folder}/actor"}
        options |= {"objective": "pairwise,centering=0.07"} if stage == "step2_reward" else {}
    options = {name: value for name, value in options.items() if name in cls.model_fields} | changes
    return cls(**{name: _in(folder, value) for name, value in options.items()})


def _in(folder: Path, value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("{folder}", str(folder))
    return tuple(_in(folder, part) for part in value) if isinstance(value, tuple | list) else value

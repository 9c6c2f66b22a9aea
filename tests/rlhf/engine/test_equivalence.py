"""Runs that must make the same model, through the real command line: however rows are dealt to processes and
micro-batches, under every ZeRO stage, and twice.

Two tolerances hold everywhere: the greatest difference and the mean one, of all weights and of all numbers that are
logged (relative to 1, or to the number where that is more).
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from rlhf.launch import launcher

STAGES = ("step1_sft", "step2_reward", "step3_ppo")
COMMON: dict[str, Any] = {
    "chat_template": "human_assistant",
    "dtype": "fp32",
    "max_prompt_length": 24,
    "max_length": 48,
    "max_eval_rows": 9,  # unequal shares of two processes
    "sample_rows": 0,
    "batch_size": 8,
    "micro_batch_size": 8,
    "adam_epsilon": 1e-5,  # so that a gradient of nothing but rounding makes no step
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
}
OWN: dict[str, dict[str, Any]] = {
    "step1_sft": {"model": "demo-llama", "learning_rate": 3e-3},
    "step2_reward": {"model": "demo-llama", "learning_rate": 2e-3},
    "step3_ppo": {
        "total_episodes": 24,
        "response_length": 16,
        "num_ppo_epochs": 2,
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "rollout_batch_size": 8,
        "eval_samples": 9,
    },
}
ROWS = 140
PASSING = ("seconds", "padding", "tokens_per_second", "peak_memory")
"""Numbers that tell of speed, or of how rows were cut up."""
LAST_DIGIT = 1e-5
"""the most that a number differs in relation to itself where the last of its six digits does"""
WORDS = "red blue green fox owl bear kind calm brave tall quiet young rude mean cruel forest garden river"


@dataclass(frozen=True)
class Made:
    """What a stage left: its weights, and every number it logged."""

    weights: dict[str, Tensor]
    numbers: dict[str, float]


Run = Callable[..., Made]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(stage, processes, **options)`, each different call once; step 3 starts from what the first two make."""
    folder = tmp_path_factory.mktemp("runs")
    write_rows(folder / "rows.jsonl")
    results: dict[str, Made] = {}
    folders: dict[str, Path] = {}

    def call(stage: str, processes: int = 1, again: bool = False, **options: Any) -> Made:
        key = named(stage, processes, again, options)
        if key not in results:
            chosen = COMMON | OWN[stage] | {"data_path": [str(folder / "rows.jsonl")]}
            if stage == "step3_ppo":
                chosen |= {"actor_model": str(start("step1_sft")), "reward_model": str(start("step2_reward"))}
            out = folders[key] = folder / f"{len(results)}"
            results[key] = start_and_read(stage, processes, out, chosen | {"output_dir": str(out)} | options)
        return results[key]

    def start(stage: str) -> Path:
        call(stage)
        return folders[named(stage, 1, False, {})] / stage

    def named(*words: Any) -> str:
        return json.dumps(words, sort_keys=True)

    return call


def write_rows(path: Path) -> None:
    """Preferences of very unequal lengths, in words that the demo's model knows."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            prompt, chosen, rejected = (" ".join(draw.choices(WORDS.split(), k=draw.randint(1, 14))) for _ in range(3))
            file.write(json.dumps({"prompt": f"tell me about {prompt}", "chosen": chosen, "rejected": rejected}) + "\n")


def start_and_read(stage: str, processes: int, out: Path, options: dict[str, Any]) -> Made:
    out.mkdir()
    (out / "options.yaml").write_text(yaml.safe_dump(options))
    assert launcher.run(stage, ["--config", str(out / "options.yaml")], processes) == 0
    files = sorted((out / stage).glob("[amc]*/model.safetensors"))
    weights = {f"{file.parent.name}.{name}": w for file in files for name, w in load_file(file).items()}
    lines = map(json.loads, (out / stage / "metrics.jsonl").read_text().splitlines())
    numbers = {
        f"{line['kind']} {line['step']} {name}": value
        for line in lines
        for name, value in line.items()
        if isinstance(value, float) and not any(word in name for word in PASSING)
    }
    return Made(weights, numbers)


def require_alike(one: Made, other: Made, most: float, mean: float, numbers: float | None = None) -> None:
    """`most` and `mean` difference of weights; `numbers` of what was logged (by default twice `most`, as six digits
    are), and a tenth of it in the mean."""
    assert set(one.weights) == set(other.weights) and set(one.numbers) == set(other.numbers)
    apart = torch.cat([(w.float() - other.weights[name].float()).abs().flatten() for name, w in one.weights.items()])
    gaps = {name: abs(n - other.numbers[name]) / max(1.0, abs(n)) for name, n in one.numbers.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    message = f"weights {apart.max():.1e}, mean {apart.mean():.1e}; {worst} {gaps[worst]:.1e}"
    print(message)
    limit = 2 * most if numbers is None else numbers
    assert apart.max() <= most and apart.mean() <= mean, message
    assert gaps[worst] <= limit and sum(gaps.values()) / len(gaps) <= limit / 10 + 1e-12, message


@pytest.mark.faults
def test_the_rows_are_unequally_long_and_something_is_learned(run: Run) -> None:
    result = run("step1_sft")
    losses = [value for name, value in result.numbers.items() if name.endswith(" loss")]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1


def losses_of(result: Made) -> Made:
    return Made(result.weights, {name: value for name, value in result.numbers.items() if name.endswith("loss")})


EACH_ITS_OWN: dict[str, Any] = {
    "zero_stage": 3,
    "critic": {"zero_stage": 2},
    "reference": {"offload": True},
    "reward_models": {"zero_stage": 0},
}
SPREAD: dict[str, dict[str, Any]] = {
    "step1_sft": {"zero_stage": 3, "offload_optimizer": True},
    "step2_reward": {"zero_stage": 3, "gradient_checkpointing": True},
    "step3_ppo": EACH_ITS_OWN,
}


@pytest.mark.faults
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_in_small_parts_under_zero_3_make_what_one_does(stage: str, run: Run) -> None:
    require_alike(run(stage), run(stage, 2, micro_batch_size=3, **SPREAD[stage]), most=1e-5, mean=1e-7)


@pytest.mark.faults
class TestEveryClass:
    """O12 to O16 in FAULTS' numbering, all three stages."""

    @pytest.mark.parametrize("zero_stage", [0, 2, 3])
    @pytest.mark.parametrize("stage", STAGES)
    def test_zero_stages_in_fp32(self, stage: str, zero_stage: int, run: Run) -> None:
        require_alike(run(stage, 2, zero_stage=1), run(stage, 2, zero_stage=zero_stage), 1e-5, 1e-7)

    @pytest.mark.parametrize("zero_stage", [2, 3])  # 0 is 1 there
    @pytest.mark.parametrize("stage", STAGES)
    def test_zero_stages_in_bf16_are_bit_exact(self, stage: str, zero_stage: int, run: Run) -> None:
        """But for clipping: ZeRO-3 adds up the norm in another order, and its last bit turns a rounding to bf16; and
        the last digit of the six that are logged of it."""
        one, other = (run(stage, 2, dtype="bf16", zero_stage=n, max_grad_norm=0.0) for n in (1, zero_stage))
        require_alike(one, other, 0.0, 0.0, numbers=LAST_DIGIT)

    @pytest.mark.parametrize("stage", STAGES[:2])  # sampling in bf16 turns a rounding into another token
    def test_clipping_under_zero_3_in_bf16(self, stage: str, run: Run) -> None:
        """The norm of the gradient is summed in another order, so what is clipped by it may round to the other
        neighbour: the bounds of test_parts_in_bf16."""
        one, other = (run(stage, 2, dtype="bf16", zero_stage=number) for number in (1, 3))
        require_alike(losses_of(one), losses_of(other), most=2**-7, mean=2**-9 * 0.05, numbers=10 * 2**-9)

    @pytest.mark.parametrize("stage", STAGES)
    def test_two_processes_with_half_the_rows(self, stage: str, run: Run) -> None:
        require_alike(run(stage), run(stage, 2, micro_batch_size=4), 1e-5, 1e-7)

    @pytest.mark.parametrize("processes", [1, 2])
    @pytest.mark.parametrize("stage", STAGES)
    def test_accumulation_row_by_row(self, stage: str, processes: int, run: Run) -> None:
        require_alike(run(stage), run(stage, processes, micro_batch_size=1), 1e-5, 1e-7)

    @pytest.mark.parametrize(("processes", "rows"), [(2, 4), (1, 1)])
    @pytest.mark.parametrize("stage", STAGES[:2])
    def test_parts_in_bf16(self, stage: str, processes: int, rows: int, run: Run) -> None:
        """Each part's gradient is rounded to bf16, and their sum is not. So weights near 1 may round to the other
        neighbour, 2^-7 away; in the mean at most half of all do, which are about 0.05: half of 2^-8 of that. A loss is
        a mean of numbers about 1, each rounded by up to 2^-9: so far apart are losses in the mean over steps, and one
        of few rows by ten times that. Scores near 0 change sides: losses alone are compared."""
        one, other = run(stage, dtype="bf16"), run(stage, processes, dtype="bf16", micro_batch_size=rows)
        require_alike(losses_of(one), losses_of(other), most=2**-7, mean=2**-9 * 0.05, numbers=10 * 2**-9)

    @pytest.mark.parametrize("zero_stage", [1, 3])
    @pytest.mark.parametrize("stage", STAGES)
    def test_the_same_run_twice_is_bit_exact(self, stage: str, zero_stage: int, run: Run) -> None:
        one, again = (run(stage, 2, again=again, zero_stage=zero_stage) for again in (False, True))
        require_alike(one, again, 0.0, 0.0)

    @pytest.mark.parametrize(
        "options",
        [
            {"zero_stage": 3, "gather_whole": False},
            {
                "zero_stage": 3,
                "offload_param": True,
                "reference": {"offload": True},
                "reward_models": {"offload": True},
            },
            {
                "zero_stage": 1,
                "reference": {"zero_stage": 3},
                "reward_models": {"zero_stage": 3, "gather_whole": False},
            },
        ],
        ids=str,
    )
    def test_how_models_are_held_changes_nothing(self, options: dict[str, Any], run: Run) -> None:
        require_alike(run("step3_ppo"), run("step3_ppo", 2, **options), 1e-5, 1e-7)

    @pytest.mark.parametrize("gather_whole", [True, False])
    def test_an_adapter_and_its_reference(self, gather_whole: bool, run: Run) -> None:
        sharding = {"zero_stage": 3, "gather_whole": gather_whole, "micro_batch_size": 3}
        one, other = run("step3_ppo", adapter="lora,r=4"), run("step3_ppo", 2, adapter="lora,r=4", **sharding)
        require_alike(one, other, 1e-5, 1e-7)


@pytest.mark.long
class TestSharing:
    @pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
    @pytest.mark.parametrize("stage", STAGES)
    def test_two_processes_that_share_one_model(self, stage: str, zero_stage: int, run: Run) -> None:
        split = {"tensor_parallel_size": 2, "zero_stage": zero_stage, "micro_batch_size": 3}
        require_alike(run(stage), run(stage, 2, **split), 1e-5, 1e-7)

    @pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
    @pytest.mark.parametrize("stage", STAGES[:2])
    def test_two_processes_that_share_the_tokens_of_each_row(self, stage: str, zero_stage: int, run: Run) -> None:
        split = {"sequence_parallel_size": 2, "zero_stage": zero_stage, "micro_batch_size": 3}
        one, other = run(stage), run(stage, 2, **split)
        if stage == "step2_reward":  # the sides of a pair share no row then, so its prompt is computed twice
            assert all(n <= other.numbers[name] for name, n in one.numbers.items() if name.endswith(" tokens"))
            one, other = (
                replace(m, numbers={n: v for n, v in m.numbers.items() if " tokens" not in n}) for m in (one, other)
            )
        require_alike(one, other, 1e-5, 1e-7)

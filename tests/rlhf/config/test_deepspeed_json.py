"""Commands and JSONs as DeepSpeed and transformers write them: what they set here, and what is refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf import console
from rlhf.chain import command as train
from rlhf.config.options import EngineOptions, TrainingOptions
from rlhf.engine.training import deepspeed_config
from rlhf.errors import UserError
from rlhf.training.checks import check_steps
from step1_sft import __main__ as sft
from tests.support.programs import runner

Printed = Callable[..., dict[str, Any]]
CHAT = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "bfloat16": {"enabled": True},
    "gradient_clipping": 0.7,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
    "tensorboard": {"enabled": False, "output_path": "logs"},
}
"""the JSON that DeepSpeed-Chat makes, with other numbers"""
TRAINER = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": "auto", "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "contiguous_gradients": True},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""the JSON of transformers' documentation"""


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Printed:
    """`printed(program, words)`: its --print-config; a file `ds.json` is in the current directory."""
    monkeypatch.chdir(tmp_path)

    def call(main: Callable[[], int], *words: str, json_tree: dict[str, Any] | None = None) -> dict[str, Any]:
        Path("ds.json").write_text(json.dumps(CHAT if json_tree is None else json_tree))
        code, output, mistakes = runner("train.py", main, monkeypatch, capsys)(*words, "--print-config")
        assert (code, mistakes) == (0, "")
        tree: dict[str, Any] = yaml.safe_load(output)
        return tree

    return call


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed", "--deepspeed_config", "ds.json"],
        ["--local_rank=0", "--deepspeed", "ds.json"],
        ["--local-rank", "0", "--deepspeed=ds.json"],
    ],
)
def test_a_json_sets_the_options_of_every_stage(printed: Printed, words: list[str]) -> None:
    """The demo's own file sets batch sizes and a dtype that nobody typed: the JSON comes before it."""
    tree = printed(train.main, *words)
    expected = {
        "micro_batch_size": 4,
        "max_grad_norm": 0.7,
        "zero_stage": 3,
        "offload_param": False,
        "offload_optimizer": True,
        "dtype": "bf16",
        "deepspeed_config": "ds.json",
    }
    for section in (tree, tree["sft"], tree["reward"], tree["ppo"]):
        assert {name: section[name] for name in expected} == expected
    assert [tree[section]["batch_size"] for section in ("sft", "reward", "ppo")] == [32, 32, 128]


def test_the_json_of_transformers(printed: Printed) -> None:
    tree = printed(sft.main, "--deepspeed", "ds.json", "--batch-size", "24", json_tree=TRAINER)
    names = ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "adam_epsilon", "lr_scheduler_type")
    assert [tree[name] for name in names] == [3e-4, 0.8, 0.99, 0.1, 1e-8, "linear"]
    assert (tree["batch_size"], tree["zero_stage"], tree["dtype"], tree["warmup_steps"]) == (24, 2, "auto", None)
    betas = TRAINER | {"optimizer": {"params": {"betas": ["auto", 0.9]}}}
    tree = printed(sft.main, "--deepspeed", "ds.json", json_tree=betas)
    assert (tree["adam_beta1"], tree["adam_beta2"]) == (0.9, 0.9)
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 9}}
    tree = printed(train.main, "--deepspeed", "ds.json", json_tree=TRAINER | {"scheduler": scheduler})
    for stage in ("sft", "reward", "ppo"):
        assert [tree[stage][name] for name in ("warmup_steps", "lr_scheduler_type")] == [9, "constant_with_warmup"]
    assert printed(sft.main, "--deepspeed", "--local_rank=3")["deepspeed_config"] is None


def test_deepspeed_gets_what_only_it_knows(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CHAT | {"comms_logger": {"enabled": True, "verbose": True}}))
    options = TrainingOptions(zero_stage=3, dtype="fp32", deepspeed_config=str(tmp_path / "ds.json"))
    config = deepspeed_config(options, torch.float32, 10)
    own = deepspeed_config(TrainingOptions(zero_stage=3, dtype="fp32"), torch.float32, 10)
    assert config["zero_optimization"] == own["zero_optimization"] | {
        "overlap_comm": True,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    }  # pin_memory: nothing is offloaded by these options
    assert config["steps_per_print"] == 10 and config["comms_logger"] == {"enabled": True, "verbose": True}
    assert config["gradient_clipping"] == own["gradient_clipping"] and set(own) < {*config}


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main: Any, *words: str) -> str:
    monkeypatch.setattr(console, "quiet_libraries", lambda: None)
    code, output, line = runner("train.py", main, monkeypatch, capsys)(*words)
    assert (code, output) == (2, "") and line.count("\n") == 1, line
    return line.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("json_tree", "message"),
    [
        ({"train_batch_size": 64}, "train_batch_size 64: here it is 32 (--batch-size 32)"),
        ({"gradient_accumulation_steps": 1}, "here it is 2 (--batch-size 32 / (--micro-batch-size 4 x 4 processes)"),
    ],
)
def test_the_size_of_a_step(json_tree: Any, message: str, tmp_path: Path) -> None:
    """32 rows on 4 processes are 8 each: 2 micro-batches of 4."""
    (tmp_path / "ds.json").write_text(json.dumps(json_tree))
    options = EngineOptions(deepspeed_config=str(tmp_path / "ds.json"))
    with pytest.raises(UserError, match=re.escape(message)):
        check_steps(options, 32, "--batch-size 32", 4, 4)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 32, "gradient_accumulation_steps": 2}))
    check_steps(options, 32, "--batch-size 32", 4, 4)


@pytest.mark.parametrize("file", ["demo.yaml", "recipes/stories260k-sentiment-cpu.yaml"])
def test_a_json_comes_before_a_file_of_the_project_but_not_of_the_user(
    file: str, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = str(train.CONFIGS / file)
    tree = printed(train.main, "--config", shipped, "--deepspeed", "ds.json")
    assert {tree[section]["dtype"] for section in ("sft", "reward", "ppo")} == {"bf16"}
    (tmp_path / "mine.yaml").write_text("dtype: fp32")
    line = refusal(monkeypatch, capsys, train.main, "--config", shipped, "mine.yaml", "--deepspeed", "ds.json")
    assert line.startswith("--sft.dtype fp32: got it with bf16 in ds.json; expected")

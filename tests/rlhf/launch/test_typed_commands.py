"""Commands of DeepSpeed's and accelerate's tutorials, typed as they stand there, with the programs that they start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.storage import manifests

ROOT = Path(__file__).parents[3]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner"]
"""the program `deepspeed`"""
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
"""the program `accelerate launch`"""
SMALL = ["--data_path", "demo,rows=200", "--chat_template", "human_assistant", "--max_prompt_length", "24"]
SMALL += ["--max_length", "48", "--max_eval_rows", "8", "--sample_rows", "0", "--learning_rate", "1e-3"]
STEP_1 = ["--model", "demo-llama", *SMALL]
JSON: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 1e6},
    "bf16": {"enabled": False},
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
}


def typed(command: list[str], folder: Path, *argv: str) -> str:
    (folder / "ds.json").write_text(json.dumps(JSON))
    (folder / "hosts.txt").write_text("localhost slots=2\n")
    words = [*command, *argv, "--output_dir", str(folder / "out")]
    paths = {
        "PYTHONPATH": f"{ROOT}:{folder}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DS_SKIP_CUDA_CHECK": "1",
    }
    done = subprocess.run(
        words, cwd=folder, env=os.environ | paths, capture_output=True, encoding="utf-8", timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def options(folder: Path) -> dict[str, Any]:
    return dict(manifests.read_manifest(folder / "out/step1_sft")["config"])


def require_json_options(config: dict[str, Any]) -> None:
    names = ("batch_size", "micro_batch_size", "zero_stage", "dtype", "max_grad_norm")
    assert [config[name] for name in names] == [32, 8, 2, "fp32", 0.5]


@pytest.mark.long
@pytest.mark.parametrize("words", [["--deepspeed", "--deepspeed_config", "ds.json"], ["--deepspeed", "ds.json"]])
def test_deepspeed_starts_a_stage(tmp_path: Path, words: list[str]) -> None:
    typed([*DEEPSPEED, "--num_accelerators", "2", "--module", "step1_sft"], tmp_path, *STEP_1, *words)
    require_json_options(options(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("words", [["--num_gpus", "2"], ["--include", "localhost:0,1"], ["--hostfile", "hosts.txt"]])
def test_the_chain_reads_what_deepspeed_reads(tmp_path: Path, words: list[str]) -> None:
    actor = ["--actor_model", "demo-llama", "--steps", "1", "--sft.learning_rate", "1e-3", *SMALL[:-2]]
    typed([sys.executable, str(ROOT / "train.py")], tmp_path, *actor, *words, "--deepspeed_config", "ds.json")
    require_json_options(options(tmp_path))
    assert manifests.read_manifest(tmp_path / "out/step1_sft")["world_size"] == 2


@pytest.mark.long
def test_accelerate_starts_a_stage(tmp_path: Path) -> None:
    typed([*ACCELERATE, "--num_processes", "1", "-m", "step1_sft"], tmp_path, *STEP_1, "--dtype", "bf16")
    assert options(tmp_path)["dtype"] == "bf16"

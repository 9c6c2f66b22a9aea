"""A directory that peft's save_pretrained writes, with neither config.json nor tokenizer, at the command line."""

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.models.load import load_causal_lm
from tests.support import forked, tiny

SMALL = (
    *("--data-path", "rows.jsonl", "--dtype", "fp32", "--batch-size", "16", "--max-prompt-length", "24"),
    *("--max-eval-rows", "8", "--sample-rows", "0", "--output-dir"),
)
SUPERVISED = ("--max-length", "48", "--num-train-epochs", "1")


@pytest.fixture
def directories(here: Path) -> None:
    """`lora`, of random weights over the model `base`, and `merged`, the same model as peft merges it."""
    words = [f"w{i}" for i in range(4, 24)]
    rows = [
        {"prompt": f"{words[i % 20]} {words[i // 20]}", "chosen": words[i % 19], "rejected": words[(i + 1) % 19]}
        for i in range(200)
    ]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    model = tiny.causal_lm()
    for folder in ("base", "merged"):
        tiny.tokenizer().save_pretrained(folder)
    model.save_pretrained("base")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    wrapped = peft.get_peft_model(model, options)
    wrapped.peft_config["default"].base_model_name_or_path = "base"
    wrapped.save_pretrained("lora")
    wrapped.merge_and_unload().save_pretrained("merged")
    assert not {file.name for file in Path("lora").iterdir()} & {"config.json", "tokenizer.json"}


def finish(*words: str) -> None:
    finished = forked.program(*words, *SMALL, "out")
    assert finished.returncode == 0, finished.stderr


@pytest.mark.usefixtures("directories")
def test_every_training_command_takes_it() -> None:
    lm, merged = load_causal_lm("lora", torch.float32, tiny.VOCAB), AutoModelForCausalLM.from_pretrained("merged")
    for name, weight in lm.state_dict().items():
        torch.testing.assert_close(weight, merged.get_parameter(name), rtol=1e-5, atol=1e-6)  # sums of a few products
    finish("step1_sft", "--model", "lora", *SUPERVISED)
    finish("step2_reward", "--model", "lora", *SUPERVISED)
    models = ("--actor-model", "lora", "--reward-model", "out/step2_reward/model")
    finish("step3_ppo", *models, "--total-episodes", "16", "--response-length", "8")

"""The directory of a run with tiny models in it: two policies, a reward model, and the manifests of three stages."""

from pathlib import Path
from typing import Any

from rlhf.chain.chat import BY_NAME
from rlhf.chat.options import ChatOptions
from rlhf.chat.responses import Models, load_models
from rlhf.chat.run_models import run_models
from rlhf.storage import manifests
from tests.rlhf.rewards.responses import reward_model
from tests.support import even_policies, tiny

GAINS = {"base": 1.0, "step1_sft/model": 1.2, "step3_ppo/actor": 1.3}
PROMPTS = [f"w{i} w{i + 3}" for i in range(4, 16)]


def write(run: Path) -> Path:
    """A finished run: RUN/step1_sft, step2_reward and step3_ppo; RUN/base, from which step 1 started."""
    even_policies.write(run, GAINS, [{"prompt": prompt} for prompt in PROMPTS])
    reward_model(run / "step2_reward/model", tiny.tokenizer(), "llama", pad_token_id=tiny.PAD)
    finish(run, "step1_sft", "model", {"model": run / "base"})
    finish(run, "step2_reward", "model", {"model": run / "step1_sft"})
    finish(run, "step3_ppo", "actor", {"actor_model": run / "step1_sft/model", "reward_model": run / "step2_reward"})
    return run


def finish(run: Path, stage: str, folder: str, inputs: dict[str, Path]) -> None:
    """What a stage writes beside its model."""
    (run / stage / "config.yaml").write_text("seed: 0\n")
    content: dict[str, Any] = {"stage": stage, "models": [folder], "metrics": {}, "config": {}}
    content["inputs"] = {name: {"path": str(path), "manifest_sha256": None} for name, path in inputs.items()}
    content["files"] = manifests.file_digests(run / stage, [folder])
    manifests.write_manifest(run / stage / "manifest.json", content)


def options_of(run: Path, **changes: Any) -> ChatOptions:
    base = {"run": str(run), "dtype": "fp32", "response_length": 24, "votes": str(run / "votes.jsonl")}
    return ChatOptions.model_validate(base | changes)


def loaded(run: Path, *names: str) -> Models:
    """Policies of the run, without scores."""
    models = run_models(str(run), BY_NAME)
    return load_models({name: models.path(name) for name in names}, None, "auto", "fp32")

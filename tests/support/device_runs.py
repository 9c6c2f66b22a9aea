"""The tensor code of the three stages on the CPU, then on the GPU of tests/support/devices.py, in one process.

    python -m tests.support.device_runs FOLDER [NAME ...]

writes FOLDER/runs.json: of each run its numbers on both devices, and the waits of the host on the GPU.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.batches import Batches
from rlhf.engine.training import Engine
from rlhf.generation import BackendOptions, open_backend
from rlhf.generation.loop import steps
from rlhf.kernels import attention
from rlhf.maths.uniforms import uniforms
from rlhf.models import packing
from rlhf.models.policy import Policy
from rlhf.models.scalar import score_joined, score_separately
from rlhf.supervised.demonstrations import perplexity
from rlhf.types import to_device
from step1_sft import stage as sft_stage
from step1_sft.config import SFTConfig
from tests.support import devices, players, reward_runs, tiny

Numbers = dict[str, Any]
TOKENS = 33
"""of a response without end: a first one, and 32 decode steps"""


def packed(model: Any) -> Any:
    """The model with support for packed rows, as it is loaded."""
    attention.install(model)
    packing.detect_support(model, unsharded=True)
    assert packing.packs(model, 20)
    return model


class Rows(list[Any]):
    """Demonstrations as a dataset."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row.ids) for row in self])


def fine_tuning() -> Numbers:
    """An epoch of two optimizer steps on four micro-batches each, then held-out perplexity."""
    config = SFTConfig(batch_size=8, micro_batch_size=2, dtype="fp32", num_train_epochs=1, learning_rate=1e-3)
    policy, rows = Engine(Policy(packed(players.language_model())), config, 2), Rows(players.demonstrations(16))
    batches = Batches(len(rows), 8)
    metrics = list(sft_stage.train(policy, rows, batches, config, tiny.PAD))  # type: ignore[arg-type]
    measured = perplexity(policy, rows, config.eval_rows, tiny.PAD)  # type: ignore[arg-type]
    return {"losses": [each["loss"] for each in metrics], "perplexity": measured}


def reward_modelling(folder: Path, joined: bool) -> Numbers:
    """An evaluation, and an optimizer step on ranked lists and pairs in many micro-batches."""
    pair_scores = score_joined if joined else score_separately
    run = reward_runs.run(folder, pair_scores, micro_batch_size=3, num_train_epochs=1)
    return {"losses": [each["loss"] for each in run["metrics"]], "accuracy": run["before"]["eval_accuracy"]}


def iteration(folder: Path, **options: Any) -> Numbers:
    """One iteration of PPO: two rollout batches, four optimizer steps of each engine on two micro-batches each."""
    game = players.players("ppo", micro_batch_size=2, rollout_batch_size=4, output_dir=str(folder), **options)
    metrics = next(players.on_course(game))
    return {name: metrics[name] for name in ("score", "kl", "response_length", "policy_loss", "approx_kl")}


def decoding(family: str) -> Numbers:
    """The waits of TOKENS - 1 decode steps of five rows that do not end, and the tokens."""
    lm = players.language_model() if family == "llama" else tiny.causal_lm(family)
    lm = (packed(lm) if family == "llama" else lm).to(devices.current())
    options = players.config_of("ppo", response_length=TOKENS)
    prompts, config = tiny.prompts([3, 9, 8, 4, 3]), BackendOptions(eos_token_id=-1, pad_token_id=tiny.PAD)
    sampler = steps(lm, prompts, options, uniforms([(1, i) for i in range(5)], TOKENS), config)
    tokens = [next(sampler).tokens]
    with devices.waits() as waits:
        tokens += [step.tokens for step in sampler]
    return {"tokens": torch.stack(tokens).tolist(), "decode_waits": dict(waits)}


def rollout() -> Numbers:
    """Responses that end after about ten tokens, of 40 at most: the device works on after the last of them."""
    lm = packed(players.language_model()).to(devices.current())
    options, prompts = players.config_of("ppo", response_length=40), tiny.prompts([3, 9, 8, 4, 3])
    sample = open_backend("loop", eos_token_id=tiny.EOS, pad_token_id=tiny.PAD)
    sampled = sample(lm, prompts, options, uniforms([(2, i) for i in range(5)], 40))
    return {"tokens": sampled.response_tokens(), "ended": sampled.ended.tolist(), "width": sampled.mask.shape[1]}


def instrument() -> Numbers:
    """How often the host waits in an operation; whether two devices in one operation are refused."""
    x, mixed = torch.arange(6.0).to(devices.current()), False
    operations: dict[str, Callable[[], Any]] = {
        "arithmetic": lambda: (x * 2 + x[1:2]).sum() + torch.ones(()),
        "an upload": lambda: to_device(torch.ones(6), x.device) + x,
        "item": lambda: x.sum().item(),
        "int": lambda: int(x.sum()),
        "bool": lambda: bool(x.any()),
        "tolist": x.tolist,
        "cpu": x.cpu,
        "nonzero": x.nonzero,
        "a mask as index": lambda: x[x > 2],
        "an index on the CPU": lambda: x[torch.tensor([1])],
        "a list": lambda: torch.tensor([1.0], device=x.device),
    }
    counts = {}
    for name, operation in operations.items():
        with devices.waits() as waits:
            operation()
        counts[name] = waits.total()
    try:
        _ = x + torch.ones(6)
    except RuntimeError:
        mixed = True
    return {"counts": counts, "mixed_refused": mixed}


def runs(folder: Path) -> dict[str, Callable[[], Numbers]]:
    """Every run by its name."""
    everything = {"entropy_coef": 0.1, "missing_eos_penalty": 1.0, "use_score_scaling": True, "score_clip": 5.0}
    return {
        "instrument": instrument,
        "fine-tuning": fine_tuning,
        "pairs": lambda: reward_modelling(folder, False),
        "joined pairs": lambda: reward_modelling(folder, True),
        "ppo": lambda: iteration(folder),
        "ppo, shared critic": lambda: iteration(folder, critic_model="shared", **everything),
        "best_of_n with demonstrations": lambda: players.a_step_of_everything()["metrics"],
        "decoding": lambda: decoding("llama"),
        "decoding, padded": lambda: decoding("mistral"),
        "rollout": rollout,
    }


def run_all(folder: Path, names: list[str]) -> dict[str, Numbers]:
    """The numbers of the runs, and their waits."""
    results = {}
    for name, run in runs(folder).items():
        if not names or name in names:
            torch.manual_seed(0)
            with devices.waits() as waits:
                numbers = run()
            results[name] = {"numbers": numbers, "waits": dict(waits)}
    return results


def main(folder: Path, names: list[str]) -> None:
    language_model, backbone = players.language_model, tiny.backbone
    players.language_model = lambda *options: packed(language_model(*options))
    tiny.backbone = lambda *options, **more: packed(backbone(*options, **more))
    device = devices.install()
    with tiny.one_rank():
        on_cpu = run_all(folder, names)
        devices.use_for_training(device)
        on_gpu = run_all(folder, names)
    results = {name: {"cpu": on_cpu[name]["numbers"], "gpu": on_gpu[name]["numbers"]} for name in on_cpu}
    waits = {name: Counter(run["waits"]).most_common() for name, run in on_gpu.items()}
    (folder / "runs.json").write_text(json.dumps({"numbers": results, "waits": waits}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""The vLLM backend on vLLM itself, which `make test-vllm` installs: on a CPU, or with DS_ACCELERATOR=cuda on a GPU."""

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf import adapters, plugins
from rlhf.config.options import SamplingOptions
from rlhf.distributed.collectives import local_device
from rlhf.errors import UserError
from rlhf.maths.uniforms import uniforms
from rlhf.models.policy import Policy
from rlhf.types import Prompts, SampledRollout
from tests.support import forked_ranks, killing, stand_in_vllm, tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]

ROOT = Path(__file__).parents[3]
ENDS = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
PROMPTS = tiny.prompts([3, 9, 8])
SAMPLING = SamplingOptions(response_length=12)
WIDTH = 128
STD = 0.1
ROUNDING = math.sqrt(WIDTH / 64) * tiny.ORDERS * WIDTH * STD * (2 / math.pi)
"""5e-5: how far apart two orders of additions leave a logit. tiny.ORDERS is for sums of at most 64 numbers. A logit has
WIDTH terms: a state of a norm, of mean size sqrt(2 / pi), times a weight, of mean size STD sqrt(2 / pi)."""

HEADS = {"hidden_size": WIDTH, "num_attention_heads": 2}
GROUPED = {**HEADS, "num_key_value_heads": 1}
OTHERS = {"vocab_size": tiny.VOCAB, **HEADS, "num_hidden_layers": 2, "max_position_embeddings": tiny.CONTEXT}
SHAPES: dict[str, dict[str, Any]] = {
    "opt": {**HEADS, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": WIDTH, "n_head": 2},
    "gptj": {"n_embd": WIDTH, "n_head": 2, "rotary_dim": 32},
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 64},
    "bloom": {"hidden_size": WIDTH, "n_head": 2},
    "gpt_neox": HEADS,
    "mistral": GROUPED,
    "mixtral": GROUPED,
    "gemma2": {**GROUPED, "head_dim": 64},
    "phi": {**OTHERS, "intermediate_size": 128},
    "falcon": OTHERS,
}
"""Families of tests/support/tiny.py, and others, with heads of width 64, which vLLM's kernels take."""
UNKNOWN = {"gpt_neo"}
"""families that vLLM does not have"""


def model_of(family: str = "llama") -> PreTrainedModel:
    model = tiny.causal_lm(family, STD, **SHAPES[family]).to(local_device())
    for module in model.modules():
        if hasattr(module, "gelu_impl"):  # BLOOM of transformers has GELU by tanh, that of vLLM the exact one
            module.gelu_impl = nn.GELU()
    return model


def draws(rows: int = 3, seed: int = 0) -> Tensor:
    return uniforms([(seed, row) for row in range(rows)], SAMPLING.response_length)


def loop() -> Any:
    return plugins.build("rlhf.generation", {"name": "loop", **ENDS})


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[Any]:
    """The backend, with the little memory that these models need."""
    memory = {"max_tokens": 40, "memory_share": 0.1}
    with tiny.one_rank():
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        backend = plugins.build("rlhf.generation", {"name": "vllm", **ENDS, **memory, **options})
        with contextlib.closing(backend):
            yield backend


@torch.no_grad()
def difference(model: Any, rollout: SampledRollout, temperature: float = 1.0) -> float:
    """How far the log-probs of sampling are from those of a forward pass of `model`, at most."""
    scored = Policy(model)(rollout.sequences, temperature)[0][:, rollout.prompt_ids.shape[1] :]
    return float((rollout.sampled_logprobs - scored)[rollout.mask].abs().max())


@torch.no_grad()
def change(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight += 0.02 * torch.randn_like(weight)


def test_vllm_has_the_interface_that_was_read() -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import CompletionOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    facts = stand_in_vllm.INTERFACE
    for name in ("generate", "collective_rpc", "reset_prefix_cache", "sleep", "wake_up"):
        assert stand_in_vllm.arguments(getattr(vllm.LLM, name)) == facts[f"LLM.{name}"]
    assert facts["LLM.__init__"] <= stand_in_vllm.arguments(vllm.LLM)
    assert facts["EngineArgs"] <= set(EngineArgs.__dataclass_fields__)
    assert facts["SamplingParams"] <= set(vllm.SamplingParams.__struct_fields__)
    assert facts["CompletionOutput"] <= set(CompletionOutput.__dataclass_fields__)
    assert facts["Worker.reload_weights"] <= stand_in_vllm.arguments(GPUModelRunner.reload_weights)


def test_every_family_is_here() -> None:
    assert tiny.FAMILIES.keys() - SHAPES.keys() == UNKNOWN


@pytest.mark.parametrize("family", SHAPES)
def test_log_probs_are_the_actors_while_its_weights_change(family: str) -> None:
    model = model_of(family)
    with opened() as drawing:
        for _ in range(3):
            rollout = drawing(model, PROMPTS, SAMPLING, draws())
            assert difference(model, rollout) < ROUNDING
            assert torch.equal(drawing(model, PROMPTS, SAMPLING, draws()).response_ids, rollout.response_ids)
            change(model)
            assert difference(model, rollout) > 100 * ROUNDING
        mine, other = drawing(model, PROMPTS, SAMPLING, None), loop()(model, PROMPTS, SAMPLING, None)
    assert torch.equal(mine.response_ids, other.response_ids)
    assert float((mine.sampled_logprobs - other.sampled_logprobs).abs().max()) < ROUNDING


@pytest.mark.parametrize("family", sorted(UNKNOWN))
def test_a_family_that_vllm_does_not_have_is_refused(family: str) -> None:
    model = tiny.causal_lm(family, hidden_size=WIDTH, num_heads=2).to(local_device())
    with opened() as drawing, pytest.raises(UserError, match=r"vLLM does not start: .*use --rollout-backend loop"):
        drawing(model, PROMPTS, SAMPLING, draws())


def test_the_contract_of_a_sampler() -> None:
    """As tests/contracts/test_generation.py has it. 400 rows of 24 tokens are more than vLLM reads at once."""
    model, count = model_of(), 400
    one = tiny.prompts([24])
    many = Prompts(one.ids.expand(count, -1), one.mask.expand(count, -1), one.rows * count)
    with opened() as drawing:
        rollout = drawing(model, many, SAMPLING, draws(count))
        alone = drawing(model, many[3:4], SAMPLING, draws(count)[3:4])
        other = drawing(model, many[3:4], SAMPLING, draws(1, seed=1))
        cool = SamplingOptions(response_length=12, temperature=0.7)
        cooled = drawing(model, PROMPTS, cool, draws())
        padded = Prompts(*(torch.nn.functional.pad(x, (7, 0)) for x in (PROMPTS.ids, PROMPTS.mask)), PROMPTS.rows)
        wide = drawing(model, padded, cool, draws())
    assert alone.response_tokens() == rollout[3:4].response_tokens() != other.response_tokens()
    assert difference(model, cooled, 0.7) < ROUNDING < 1e-2 < difference(model, cooled)
    assert wide.response_tokens() == cooled.response_tokens()
    ends = rollout.response_ids == tiny.EOS
    assert torch.equal(rollout.ended, ends.any(1)) and 0 < int(ends.any(1).sum()) < count
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, SAMPLING.response_length)
    assert torch.equal(rollout.lengths, lengths) and (rollout.response_ids[~rollout.mask] == tiny.PAD).all()
    # The first tokens follow the softmax: sum_v sqrt(p_v (1 - p_v) / (2 pi n)) is expected of a right sampler.
    with torch.no_grad():
        expected = model(input_ids=one.ids).logits[0, -1].double().softmax(-1)
    drawn = torch.bincount(rollout.response_ids[:, 0], minlength=tiny.VOCAB) / count
    noise = float((expected * (1 - expected) / (2 * torch.pi * count)).sqrt().sum())
    assert 0.5 * float((drawn - expected).abs().sum()) < 1.5 * noise


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_adapter_is_merged_for_vllm_alone(family: str) -> None:
    model = adapters.wrap(model_of(family), "lora,r=4")
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, 0.0, 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with opened(adapter="lora,r=4") as drawing:
        rollout = drawing(model, PROMPTS, SAMPLING, draws())
    assert difference(model, rollout) < ROUNDING
    with adapters.open_adapter("lora,r=4").disabled(model):
        assert difference(model, rollout) > 100 * ROUNDING
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_ranks_under_zero_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    forked_ranks.run("tests.support.vllm_ranks", str(tmp_path / "seen.pt"), "itself", timeout_s=1100)
    mismatches = torch.load(tmp_path / "seen.pt")
    assert set(mismatches) == {None, "lora"}
    for each in mismatches.values():
        assert torch.tensor(each).shape == (2, 3) and float(torch.tensor(each).max()) < ROUNDING


# --- runs


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a whole chain whose step 3 samples with vLLM, and what it printed."""
    folder = tmp_path_factory.mktemp("chain")
    model = yaml.safe_load((ROOT / "configs/models/demo-llama.yaml").read_text(encoding="utf-8"))
    model["model"] |= {"num_attention_heads": 1, "num_key_value_heads": 1}  # one of width 64
    (folder / "wide.yaml").write_text(yaml.safe_dump(model), encoding="utf-8")
    shared = {name: value for name, value in killing.TINY.items() if name not in ("batch_size", "micro_batch_size")}
    size = {"batch_size": 8, "micro_batch_size": 8}
    short = {name: value for name, value in killing.SHORT.items() if name != "model"} | size
    config = shared | {"actor_model": "wide.yaml", "reward_model": "wide.yaml", "sft": short, "reward": short}
    config["ppo"] = size | killing.PPO | {"rollout_backend": "vllm"}
    (folder / "chain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    words = [sys.executable, str(ROOT / "train.py"), "--config", "chain.yaml"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return folder, subprocess.run(words, check=False, capture_output=True, text=True, cwd=folder, env=environment)


def test_a_chain_trains_and_ends_without_a_traceback(chain: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = chain
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr + done.stdout
    lines = (folder / "out/step3_ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert len(steps) == 4 and max(row["sampling_mismatch"] for row in steps) < ROUNDING
    if local_device().type == "cpu":
        assert "warning: rollout backend 'vllm' on a CPU: the loop is as fast there" in done.stdout


def test_a_resumed_run_leaves_the_same_bytes(
    chain: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.chdir(tmp_path)
    models = {"actor_model": str(chain[0] / "out/step1_sft"), "reward_model": str(chain[0] / "out/step2_reward")}
    options = killing.ppo_options(**models, rollout_backend="vllm", export_rollouts=True)
    whole = killing.undisturbed(tmp_path / "whole", options)
    killing.dying(monkeypatch, lambda: killing.run(options), "train", 3)
    assert killing.steps_of(Path("out/step3_ppo")) == [1, 2]
    killing.run(options)
    killing.require_same(killing.left(Path("out/step3_ppo")), whole)

"""The vLLM backend against tests/support/stand_in_vllm.py; test_vllm_itself.py has vLLM itself."""

import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf import adapters, plugins
from rlhf.config.options import EngineOptions, SamplingOptions
from rlhf.engine.export import save_policy
from rlhf.errors import UserError
from rlhf.generation import vllm as backend
from rlhf.maths.uniforms import uniforms
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from rlhf.types import SampledRollout
from step3_ppo.rollout import generate
from tests.support import forked, forked_ranks, stand_in_vllm, tiny
from tests.support.players import PROMPTS as FOUR
from tests.support.players import players

PROMPTS = tiny.prompts([3, 9, 8])
SAMPLING = SamplingOptions(response_length=12)
ROOT = Path(__file__).parents[3]
ENDS = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
families = pytest.mark.parametrize("family", tiny.FAMILIES)


def built(**options: Any) -> Any:
    return plugins.build("rlhf.generation", {"name": "vllm", **ENDS, **options})


@pytest.fixture
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def draws(seed: int = 0, rows: int = 3) -> Tensor:
    return uniforms([(seed, row) for row in range(rows)], SAMPLING.response_length)


@torch.no_grad()
def mismatch(model: Any, rollout: SampledRollout) -> float:
    """How far the log-probs of sampling are from those of a forward pass of `model`, at most."""
    scored = Policy(model)(rollout.sequences)[0][:, rollout.prompt_ids.shape[1] :]
    return float((rollout.sampled_logprobs - scored).abs().max())


# --- the interface


def test_the_stand_in_has_the_interface_that_was_read() -> None:
    for name in ("generate", "collective_rpc", "reset_prefix_cache", "sleep", "wake_up"):
        assert stand_in_vllm.arguments(getattr(stand_in_vllm.LLM, name)) == stand_in_vllm.INTERFACE[f"LLM.{name}"]
    assert stand_in_vllm.arguments(stand_in_vllm.LLM) == stand_in_vllm.INTERFACE["LLM.__init__"]
    assert {field.name for field in fields(stand_in_vllm.SamplingParams)} == stand_in_vllm.INTERFACE["SamplingParams"]
    assert {field.name for field in fields(stand_in_vllm.Output)} == stand_in_vllm.INTERFACE["CompletionOutput"]


# --- what is sampled


@pytest.mark.usefixtures("vllm")
def test_greedy_is_as_in_the_loop() -> None:
    model = tiny.causal_lm()
    loop = plugins.build("rlhf.generation", {"name": "loop", **ENDS})
    mine, other = built()(model, PROMPTS, SAMPLING, None), loop(model, PROMPTS, SAMPLING, None)
    for name in ("prompt_ids", "prompt_mask", "response_ids", "mask", "ended"):
        assert torch.equal(getattr(mine, name), getattr(other, name))
        assert getattr(mine, name).dtype == getattr(other, name).dtype
    torch.testing.assert_close(mine.sampled_logprobs, other.sampled_logprobs, rtol=0, atol=1e-5)
    assert mine.rows is other.rows


def test_another_engine_samples_the_same_from_the_same_draws(vllm: Any) -> None:
    """As after a restart; and each row on its own."""
    model = tiny.causal_lm()
    first = built()(model, PROMPTS, SAMPLING, draws())
    again = built()(model, PROMPTS, SAMPLING, draws())
    alone = built()(model, PROMPTS[1:2], SAMPLING, draws()[1:2])
    assert len(vllm.made) == 3 and torch.equal(first.response_ids, again.response_ids)
    assert alone.response_tokens() == first[1:2].response_tokens()
    twice = built()(model, PROMPTS[torch.tensor([0, 0])], SAMPLING, draws()[:2])
    assert twice.response_tokens()[0] != twice.response_tokens()[1]


@pytest.mark.usefixtures("vllm")
def test_only_the_chosen_token_ends_a_response() -> None:
    """That of the model's config does not."""
    model = tiny.causal_lm()
    usual = built()(model, PROMPTS, SamplingOptions(response_length=40), draws())
    end = int(usual.response_ids[0, 4])
    assert end != tiny.EOS == model.config.eos_token_id
    other = built(eos_token_id=end)(model, PROMPTS, SamplingOptions(response_length=40), draws())
    assert other.response_tokens()[0] == usual.response_tokens()[0][:5] and other.ended[0]


# --- weights


@families
def test_the_weights_are_those_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    """As transformers writes them: names, values, tied ones once."""
    model = tiny.causal_lm(family)
    model.save_pretrained(tmp_path)
    expected, weights = load_file(tmp_path / "model.safetensors"), backend.weights(model, backend.Config(**ENDS))
    assert expected.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in expected.items())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rows_of_no_token_stay_behind(family: str, tmp_path: Path) -> None:
    tiny.causal_lm(family).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32, 12)
    row_counts = {name: len(weight) for name, weight in backend.weights(model, backend.Config(**ENDS)).items()}
    ends = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if family == "llama" else set())
    assert {name for name in row_counts if name.startswith(("model.embed", "lm_head"))} == ends
    assert {row_counts[name] for name in ends} == {12}


@pytest.mark.usefixtures("vllm", "on_a_gpu")
@pytest.mark.parametrize("level", [1, 2])
def test_every_rollout_has_the_weights_of_its_moment(level: int) -> None:
    model, drawing = tiny.causal_lm("qwen2"), built(sleep_level=level)
    before = drawing(model, PROMPTS, SAMPLING, draws())
    step = torch.optim.AdamW(model.parameters(), lr=0.03)
    Policy(model)(before.sequences)[0].sum().backward()
    step.step()
    assert mismatch(model, before) > 0.1
    assert mismatch(model, drawing(model, PROMPTS, SAMPLING, draws())) < 1e-5


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mixtral"])
def test_an_adapter_is_merged_for_vllm_alone(family: str) -> None:
    spec = "lora,r=4" if family != "mixtral" else "lora,r=4,target_modules=[q_proj,v_proj]"
    model = adapters.wrap(tiny.causal_lm(family), spec)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, 0.0, 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rollout = built(adapter=spec)(model, PROMPTS, SAMPLING, draws())
    assert mismatch(model, rollout) < 1e-5
    with adapters.open_adapter(spec).disabled(model):
        assert mismatch(model, rollout) > 1e-2
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("vllm", "ranks")
@pytest.mark.parametrize("stage", [1, 3])
def test_the_actor_of_an_engine(stage: int, tmp_path: Path) -> None:
    """Under ZeRO-3 the weights are gathered for the rollout; what vLLM got is what the stage would save."""
    game = players("ppo", zero_stage=stage)
    game.update(game.score(game.sample(FOUR, backend="vllm")))
    rollout = game.score(game.sample(FOUR, seed=2, backend="vllm"))
    assert rollout.logprobs is not None
    assert float((rollout.logprobs - rollout.sampled_logprobs).abs().max()) < 1e-5
    save_policy(game.actor, None, tiny.tokenizer(), tmp_path)
    state = stand_in_vllm.LLM.made[-1].model.state_dict()
    assert any(float((state[name] - value).abs().max()) > 0 for name, value in tiny.causal_lm().state_dict().items())
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(state[name], value)


def test_two_ranks_under_zero_3(tmp_path: Path) -> None:
    forked_ranks.run("tests.support.vllm_ranks", str(tmp_path / "seen.pt"))
    mismatches = torch.load(tmp_path / "seen.pt")
    assert set(mismatches) == {None, "lora"}
    for each in mismatches.values():
        assert torch.tensor(each).shape == (2, 3) and float(torch.tensor(each).max()) < 1e-5


# --- awake and asleep

GPU = ["wake_up ['weights']", "reload_weights", "wake_up ['kv_cache']", "reset_prefix_cache", "generate", "sleep 1"]
CPU = ["reload_weights", "pack_weights", "reset_prefix_cache", "generate"]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the calls go."""
    monkeypatch.setattr(backend, "sleeps", lambda _: True)


@pytest.mark.usefixtures("ranks", "on_a_gpu")
def test_one_rollout_takes_the_weights_once(vllm: Any) -> None:
    game, drawing = players("ppo", rollout_batch_size=3), built()
    for seed in range(2):
        generate(game.actor.inference(), drawing, FOUR, draws(seed, 4), game.config)
    assert len(vllm.made) == 1 and vllm.made[0].calls == ["sleep 1", *GPU, *GPU]


def test_on_a_cpu_it_never_sleeps_and_says_that_the_loop_is_as_fast(
    vllm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, drawing = tiny.causal_lm(), built()
    for seed in range(2):
        drawing(model, PROMPTS, SAMPLING, draws(seed))
    drawing.close()
    drawing.close()
    assert vllm.made[0].calls == [*CPU, *CPU, "shut_down"]
    assert capsys.readouterr().out.count("warning: rollout backend 'vllm' on a CPU: the loop is as fast there") == 1


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("call", ["reload_weights", "generate"])
def test_asleep_after_an_error_too(vllm: Any, call: str) -> None:
    model, drawing = tiny.causal_lm(), built()
    drawing(model, PROMPTS, SAMPLING, draws())
    engine = vllm.made[0]
    assert engine.asleep == {"weights", "kv_cache"}
    engine.fail = {call}
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        drawing(model, PROMPTS, SAMPLING, draws())
    assert engine.asleep == {"weights", "kv_cache"} and engine.calls[-1] == "sleep 1"


@pytest.mark.usefixtures("vllm")
def test_making_an_engine_draws_no_random_number() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    built()(tiny.causal_lm(), PROMPTS, SAMPLING, draws())
    assert torch.equal(torch.rand(3), expected)


# --- refusals


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for refused in (built, lambda: backend.Config(**ENDS).check(EngineOptions(), SAMPLING)):
        with pytest.raises(UserError, match=r"'vllm': the package is not installed; pip install 'rlhf-pipe.*\[vllm\]'"):
            refused()


@pytest.mark.usefixtures("vllm")
def test_what_vllm_cannot_do() -> None:
    backend.Config(**ENDS).check(EngineOptions(), SAMPLING)
    backend.Config(**ENDS).check(EngineOptions(zero_stage=3), SAMPLING)
    with pytest.raises(UserError, match="got --tensor-parallel-size 2, expected 1"):
        backend.Config(**ENDS).check(EngineOptions(tensor_parallel_size=2), SAMPLING)
    with pytest.raises(UserError, match="got --no-gather-whole, expected"):
        backend.Config(**ENDS).check(EngineOptions(zero_stage=3, gather_whole=False), SAMPLING)
    with pytest.raises(UserError, match=r"--temperature 0.001: expected at least 0.01"):
        backend.Config(**ENDS).check(EngineOptions(), SamplingOptions(temperature=0.001))


def test_an_engine_that_does_not_start(vllm: Any) -> None:
    vllm.refuses = "Free memory on device cuda:0 (3.1/79.1 GiB)\nis less than desired"
    with pytest.raises(UserError, match=r"memory_share 0.4: vLLM does not start: Free .* is less than desired; change"):
        built()(tiny.causal_lm(), PROMPTS, SAMPLING, draws())


def test_a_model_that_vllm_takes_for_another(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves its weights as they were at the start is seen before anything is learned from it."""

    def leave(engine: Any, weights: Any) -> None:
        engine.model = tiny.causal_lm(std=0.02)

    monkeypatch.setattr(vllm, "_reload", leave)
    with pytest.raises(UserError, match=r"'llama': its log-probs are [\d.]+ nats a token from those of the actor"):
        built()(tiny.causal_lm(std=0.5), PROMPTS, SAMPLING, draws())


def test_nobody_imports_vllm_before_it_samples() -> None:
    program = (
        "import sys, rlhf.generation.vllm, step3_ppo.stage; "
        "sys.exit(any(name.split('.')[0] == 'vllm' for name in sys.modules))"
    )
    assert forked.python("-c", program).returncode == 0

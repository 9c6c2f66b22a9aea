"""Compiled layers beside the same layers as they were written."""

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from rlhf.config.options import EngineOptions, OptimizerOptions, SamplingOptions
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.generation import loop
from rlhf.generation._cache import MaskedStaticLayer
from rlhf.kernels import compiling, cpu_operations
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from rlhf.plan.compile_choice import FAMILIES
from tests.support import families, tiny

pytestmark = pytest.mark.compiled

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[str]:
    tiny.causal_lm("llama", std=0.05).save_pretrained(tmp_path / "model")
    with tiny.one_rank():
        yield str(tmp_path / "model")
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "compiler"),
    [
        ("llama", "traced"),
        pytest.param("llama", "c++", marks=[pytest.mark.long, needs_compiler]),
        *(pytest.param(name, "traced", marks=pytest.mark.long) for name in sorted(FAMILIES - {"llama"})),
    ],
)
def test_training_scoring_and_sampling_are_those_of_the_same_model(
    family: str, saved: str, compiler: str, request: pytest.FixtureRequest
) -> None:
    """Of every family that is compiled. C++ of such layers, in bf16: test_cpu_operations.py."""
    if compiler == "traced":
        request.getfixturevalue("traced")
    if family != "llama":
        tiny.causal_lm(family, std=0.05, **families.ALL[family]).save_pretrained(saved)
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    results = []
    for compiled in (False, True):
        lm = load_causal_lm(saved, torch.float32, tiny.VOCAB)
        options = EngineOptions(dtype="fp32", torch_compile=compiled)
        engine = Engine(
            Policy(lm),
            tiny.training_options(options, OptimizerOptions(learning_rate=0.001, lr_scheduler_type="constant")),
            10,
        )
        losses: list[float] = []
        frames = [compiled_frames()]
        for step in range(4):
            rows = tiny.sequences([9, 5 + step, 14, 3], prompts=[2, 1, 3, 1], seed=step)

            def loss(batch: object) -> tuple[Tensor, dict[str, Tensor]]:
                return -engine(batch)[0].mean(), {}  # noqa: B023  (called at once)

            losses.append(engine.step([rows[:2], rows[2:]], loss)["loss"])
            frames.append(compiled_frames())
        with engine.inference() as policy:
            scored = policy(tiny.sequences([12, 20], prompts=[1, 1], seed=9))[0]
            rollout = backend(policy.lm, tiny.prompts([3, 9]), SamplingOptions(response_length=12), None)
        results.append((losses, scored, rollout.response_ids, [*frames, compiled_frames()]))
    (plain, expected, tokens, _), (losses, scored, sampled, (before, first, *later, after)) = results
    assert losses == pytest.approx(plain, abs=1e-5) and losses[-1] != losses[0]
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-5)
    assert torch.equal(sampled, tokens)
    # Pieces of a layer, with gradients and without: none for another layer, another length or a longer cache.
    assert before < first == later[-1] < after
    assert after - before < 20  # 10 with torch 2.13, 12 with 2.11, 14 with 2.14; twice as many if layers did not share


MIXED = ([3, 9, 5, 7], [2, 4, 11, 3, 6])
"""tokens of the prompts of two rollouts"""


def compiled_frames() -> int:
    return int(torch._dynamo.utils.counters["frames"]["ok"])


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_a_decode_step_is_one_graph_for_all_rollouts(family: str, tmp_path: Path) -> None:
    tiny.causal_lm(family, std=0.05).save_pretrained(tmp_path / "model")
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    draws = torch.rand(5, 12, generator=torch.Generator().manual_seed(0))
    rollouts, counts = [], []
    for compiled in (False, True):
        lm = load_causal_lm(str(tmp_path / "model"), torch.float32, tiny.VOCAB)
        if compiled:
            compiling.compile_layers(lm)
        for lengths in MIXED:  # reads prompts alone, by pieces of a layer, of which each torch makes others
            backend(lm, tiny.prompts(lengths), SamplingOptions(response_length=1), draws[: len(lengths)])
        counts.append(graphs())
        first = backend(lm, tiny.prompts(MIXED[0]), SamplingOptions(response_length=9), draws[:4])
        counts.append(graphs())
        with torch.no_grad():
            for weight in lm.parameters():
                weight.mul_(1.5)  # as an optimizer does, in place
        second = backend(lm, tiny.prompts(MIXED[1]), SamplingOptions(response_length=12), draws)
        counts.append(graphs())
        rollouts.append((first, second))
    for plain, fast in zip(*rollouts, strict=True):
        assert torch.equal(plain.response_ids, fast.response_ids)
        torch.testing.assert_close(fast.sampled_logprobs, plain.sampled_logprobs, rtol=0, atol=1e-5)
    assert not torch.equal(rollouts[0][0].sampled_logprobs[:, 0], rollouts[0][1].sampled_logprobs[:4, 0])
    assert counts[0] == counts[1] == counts[2] and counts[4] == counts[5] == counts[3] + 1
    torch._dynamo.reset()


@pytest.mark.usefixtures("traced")
def test_without_kernels_a_step_multiplies_by_weights_sorted_again(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None or not cpu_operations.for_one_token(torch.float32):
        pytest.skip("no C++ compiler here, or no block products")
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    draws = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    plain, fast = (load_causal_lm(saved, torch.float32, tiny.VOCAB) for _ in range(2))
    compiling.compile_layers(fast)
    for factor, kernel in ((1.0, True), (1.0, False), (1.5, False)):
        if not kernel:
            monkeypatch.setattr(cpu_operations, "for_one_token", lambda _: False)
            monkeypatch.setattr(cpu_operations, "products", None)
        want, rollout = (
            backend(multiplied(lm, factor), tiny.prompts([3, 9, 5]), SamplingOptions(response_length=8), draws)
            for lm in (plain, fast)
        )
        assert torch.equal(rollout.response_ids, want.response_ids)
        torch.testing.assert_close(rollout.sampled_logprobs, want.sampled_logprobs, rtol=0, atol=1e-5)


def multiplied(lm: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Its weights changed in place, as by an optimizer."""
    with torch.no_grad():
        for weight in lm.parameters():
            weight.mul_(factor)
    return lm


@pytest.mark.usefixtures("traced")
def test_models_that_take_turns_keep_their_own_steps(tmp_path: Path) -> None:
    """Within a rollout a step is not asked which graph it takes; rows end at different steps."""
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    draws = torch.rand(4, 12, generator=torch.Generator().manual_seed(0))
    plain: list[PreTrainedModel] = []
    for i, family in enumerate(("llama", "llama", "gpt2")):
        lm = tiny.causal_lm(family, std=0.05 * (i + 1))
        lm.save_pretrained(tmp_path / str(i))
        plain.append(load_causal_lm(str(tmp_path / str(i)), torch.float32, tiny.VOCAB))
    fast = [load_causal_lm(str(tmp_path / str(i)), torch.float32, tiny.VOCAB) for i in range(3)]
    for lm in fast:
        compiling.compile_layers(lm)
    for turn in (0, 1, 0, 2, 1, 2, 0):
        want, rollout = (
            backend(models[turn], tiny.prompts([3, 9, 5, 7]), SamplingOptions(response_length=12), draws)
            for models in (plain, fast)
        )
        assert torch.equal(want.response_ids, rollout.response_ids)
        torch.testing.assert_close(rollout.sampled_logprobs, want.sampled_logprobs, rtol=0, atol=1e-5)
    torch._dynamo.reset()


def test_the_cache_on_disk_tells_vector_widths_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph made for 16 numbers a turn leaves half of them out where vectors hold 8."""
    keys = []
    for capability in ("AVX2", "AVX512", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        with torch._inductor.config.patch({"cpp.simdlen": None}):
            compiling.compile_layers(tiny.causal_lm())
            keys.append(torch._inductor.config.save_config_portable(ignore_private_configs=False))
    assert keys[0] != keys[1] != keys[2] != keys[0]


@pytest.mark.usefixtures("traced")
def test_the_compiler_keeps_no_cache(saved: str) -> None:
    compiling.compile_as_one_graph.cache_clear()
    lm = load_causal_lm(saved, torch.float32, tiny.VOCAB)
    compiling.compile_layers(lm)
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    gc.collect()
    gc.disable()
    try:
        backend(lm, tiny.prompts([3, 6]), SamplingOptions(response_length=6), None)
        assert not [x for x in gc.get_objects() if type(x) is MaskedStaticLayer]
    finally:
        gc.enable()


@pytest.mark.usefixtures("traced")
def test_products_of_the_same_states_are_one(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process in which DeepSpeed has loaded another model under ZeRO-3."""
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    lm = load_causal_lm(saved, torch.float32, tiny.VOCAB)
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    sampling, counts = SamplingOptions(response_length=3), []
    for compiled in (False, True):
        if compiled:
            compiling.compile_layers(lm)
            backend(lm, tiny.prompts([5, 2]), sampling, None)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            rollout = backend(lm, tiny.prompts([5, 2]), sampling, None)
        own = compiled and cpu_operations.for_one_token(torch.float32)
        name = "rlhf::products" if own else "mkldnn::_linear_pointwise"
        counts.append(sum(event.count for event in profiled.key_averages() if event.key == name))
    steps, layers = rollout.mask.shape[1] - 1, lm.config.num_hidden_layers
    # query, key, value; output; gate, up; down; and the head once
    assert counts == [steps * (7 * layers + 1), steps * (4 * layers + 1)]


@pytest.mark.usefixtures("traced")
def test_what_is_no_single_graph_runs_as_it_was_written(saved: str) -> None:
    compiling.compile_as_one_graph.cache_clear()
    lm = load_causal_lm(saved, torch.float32, tiny.VOCAB)
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    plain = backend(lm, tiny.prompts([3, 6]), SamplingOptions(response_length=6), None)
    compiling.compile_layers(lm)
    lm.get_output_embeddings().register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.warns(UserWarning, match="--torch-compile: a decode step runs uncompiled") as caught:
        fast = backend(lm, tiny.prompts([3, 6]), SamplingOptions(response_length=6), None)
    compiling.compile_as_one_graph.cache_clear()
    assert torch.equal(plain.response_ids, fast.response_ids)
    assert sum("decode step" in str(warning.message) for warning in caught) == 1


def test_what_torch_cannot_compile_is_said_once_and_runs_as_it_was_written(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InductorError(RuntimeError("C++ compile error\nin line 1"), None)

    monkeypatch.setattr(compile_fx, "compile_fx", refuse)
    compiling._warn_once.cache_clear()
    policy, rows = Policy(load_causal_lm(saved, torch.float32, tiny.VOCAB)), tiny.sequences([20, 9, 14], [1, 1, 1])
    plain = policy(rows)[0]
    compiling.compile_layers(policy)
    with pytest.warns(UserWarning, match="each layer runs uncompiled: RuntimeError: C.. compile error$") as caught:
        assert torch.equal(policy(rows)[0], plain)
        with torch.no_grad():
            assert torch.equal(policy(rows)[0], plain)
    assert sum("runs uncompiled" in str(warning.message) for warning in caught) == 1
    assert not torch._dynamo.config.suppress_errors, "other errors are not hidden"


def test_half_a_file_of_a_killed_compilation_is_named_with_its_cure(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes a file that is there for a whole one, and loading it fails in every later run."""

    def refuse(*_: object, **__: object) -> None:
        raise InductorError(OSError("/ab/xyz.main.so: file too short"), None)

    monkeypatch.setattr(compile_fx, "compile_fx", refuse)
    for cached in (compiling._warn_once, compiling.compile_as_one_graph):
        cached.cache_clear()
    lm = load_causal_lm(saved, torch.float32, tiny.VOCAB)
    backend = loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))
    compiling.compile_layers(lm)
    with pytest.warns(UserWarning) as caught:
        backend(lm, tiny.prompts([3, 6]), SamplingOptions(response_length=6), None)
    compiling.compile_as_one_graph.cache_clear()
    reason = "OSError: /ab/xyz.main.so: file too short; a killed run may have left half a file: "
    cure = f"delete torch's cache of compiled code, {cache_dir()}"
    warned = [str(warning.message) for warning in caught if "uncompiled" in str(warning.message)]
    assert warned == [
        f"--torch-compile: {subject} runs uncompiled: {reason}{cure}"
        for subject in ("a part of each layer", "a decode step")
    ]


def test_without_a_compiler_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(UserError, match="install one"):
        compiling.require_compiler(torch.device("cpu"))

"""Recorded decode steps beside steps that run anew each time, by graphs of operations that need no GPU (tape.py)."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rlhf.config.options import SamplingOptions
from rlhf.generation import _graphs, _memory, loop
from rlhf.kernels import attention, decoding
from rlhf.maths.uniforms import uniforms
from rlhf.models import packing
from rlhf.types import Prompts, SampledRollout
from tests.support import tape, tiny

NEAR = 1e-5
"""log-probs of tiny models in fp32; attention adds up more terms that are 0, perhaps in another order"""
MIXED = [3, 9, 5, 7, 2, 8, 4]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> tape.Recorder:
    """The CPU decodes as a GPU does: its steps are recorded, and its layers multiply by their own weights."""
    result = tape.Recorder()
    monkeypatch.setattr(_graphs, "recorder", lambda _: result)
    monkeypatch.setattr(_memory, "ROUNDED", 8)
    monkeypatch.setattr(decoding, "_sortable", lambda _: False)
    return result


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "device_memory", lambda: (0.0, 1e9))


def model(family: str = "llama", eos: float = -2.0, **changes: Any) -> PreTrainedModel:
    """A model that packs rows, whose logit of the end is `eos` higher everywhere."""
    lm = tiny.causal_lm(family, **changes)
    head: Any = lm.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(tiny.VOCAB).index_fill(0, torch.tensor([tiny.EOS]), eos))
    attention.install(lm)
    packing.detect_support(lm, unsharded=True)
    assert packing.packs(lm, 20)
    return lm


def backend() -> loop.Loop:
    return loop.build(loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD))


def draws(seed: int, rows: int, length: int) -> Tensor:
    return uniforms([(seed, row) for row in range(rows)], length)


def expected(
    lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, numbers: Tensor | None
) -> SampledRollout:
    """By steps that are not recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_graphs, "recorder", lambda _: None)
        return backend()(lm, prompts, sampling, numbers)


def require_equal(got: SampledRollout, want: SampledRollout) -> None:
    assert torch.equal(got.response_ids, want.response_ids) and torch.equal(got.mask, want.mask)
    torch.testing.assert_close(got.sampled_logprobs, want.sampled_logprobs, rtol=0, atol=NEAR)


def multiply(lm: PreTrainedModel, factor: float) -> None:
    """Change the weights in place, as an optimizer does."""
    with torch.no_grad():
        for weight in lm.parameters():
            weight.mul_(factor)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_recorded_steps_sample_the_same(family: str, recorder: tape.Recorder) -> None:
    lm, sample = model(family), backend()
    for seed, length in ((0, 20), (1, 20)):
        numbers = draws(seed, len(MIXED), length)
        options, prompts = SamplingOptions(response_length=length), tiny.prompts(MIXED)
        require_equal(sample(lm, prompts, options, numbers), expected(lm, prompts, options, numbers))
        multiply(lm, 1.1)
    assert recorder.tapes


@pytest.mark.usefixtures("roomy")
def test_no_input_of_a_recorded_step_is_of_another_rollout(recorder: tape.Recorder) -> None:
    """Weights, prompts, draws, rows, temperature, greedy; a larger cache, and a smaller one in its memory."""
    lm, sample, counts = model(), backend(), []
    cases = [
        (MIXED, 20, 1.0), (MIXED, 20, 1.0), (MIXED[::-1], 20, 1.0), (MIXED, 20, 0.7), (MIXED, 20, None),
        ([3, 5], 12, 1.0), (MIXED + MIXED, 20, 1.0), ([4], 40, 1.0), (MIXED, 20, 1.0),
    ]  # fmt: skip
    for seed, (sizes, length, temperature) in enumerate(cases):
        options = SamplingOptions(response_length=length, temperature=temperature or 1.0)
        prompts, numbers = (
            tiny.prompts(sizes, seed=seed),
            None if temperature is None else draws(seed, len(sizes), length),
        )
        require_equal(sample(lm, prompts, options, numbers), expected(lm, prompts, options, numbers))
        sample.release()
        multiply(lm, 1.02)
        counts.append(len(recorder.tapes))
    assert counts[1] == counts[2] < counts[3] < counts[4], "the second rollout's graphs serve the third"


def test_a_block_that_stays_has_the_graphs_of_the_last_rollout(
    recorder: tape.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not stay after the first rollout, when nobody knows what an update needs; then while it fits beside."""
    lm, sample, options = model(), backend(), SamplingOptions(response_length=12)
    prompts, numbers = tiny.prompts(MIXED), draws(0, len(MIXED), 12)
    memory: list[float] = []
    size = 4 * 2 * 2 * len(MIXED) * 24 * tiny.WIDTH // 2  # fp32, 2 layers, keys and values, 24 of 9 + 12, 2 of 4 heads
    monkeypatch.setattr(_memory, "device_memory", lambda: (memory[0], 100_000.0))
    counts = []
    for most in (0.0, 89_999.0 - size, 90_000.0, 90_001.0, 0.0):
        memory[:] = [most]
        sample(lm, prompts, options, numbers)
        counts.append(len(recorder.tapes))
        sample.release()
    each = counts[0]
    # after the first it is freed; it stays after the second and third, which has it in `most`; not after the fourth
    assert each and counts == [each, 2 * each, 2 * each, 2 * each, 3 * each]


@pytest.mark.usefixtures("roomy")
def test_weights_that_moved_and_adapters_that_changed_are_recorded_again(recorder: tape.Recorder) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    lm = model()
    inject_adapter_in_model(LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"]), lm)
    sample, options = backend(), SamplingOptions(response_length=9)
    prompts, numbers = tiny.prompts(MIXED), draws(0, len(MIXED), 9)
    tuners = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]

    def enable(on: bool) -> None:
        for tuner in tuners:
            tuner.enable_adapters(on)

    def move() -> None:
        lm.model.layers[0].mlp.up_proj.weight.data = lm.model.layers[0].mlp.up_proj.weight.data * 1.5

    for change in (lambda: None, lambda: enable(False), lambda: enable(True), move):
        change()
        before = len(recorder.tapes)
        require_equal(sample(lm, prompts, options, numbers), expected(lm, prompts, options, numbers))
        assert len(recorder.tapes) > before
    assert tuners


def test_graphs_are_few(recorder: tape.Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each number of rows, a power of 2 below the first, and each 8 tokens; the oldest is forgotten."""
    lm, sample, rows = model(eos=1.0), backend(), 13
    options, prompts, numbers = SamplingOptions(response_length=40), tiny.prompts([9] * rows), draws(0, rows, 40)
    keys: list[Any] = []
    run = _graphs.Graphs.run
    monkeypatch.setattr(_graphs.Graphs, "run", lambda self, key, *steps: (keys.append(key), run(self, key, *steps))[1])
    monkeypatch.setattr(_graphs, "MOST", 3)
    require_equal(sample(lm, prompts, options, numbers), expected(lm, prompts, options, numbers))
    assert {key[0] for key in keys} <= {13, 8, 4, 2, 1} and len({key[0] for key in keys}) > 2
    assert {key[1] for key in keys} <= {16, 24, 32, 40, 48, 56} and keys == sorted(keys, key=lambda key: key[1])
    graphs: Any = sample._memory.graphs
    assert len(set(keys)) > 3 == len(graphs._replays) and list(graphs._replays)[-1] == keys[-1]


def test_a_step_that_needs_the_host_is_not_recorded_and_says_so_once(recorder: tape.Recorder) -> None:
    lm, sample, options = model(), backend(), SamplingOptions(response_length=9)
    lm.model.layers[1].register_forward_pre_hook(lambda _, inputs: inputs if torch.ones(3).sum().item() else None)
    prompts, numbers = tiny.prompts(MIXED), draws(0, len(MIXED), 9)
    with pytest.warns(UserWarning, match="without a CUDA graph.*aten::_local_scalar_dense needs the host") as caught:
        got = [sample(lm, prompts, options, numbers) for _ in range(2)]
    assert not recorder.tapes and len([w for w in caught if "CUDA graph" in str(w.message)]) == 1
    for each in got:
        require_equal(each, expected(lm, prompts, options, numbers))


def test_a_recording_that_fails_is_said_and_the_steps_run_as_they_are(
    recorder: tape.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> Any:
        raise RuntimeError("CUDA error: operation not permitted\nmore")

    monkeypatch.setattr(_graphs, "recorder", lambda _: refuse)
    lm, options = model(), SamplingOptions(response_length=9)
    prompts, numbers = tiny.prompts(MIXED), draws(0, len(MIXED), 9)
    with pytest.warns(UserWarning, match="graph, which may take several times as long: CUDA error: .* permitted$"):
        got = backend()(lm, prompts, options, numbers)
    require_equal(got, expected(lm, prompts, options, numbers))


def test_what_needs_the_host() -> None:
    x, aten = torch.arange(6.0), torch.ops.aten
    needs = {
        "item": (lambda: x.sum().item(), True),
        "nonzero": (lambda: x.nonzero(), True),
        "mask": (lambda: x[x > 2], True),
        "index": (lambda: x[torch.tensor([1])], False),
        "cast": (lambda: x.double() + 1, False),
        "write": (lambda: x.index_put((torch.tensor([1]),), torch.ones(1)), False),
    }
    for name, (operation, expects) in needs.items():
        with _graphs.HostOperations() as host:
            operation()
        assert bool(host.first) == expects, (name, host.first)
    meta = torch.ones(3, device="meta")
    assert _graphs.needs_host(aten._to_copy.default, (x,), {"device": meta.device})
    assert _graphs.needs_host(aten.copy_.default, (meta, x), {}) and not _graphs.needs_host(
        aten.copy_.default, (x, x), {}
    )


def starts_work(op: Any) -> bool:
    """Whether a device computes: some operations only show the same memory in another way."""
    is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in op._schema.returns)
    return not is_view and op.name() != "aten::_unsafe_view"


class Counter(TorchDispatchMode):
    """Operations that the host starts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.replays = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if starts_work(op):
            self.names.append(op.name())
        return op(*args, **(kwargs or {}))

    def uncounted(self, replay: Any) -> None:
        """Run a graph, whose operations the host does not start."""
        counted = len(self.names)
        replay()
        del self.names[counted:]
        self.replays += 1


def test_of_a_recorded_step_the_host_starts_nothing_but_the_graph(
    recorder: tape.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one column to the next, once all is recorded. The host of a GPU does not look each time who has ended."""
    lm, memory, options, length = model(eos=-1e4), _memory.Memory(), SamplingOptions(response_length=20), 20
    prompts, config, counter = tiny.prompts(MIXED), loop.Config(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD), Counter()
    monkeypatch.setattr(loop._Unfinished, "observe", lambda *_: None)
    record = recorder.__call__

    def counting(step: Any) -> Any:
        replay = record(step)
        return lambda: counter.uncounted(replay)

    monkeypatch.setattr(_graphs, "recorder", lambda _: counting)
    choice = loop._Choice.from_options(lm, options, config, greedy=False)
    for rollout in range(2):
        columns = loop._Rollout(lm, prompts, choice, draws(rollout, len(MIXED), length), memory).columns()
        next(columns)
        counter.replays = 0
        with counter:
            counter.names.clear()
            assert len(list(columns)) == length - 1
    assert counter.replays == length - 1 and not counter.names


def test_a_step_of_opt_has_few_operations(recorder: tape.Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: what a layer computes, and attention in eight: two products, cast, scale, the mask inverted and applied,
    softmax, cast. The part of the cache that it reads is not copied."""
    monkeypatch.setattr(F, "linear", torch._C._nn.linear)  # ZeRO-3 of an earlier test replaces it for the process
    counts = []
    for layers in (2, 3):
        lm = model(
            "opt", num_hidden_layers=layers, do_layer_norm_before=True, word_embed_proj_dim=tiny.WIDTH
        ).bfloat16()
        recorder.tapes.clear()
        backend()(lm, tiny.prompts(MIXED), SamplingOptions(response_length=20), draws(0, len(MIXED), 20))
        assert len(recorder.tapes) > 1, "the first reads a part of the cache"
        counts.append(sum(starts_work(operation) for operation, *_ in recorder.tapes[0].operations))
    norms, products, activation, sums, scale, cache, attend = 2, 6, 1, 2, 1, 2, 8
    assert counts[1] - counts[0] <= norms + products + activation + sums + scale + cache + attend

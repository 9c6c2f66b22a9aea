"""Every rollout backend: greedy tokens equal those of transformers, and each sample comes with its true log-probs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf import plugins
from rlhf.config.options import SamplingOptions
from rlhf.errors import UserError
from rlhf.generation import BackendOptions, loop
from rlhf.kernels import attention
from rlhf.maths.uniforms import uniforms
from rlhf.models import packing
from rlhf.models.policy import Policy
from rlhf.types import Prompts, SampledRollout
from tests.support import tiny

BACKENDS = plugins.names("rlhf.generation")
PROMPTS = tiny.prompts([3, 9, 8])
SAMPLING = SamplingOptions(response_length=12)
OTHER_OPTIONS: dict[str, dict[str, Any]] = {"loop": {}, "vllm": {"memory_share": 0.3, "sleep_level": 2}}

pytestmark = pytest.mark.usefixtures("vllm")
backends = pytest.mark.parametrize("backend", BACKENDS)
families = pytest.mark.parametrize("family", tiny.FAMILIES)
sampled_families = pytest.mark.parametrize(
    ("backend", "family"), [*(("loop", family) for family in tiny.FAMILIES), *((name, "gpt2") for name in BACKENDS[1:])]
)
"""of what another program samples, families differ in their weights alone: greedy tokens show them"""


def built(backend: str) -> Any:
    return plugins.build("rlhf.generation", {"name": backend, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD})


def sampled(
    backend: str, model: PreTrainedModel, prompts: Prompts = PROMPTS, sampling: SamplingOptions = SAMPLING
) -> SampledRollout:
    return built(backend)(model, prompts, sampling, draws(0, len(prompts), sampling))


def sampled_with(
    model: PreTrainedModel, prompts: Prompts, numbers: Tensor, sampling: SamplingOptions
) -> SampledRollout:
    return built("loop")(model, prompts, sampling, numbers)


def draws(seed: int, rows: int, sampling: SamplingOptions = SAMPLING) -> Tensor:
    return uniforms([(seed, row) for row in range(rows)], sampling.response_length)


def greedy(backend: str, model: PreTrainedModel, prompts: Prompts = PROMPTS) -> SampledRollout:
    return built(backend)(model, prompts, SAMPLING, None)


def leaning_to(token: int, strength: float, family: str = "llama") -> PreTrainedModel:
    """A model whose logit of `token` is `strength` higher (or, below 0, lower) everywhere."""
    model = tiny.causal_lm(family)
    head = model.get_output_embeddings()  # with a bias: some backends get to know of the model its weights only
    head.bias = torch.nn.Parameter(torch.zeros(tiny.VOCAB).index_fill(0, torch.tensor([token]), strength))
    return model


@torch.no_grad()
def rescored(model: PreTrainedModel, rollout: SampledRollout, temperature: float = 1.0) -> Tensor:
    return Policy(model)(rollout.sequences, temperature)[0][:, rollout.prompt_ids.shape[1] :]


def require_well_formed(rollout: SampledRollout, prompts: Prompts) -> None:
    """What types.Rollout says of its fields."""
    ids, mask = rollout.response_ids, rollout.mask
    assert rollout.prompt_ids is prompts.ids and rollout.rows == prompts.rows
    assert ids.shape == mask.shape == rollout.sampled_logprobs.shape and ids.shape[1] <= SAMPLING.response_length
    for b in range(len(rollout)):
        length = int(mask[b].sum())
        assert length >= 1 and mask[b, :length].all()
        end_positions = (ids[b, :length] == tiny.EOS).nonzero().flatten().tolist()
        assert end_positions == ([length - 1] if rollout.ended[b] else [])
        assert rollout.ended[b] or length == SAMPLING.response_length
        assert (ids[b, length:] == tiny.PAD).all() and not rollout.sampled_logprobs[b, length:].any()
    assert (rollout.sampled_logprobs[mask] < 0).all()


@backends
@families
def test_greedy_tokens_equal_those_of_transformers(backend: str, family: str) -> None:
    model = leaning_to(tiny.EOS, 2.0, family)
    rollout = greedy(backend, model)
    require_well_formed(rollout, PROMPTS)
    theirs = model.generate(
        input_ids=PROMPTS.ids,
        attention_mask=PROMPTS.mask.long(),
        do_sample=False,
        max_new_tokens=SAMPLING.response_length,
        eos_token_id=tiny.EOS,
        pad_token_id=tiny.PAD,
    )[:, PROMPTS.ids.shape[1] :]
    assert torch.equal(rollout.response_ids, theirs)


@sampled_families
def test_logprobs_of_sampling_equal_those_of_a_forward_pass(backend: str, family: str) -> None:
    model = leaning_to(tiny.EOS, 1.0, family)
    rollout = sampled(backend, model)
    require_well_formed(rollout, PROMPTS)
    assert float((rollout.sampled_logprobs - rescored(model, rollout)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("backend", "family"), [("loop", "llama"), ("loop", "opt"), *((n, "gpt2") for n in BACKENDS[1:])]
)
def test_bf16_sampling_is_near_the_forward_pass(backend: str, family: str) -> None:
    model = leaning_to(tiny.EOS, 1.0, family).to(torch.bfloat16)
    rollout = sampled(backend, model)
    difference = (rollout.sampled_logprobs - rescored(model, rollout))[rollout.mask]
    # The multiplicative probability error of NeMo-RL: mean of exp|difference|. The stand-in adds up in another order.
    assert float(difference.abs().exp().mean()) < (1.01 if backend == "loop" else 1.015)


@sampled_families
def test_padding_of_the_prompt_changes_no_token(backend: str, family: str) -> None:
    model = tiny.causal_lm(family)
    expected = greedy(backend, model).response_ids
    pad = torch.nn.functional.pad
    wider = Prompts(pad(PROMPTS.ids, (7, 0), value=tiny.EOS), pad(PROMPTS.mask, (7, 0)), PROMPTS.rows)
    assert torch.equal(greedy(backend, model, wider).response_ids, expected)
    alone = greedy(backend, model, Prompts(PROMPTS.ids[:1, 6:], PROMPTS.mask[:1, 6:], PROMPTS.rows[:1]))
    width = alone.response_ids.shape[1]
    assert torch.equal(alone.response_ids[0], expected[0, :width])


@backends
def test_logprobs_with_other_options_are_those_of_the_tempered_distribution(backend: str) -> None:
    """Those of the softmax of the logits over the temperature, whatever options of its own the backend has."""
    own = {*plugins.find("rlhf.generation", backend).Config.model_fields} - {*BackendOptions.model_fields}
    assert own == {*OTHER_OPTIONS.get(backend, {})}, "a value other than the default for each option of the backend"
    options = {"name": backend, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD, **OTHER_OPTIONS.get(backend, {})}
    model, other = leaning_to(tiny.EOS, 1.0), SamplingOptions(response_length=7, temperature=0.7)
    rollout = plugins.build("rlhf.generation", options)(model, PROMPTS, other, draws(0, 3, other))
    assert rollout.response_ids.shape[1] == 7
    assert float((rollout.sampled_logprobs - rescored(model, rollout, 0.7)).abs().max()) < 1e-5
    assert float((rollout.sampled_logprobs - rescored(model, rollout, 1.0)).abs().max()) > 1e-2


@backends
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_samples_follow_the_distribution(backend: str, temperature: float) -> None:
    """4,000 first tokens after one prompt against the softmax of the plain model: total variation."""
    model = tiny.causal_lm()
    count = 4000
    one = PROMPTS[1:2]
    many = Prompts(one.ids.expand(count, -1), one.mask.expand(count, -1), one.rows * count)
    sampling = SamplingOptions(response_length=1, temperature=temperature)
    tokens = sampled(backend, model, many, sampling).response_ids[:, 0]
    with torch.no_grad():
        expected = (model(input_ids=one.ids).logits[0, -1].double() / temperature).softmax(-1)
    drawn = torch.bincount(tokens, minlength=tiny.VOCAB) / count
    # sum_v sqrt(p_v (1 - p_v) / (2 pi n)) is the expected distance of a right sampler.
    noise = float((expected * (1 - expected) / (2 * torch.pi * count)).sqrt().sum())
    assert 0.5 * float((drawn - expected).abs().sum()) < 1.5 * noise


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_each_token_is_where_its_number_falls_in_the_distribution(temperature: float) -> None:
    """The loop, token by token: the first whose cumulated probability after its prefix, in float64, exceeds its number.

    So the joint of a whole response is right, which single tokens do not show.
    """
    model, prompts = leaning_to(tiny.EOS, -2.0), tiny.prompts([3, 9, 8, 5])
    numbers = draws(5, 4)
    rollout = sampled_with(model, prompts, numbers, SamplingOptions(response_length=12, temperature=temperature))
    checked = 0
    for b, response in enumerate(rollout.response_tokens()):
        for t, token in enumerate(response):
            prefix = torch.tensor([*prompts.ids[b][prompts.mask[b]].tolist(), *response[:t]])
            with torch.no_grad():
                logits = model(input_ids=prefix[None]).logits[0, -1].double() / temperature
            edges = logits.softmax(-1).cumsum(-1)
            if float((edges - numbers[b, t]).abs().min()) > 1e-5:  # else rounding may decide
                assert token == int((edges <= numbers[b, t]).sum()), (b, t)
                checked += 1
    assert checked > 0.9 * int(rollout.mask.sum()) > 20


@backends
def test_the_draws_decide(backend: str) -> None:
    model = tiny.causal_lm()
    first, again = sampled(backend, model), sampled(backend, model)
    assert torch.equal(first.response_ids, again.response_ids)
    other = built(backend)(model, PROMPTS, SAMPLING, draws(1, 3))
    assert not torch.equal(first.response_ids, other.response_ids)


@backends
def test_an_end_at_once_and_no_end_at_all(backend: str) -> None:
    at_once = sampled(backend, leaning_to(tiny.EOS, 1e4))
    assert at_once.response_ids.tolist() == [[tiny.EOS]] * 3 and at_once.mask.all() and at_once.ended.all()
    never = sampled(backend, leaning_to(tiny.EOS, -1e4))
    require_well_formed(never, PROMPTS)
    assert never.mask.all() and not never.ended.any() and never.response_ids.shape[1] == SAMPLING.response_length


@backends
def test_an_end_token_inside_the_prompt_ends_nothing(backend: str) -> None:
    model = leaning_to(tiny.EOS, -1e4)
    ids = PROMPTS.ids.clone()
    ids[:, -3] = tiny.EOS
    rollout = sampled(backend, model, Prompts(ids, PROMPTS.mask, PROMPTS.rows))
    assert rollout.mask.all() and not rollout.ended.any()
    assert float((rollout.sampled_logprobs - rescored(model, rollout)).abs().max()) < 1e-5


@backends
def test_a_model_without_attention_is_refused_not_sampled_wrongly(backend: str) -> None:
    config = AutoConfig.for_model("mamba", vocab_size=tiny.VOCAB, hidden_size=16, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UserError, match="'mamba'"):
        greedy(backend, model)


@backends
def test_weights_and_gradients_stay(backend: str) -> None:
    model = tiny.causal_lm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not sampled(backend, model).sampled_logprobs.requires_grad
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


@sampled_families
def test_rows_that_end_early_change_no_other(backend: str, family: str) -> None:
    """Ten rows, most of which end soon and are dropped: four of them sample what each samples alone."""
    model = leaning_to(tiny.EOS, 3.0, family)
    prompts = tiny.prompts([3, 9, 8, 5, 5, 1, 7, 2, 4, 6])
    uniform_draws = draws(3, 10)
    together = built(backend)(model, prompts, SAMPLING, uniform_draws)
    assert len(set(together.lengths.tolist())) > 2
    for b in range(0, 10, 3):
        alone = built(backend)(model, prompts[b : b + 1], SAMPLING, uniform_draws[b : b + 1])
        assert alone.response_tokens() == together[b : b + 1].response_tokens()


@pytest.mark.parametrize(("packs", "read"), [(False, [9, 2 * 8, 3 * 4]), (True, [9, 8 + 5, 4 + 3 + 3])])
def test_prompts_are_read_in_groups_of_few_tokens(
    packs: bool, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 16 tokens at once, padding too: a prompt of 9, of 8 and 5, of 4, 3 and 3; equal ones once. A cache is
    filled from padded rows, or from packed ones."""
    monkeypatch.setattr(loop, "TOGETHER", 16)
    model, sizes = leaning_to(tiny.EOS, -2.0), []
    if packs:
        attention.install(model)
        packing.detect_support(model, unsharded=True)
    assert packing.packs(model, 20) == packs
    model.register_forward_pre_hook(lambda _, __, options: sizes.append(options["input_ids"].numel()), with_kwargs=True)
    prompts = tiny.prompts([3, 9, 8, 5, 4, 3])[torch.tensor([4, 2, 1, 0, 3, 5, 2, 0])]
    rollout = sampled("loop", model, prompts)
    assert sizes[:4] == [*read, 8]
    plain = leaning_to(tiny.EOS, -2.0)
    assert float((rollout.sampled_logprobs - rescored(plain, rollout)).abs().max()) < 1e-5


def test_a_prompt_with_several_responses_is_read_once() -> None:
    model = leaning_to(tiny.EOS, 1.0)
    read = []
    model.register_forward_pre_hook(lambda _, __, options: read.append(options["input_ids"].numel()), with_kwargs=True)
    thrice = Prompts(PROMPTS.ids.repeat(3, 1), PROMPTS.mask.repeat(3, 1), PROMPTS.rows * 3)
    rollout = sampled("loop", model, thrice)
    assert read[0] == 3 * 9 and max(read[1:]) <= 9
    assert float((rollout.sampled_logprobs - rescored(model, rollout)).abs().max()) < 1e-5

"""Methods that put learned tokens before every row, of a policy and of a reward model: peft computes the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from torch import Tensor

from rlhf import adapters, plugins
from rlhf.config.options import EngineOptions, SamplingOptions
from rlhf.distributed.zero3 import Shards
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.models.adapter_files import read_weights
from rlhf.models.head import ScoreHead
from rlhf.models.load import Loading, load_backbone, load_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel, can_join, load_scalar_model
from rlhf.models.traits import cache_input
from rlhf.training.checks import check_engine, require_start
from rlhf.types import Pairs
from tests.contracts.test_adapter_methods import IDS, OPTIMIZER, ROWS, VIRTUAL, start, train
from tests.contracts.test_adapters import disturbed, greatest, logprobs
from tests.support import tiny
from tests.support.choice import marked_long

pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    start().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", VIRTUAL)
def test_virtual_tokens_are_those_of_peft_and_train_alone(method: str, base: str, tmp_path: Path) -> None:
    spec = f"{method},num_virtual_tokens=5"
    options = EngineOptions(dtype="fp32", zero_stage=3, gradient_checkpointing=method != "prefix_tuning")
    lm = load_causal_lm(base, torch.float32, tiny.VOCAB, Loading(shards=Shards(torch.float32, None)))
    torch.manual_seed(0)
    engine = Engine(Policy(adapters.wrap(lm, spec)), options, OPTIMIZER, 3)
    nlls = train(engine, 2)
    assert nlls[1] < nlls[0]
    save_policy(engine, spec, tiny.tokenizer(), tmp_path)
    plain = start()
    with engine.inference() as policy:
        trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
        assert trained and all("prompt_encoder" in name for name in trained)
        moved = logprobs(policy, ROWS)
        with adapters.open_adapter(spec).disabled(policy.lm):
            assert torch.equal(logprobs(policy, ROWS), logprobs(Policy(plain), ROWS))
    loaded = PeftModel.from_pretrained(start(), tmp_path).eval()
    with torch.no_grad():
        scores = loaded(input_ids=ROWS.ids, attention_mask=ROWS.mask.long()).logits[:, -ROWS.ids.shape[1] :]
    expected = scores[:, :-1].log_softmax(-1).gather(2, ROWS.ids[:, 1:, None]).squeeze(2)
    assert greatest((moved[:, 1:] - expected)[ROWS.loss_mask[:, 1:]]) < 1e-5
    assert greatest(moved - logprobs(Policy(plain), ROWS)) > 1e-2
    tensors, numbers = [(name, value.clone()) for name, value in engine.tensors()], engine.state_dict()
    third = train(engine, 1)
    resumed = Engine(Policy(adapters.wrap(start(), spec)), EngineOptions(dtype="fp32", zero_stage=0), OPTIMIZER, 3)
    resumed.load_state_dict(numbers)
    resumed.load_tensors(tensors)
    assert train(resumed, 1) == pytest.approx(third, abs=1e-6)
    with pytest.raises(UserError, match=f"adapter {method}: excludes --no-gather-whole"):
        check_engine(EngineOptions(adapter=method, zero_stage=3, gather_whole=False))
    with pytest.raises(UserError, match=f"adapter {method}: excludes --torch-compile"):
        check_engine(EngineOptions(adapter=method, sequence_parallel_size=2))
    saved = load_causal_lm(str(tmp_path), torch.float32, tiny.VOCAB)
    assert greatest(logprobs(Policy(saved), ROWS) - moved) < 1e-5
    with pytest.raises(UserError, match="virtual tokens, which no stage trains further"):
        require_start(str(tmp_path))
    with pytest.raises(UserError, match="cannot be merged, but rollout backend 'vllm' needs"):
        adapters.require_merging(spec, "rollout backend 'vllm'")


@pytest.mark.parametrize("family", ["gpt2", marked_long("gpt_neo", ())])
@pytest.mark.parametrize("method", VIRTUAL)
def test_a_tied_model_whose_vocabulary_has_grown_saves_its_tokens_alone(
    method: str, family: str, tmp_path: Path
) -> None:
    """peft adds the whole embedding and the head to the file then, and safetensors writes no tensor twice."""
    tiny.causal_lm(family, vocab_size=tiny.VOCAB - 3).save_pretrained(tmp_path / "base")
    lm = load_causal_lm(str(tmp_path / "base"), torch.float32, tiny.VOCAB)
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    adapters.wrap(lm, f"{method},num_virtual_tokens=5")
    disturbed(lm)
    engine = Engine(Policy(lm), EngineOptions(dtype="fp32", zero_stage=0), OPTIMIZER, 3)
    save_policy(engine, method, tiny.tokenizer(), tmp_path / "tokens")
    assert {*read_weights(str(tmp_path / "tokens"))} == {"prompt_embeddings"}
    loaded = load_causal_lm(str(tmp_path / "tokens"), torch.float32, tiny.VOCAB)
    assert greatest(logprobs(Policy(loaded), ROWS) - logprobs(Policy(lm), ROWS)) < 1e-5


@pytest.mark.parametrize("family", [marked_long(name, {"llama", "gpt2"}) for name in ("llama", "gpt2", "opt", "bloom")])
@pytest.mark.parametrize("method", VIRTUAL)
def test_a_policy_samples_with_virtual_tokens(method: str, family: str) -> None:
    """The log-probs of sampling, from a cache and left-padded rows, are those of whole right-padded rows."""
    torch.manual_seed(0)
    sizes = {"word_embed_proj_dim": tiny.WIDTH} if family == "opt" else {}
    lm = adapters.wrap(tiny.causal_lm(family, **sizes), f"{method},num_virtual_tokens=5")
    disturbed(lm)
    prompts = tiny.prompts([3, 7, 5, 3])
    backend = plugins.build("rlhf.generation", {"name": "loop", "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD})
    uniforms = torch.rand(4, 12, generator=torch.Generator().manual_seed(0))
    rollout = backend(lm, prompts, SamplingOptions(response_length=12), uniforms)
    whole = logprobs(Policy(lm), rollout.sequences)[:, prompts.ids.shape[1] :]
    assert greatest((whole - rollout.sampled_logprobs)[rollout.mask]) < 1e-5
    with adapters.open_adapter(method).disabled(lm):
        off = logprobs(Policy(lm), rollout.sequences)[:, prompts.ids.shape[1] :]
    assert greatest((off - rollout.sampled_logprobs)[rollout.mask]) > 1e-2


def score_by_peft(model: Any, ids: Tensor) -> Tensor:
    """The score [1, 1] of a row [1, T]. peft 0.21 knows no cache of classifiers in transformers 5.24."""
    count = model.active_peft_config.num_virtual_tokens
    if model.active_peft_config.peft_type != "PREFIX_TUNING":
        scores: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    else:
        mask, prefix = ids.new_ones(1, count + ids.shape[1]), model.get_prompt(batch_size=1)
        scores = model.base_model(input_ids=ids, attention_mask=mask, **cache_input(model.base_model, prefix)).logits
    return scores


@pytest.mark.parametrize("method", VIRTUAL)
def test_a_reward_model_with_virtual_tokens_scores_the_same_in_peft(method: str, base: str, tmp_path: Path) -> None:
    def engine_of(stage: int) -> Engine:
        backbone = load_backbone(base, torch.float32, tiny.VOCAB)
        torch.manual_seed(0)
        model = ScalarModel(
            adapters.wrap(backbone, f"{method},num_virtual_tokens=5"),
            ScoreHead(torch.linspace(-1, 1, tiny.WIDTH)[None]),
        )
        return Engine(model, EngineOptions(dtype="fp32", zero_stage=stage), OPTIMIZER, 3)

    def step(engine: Engine) -> float:
        return engine.step([ROWS[:2], ROWS[2:]], lambda rows: (engine(rows)[rows.mask].mean(), {}))["loss"]

    engine, sharded = engine_of(0), engine_of(3)
    assert [step(sharded), step(sharded)] == pytest.approx([step(engine), step(engine)], rel=tiny.ORDERS)
    names = {name for name, weight in engine.module.named_parameters() if weight.requires_grad}
    assert "score.weight" in names and all("prompt_encoder" in name for name in names - {"score.weight"})
    save_scalar(engine, method, tiny.tokenizer(), tmp_path)
    loaded = load_scalar_model(str(tmp_path), torch.float32, tiny.VOCAB)
    with engine.inference() as scalar, torch.no_grad():
        scores = scalar(ROWS)
        assert torch.equal(loaded(ROWS), scores)
        assert not can_join(scalar, Pairs(ROWS, ROWS))
    in_peft = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    with torch.no_grad():  # one row at a time: transformers reads padding if a model has embeddings as input
        expected = [score_by_peft(in_peft, torch.tensor([row])) for row in IDS]
    last = scores.gather(1, ROWS.mask.sum(1, keepdim=True) - 1)
    assert greatest(torch.cat(expected) - last) < tiny.ORDERS * tiny.WIDTH
    tensors, numbers = [(name, value.clone()) for name, value in engine.tensors()], engine.state_dict()
    third, resumed = step(engine), engine_of(0)
    resumed.load_state_dict(numbers)
    resumed.load_tensors(tensors)
    assert step(resumed) == third

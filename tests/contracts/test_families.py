"""Every family of docs/models.md through what the three stages do with a model, smallest steps, in one process.

tests/contracts/test_models.py tests the families of tests/support/tiny.py in detail. The oracle is plain transformers.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf import adapters, generation
from rlhf.config.options import EngineOptions, OptimizerOptions, SamplingOptions
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.training import Engine
from rlhf.maths import losses
from rlhf.models import packing
from rlhf.models.load import load_causal_lm, load_config
from rlhf.models.policy import Policy
from rlhf.models.scalar import new_head, new_scalar_model, scores
from rlhf.models.trunk import PolicyRole, ScalarRole, Trunk
from rlhf.shipped import CONFIGS
from rlhf.types import Sequences
from tests.support import families, tiny
from tests.support.choice import marked_long

pytestmark = pytest.mark.usefixtures("ranks")

ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
PAGE = CONFIGS.parent / "docs/models.md"
IN_DETAIL = set(tiny.FAMILIES)
OPTIONS = EngineOptions(dtype="fp32", adapter="lora,r=2")
OPTIMIZER = OptimizerOptions(learning_rate=1e-4, lr_scheduler_type="constant", warmup_ratio=0)


def saved(family: str, folder: Path) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        special = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
        config = AutoConfig.for_model(family, **{**special, **(families.ALL | families.RECURRENT)[family]})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return str(folder / family)


@torch.no_grad()
def plain_logprobs(model: Any, rows: Sequences) -> Tensor:
    """Of one row at a time, without padding, in float64 after the logits."""
    expected = torch.zeros(rows.ids.shape, dtype=torch.float64)
    for b, real in enumerate(rows.mask):
        ids = rows.ids[b : b + 1, real]
        logprobs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        expected[b, real.nonzero().squeeze(1)[1:]] = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
    return expected * rows.loss_mask


def trained(model: Any, loss: Any, steps: int = 2) -> tuple[Engine, list[float]]:
    engine = Engine(model, tiny.training_options(OPTIONS, OPTIMIZER), steps)
    return engine, [engine.step([ROWS], lambda rows: loss(engine, rows))["loss"] for _ in range(steps)]


QUICK = {
    "cohere2", "deepseek_v3", "falcon", "gemma3_text", "glm4", "gpt_bigcode", "gpt_oss", "mpt", "phi3", "qwen3_moe",
}  # fmt: skip
"""one of each kind of layer: windows, latent attention, one key for all heads, no rotary positions, products in one,
experts"""


@pytest.mark.parametrize("family", [marked_long(name, QUICK) for name in sorted(families.ALL.keys() - IN_DETAIL)])
def test_a_family_runs_in_all_stages(family: str, tmp_path: Path) -> None:
    path = saved(family, tmp_path)
    lm = load_causal_lm(path, torch.float32, tiny.VOCAB)
    expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(path), ROWS)
    with torch.no_grad():
        assert (Policy(lm)(ROWS)[0] - expected).abs().max() < 1e-5
    assert packing.packs(lm, 20) == table()[family]["packs"]
    # Step 1, and what the next stage and transformers load.
    adapters.wrap(lm, OPTIONS.adapter)
    count = ROWS.loss_mask.sum()
    policy, nll = trained(Policy(lm), lambda engine, rows: losses.token_nll(engine(rows)[0], rows.loss_mask, count))
    assert nll[1] < nll[0]
    save_policy(policy, OPTIONS.adapter, tiny.tokenizer(), tmp_path / "policy")
    with policy.inference() as model:
        logprobs = model(ROWS)[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert (plain_logprobs(plain, ROWS) - logprobs).abs().max() < 1e-5
    # Step 2.
    reward = new_scalar_model(path, torch.float32, tiny.VOCAB)
    adapters.wrap(reward.backbone, OPTIONS.adapter)
    engine, means = trained(reward, lambda engine, rows: (-scores(engine(rows), rows.mask).mean(), {}))
    assert means[1] < means[0]
    save_scalar(engine, OPTIONS.adapter, tiny.tokenizer(), tmp_path / "reward")
    if family not in WITHOUT_CLASSIFIER:
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
        with engine.inference() as model, torch.no_grad():
            ours = scores(model(ROWS), ROWS.mask)
            for row, real, score in zip(ROWS.ids, ROWS.mask, ours, strict=True):
                torch.testing.assert_close(classifier(row[None, real]).logits[0, 0], score, rtol=1e-5, atol=1e-5)
    # Step 3: the first ratio is 1, and a step on the clipped loss.
    backend = generation.open_backend("loop", eos_token_id=tiny.EOS, pad_token_id=tiny.PAD)
    uniforms = torch.rand(3, 6, generator=torch.Generator().manual_seed(1))
    with policy.inference() as model:
        rollout = backend(model.lm, tiny.prompts([4, 9, 6]), SamplingOptions(response_length=6), uniforms)
        old = model(rollout.sequences)[0][:, -rollout.mask.shape[1] :]
    assert ((old - rollout.sampled_logprobs) * rollout.mask).abs().max() < 1e-5
    assert policy.step([rollout], lambda each: (-(policy(each.sequences)[0].sum()) / 18, {}))["grad_norm"] > 0


SHARED_QUICK = {"gpt_oss", "bloom"}
"""experts; no rotary positions. The others share a trunk in make test-long, and three in test_trunk.py"""


@pytest.mark.parametrize("family", [marked_long(name, SHARED_QUICK) for name in families.ALL])
def test_roles_on_one_trunk_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    """A policy computes what plain transformers does, also after a pass of a reward model whose adapter is trained."""
    assert table()[family]["shares"]
    path = saved(family, tmp_path)
    expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(path), ROWS)
    trunk = Trunk(load_causal_lm(path, torch.float32, tiny.VOCAB))
    for role in ("policy", "reward"):
        trunk.create(role, adapters.peft_options("lora,r=2", load_config(path)))
    policy = PolicyRole(trunk, "policy")
    reward = ScalarRole(trunk, "reward", new_head(trunk.backbone, torch.float32, 0), trained=True)
    with torch.no_grad():
        first, before = policy(ROWS)[0], reward(ROWS)
        for weight in reward.parameters():
            weight += 0.1
        assert not torch.equal(reward(ROWS), before)
        assert (first - expected).abs().max() < 1e-5 and torch.equal(policy(ROWS)[0], first)


WITHOUT_CLASSIFIER = {"lfm2", "granite", "cohere", "cohere2", "olmo2", "olmoe", "gpt_bigcode", "ernie4_5"}


def cells() -> dict[str, tuple[str, ...]]:
    """The table of docs/models.md: by model type, whether it trains, packs, compiles, and shares a trunk."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \| ([\w. ]+) \| (\w+) \| (\w+) \|$", text, re.MULTILINE)
    return {name: row for name, *row in rows}


def table() -> dict[str, dict[str, bool]]:
    """By model type, what is marked in that table; `packs` for rows that are longer than a window."""
    return {
        name: {"trains": trains == "yes", "packs": marked(packs), "shares": shares == "yes"}
        for name, (trains, packs, _, shares) in cells().items()
    }


def marked(cell: str) -> bool:
    """Of "yes", "no", "up to the window" and "from transformers 5.24"."""
    since = cell.removeprefix("from transformers ")
    return cell == "yes" or (since != cell and Version(transformers.__version__) >= Version(since))


def test_the_table_names_every_family() -> None:
    assert {name for name, marks in table().items() if marks["trains"]} == set(families.ALL)
    assert {name for name, marks in table().items() if not marks["trains"]} == set(families.RECURRENT)
    assert {name for name, (_, packs, *_) in cells().items() if packs == "up to the window"} == families.WINDOWED

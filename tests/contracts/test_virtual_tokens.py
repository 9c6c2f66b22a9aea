"""Prompt tuning and p-tuning: peft computes the same, and step 1, evaluation and verification open what is saved."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from rlhf import adapters, plugins
from rlhf.chat.responses import Generation, Sampling, load_models
from rlhf.config.options import EngineOptions, SamplingOptions
from rlhf.engine.export import AdapterAlone, save_policy
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.models.load import Loading, load_backbone, load_causal_lm
from rlhf.models.policy import Policy
from rlhf.text.messages import Message
from rlhf.training.checks import check_start
from tests.contracts.test_adapter_methods import OPTIMIZER, ROWS, VIRTUAL, train
from tests.contracts.test_adapters import disturbed, greatest, logprobs
from tests.support import forked, tiny
from tests.support.choice import marked_long

pytestmark = pytest.mark.usefixtures("ranks")

OPENED = Loading(virtual_tokens=True)
OLDER_RUN = Path(__file__).parents[1] / "support" / "older_run"
STEP_1 = "step1_sft --model model --data-path rows.jsonl --max-length 24 --sample-rows 0 --max-eval-rows 2"
STEP_1 += " --batch-size 4 --micro-batch-size 4 --save-every 1 --num-train-epochs 4 --adapter"
FEW = ",num_virtual_tokens=5"


@pytest.mark.parametrize("family", [marked_long(name, {"llama", "gpt2"}) for name in ("llama", "gpt2", "opt", "bloom")])
@pytest.mark.parametrize("method", VIRTUAL)
def test_peft_computes_the_same_and_samples_follow_it(method: str, family: str, tmp_path: Path) -> None:
    """The loss falls, nothing but the tokens learns, and what is saved has peft's log-probs of whole rows, which are
    those of sampling, too: with packed rows and a cache here, with padded rows there."""
    sizes = {"word_embed_proj_dim": tiny.WIDTH} if family == "opt" else {}
    tiny.causal_lm(family, **sizes).save_pretrained(tmp_path / "base")
    lm = load_causal_lm(str(tmp_path / "base"), torch.float32, tiny.VOCAB)
    plain = logprobs(Policy(lm), ROWS)
    torch.manual_seed(0)
    policy = Policy(adapters.wrap(lm, method + FEW))
    engine = Engine(policy, tiny.training_options(EngineOptions(dtype="fp32", zero_stage=0), OPTIMIZER), 3)
    nlls = train(engine, 3)
    assert nlls[2] < nlls[1] < nlls[0]
    assert all("encoder" in name for name, weight in policy.named_parameters() if weight.requires_grad)
    disturbed(lm)
    save_policy(engine, AdapterAlone(str(tmp_path / "base")), tiny.tokenizer(), tmp_path / "saved")
    in_peft = PeftModel.from_pretrained(tiny.causal_lm(family, **sizes), tmp_path / "saved").eval()
    with torch.no_grad():
        logits = in_peft(input_ids=ROWS.ids, attention_mask=ROWS.mask.long()).logits[:, -ROWS.ids.shape[1] :]
    expected = logits[:, :-1].log_softmax(-1).gather(2, ROWS.ids[:, 1:, None]).squeeze(2)
    on = ROWS.loss_mask[:, 1:]
    assert (
        greatest((logprobs(policy, ROWS)[:, 1:] - expected)[on]) < 1e-5 < 1e-2 < greatest((plain[:, 1:] - expected)[on])
    )
    loaded = load_causal_lm(str(tmp_path / "saved"), torch.float32, tiny.VOCAB, OPENED)
    assert greatest((logprobs(Policy(loaded), ROWS)[:, 1:] - expected)[on]) < 1e-5
    prompts = tiny.prompts([3, 7, 5, 3])
    backend = plugins.build("rlhf.generation", {"name": "loop", "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD})
    uniforms = torch.rand(4, 12, generator=torch.Generator().manual_seed(0))
    rollout = backend(loaded, prompts, SamplingOptions(response_length=12), uniforms)
    whole = logprobs(Policy(loaded), rollout.sequences)[:, prompts.ids.shape[1] :]
    assert greatest((whole - rollout.sampled_logprobs)[rollout.mask]) < 1e-5


@pytest.mark.parametrize("method", VIRTUAL)
def test_what_cannot_have_virtual_tokens_refuses_them_in_one_line(method: str, tmp_path: Path) -> None:
    tiny.causal_lm().save_pretrained(tmp_path / "base")
    policy = Policy(adapters.wrap(load_causal_lm(str(tmp_path / "base"), torch.float32, tiny.VOCAB), method + FEW))
    engine = Engine(policy, tiny.training_options(EngineOptions(dtype="fp32"), OPTIMIZER), 3)
    save_policy(engine, AdapterAlone(str(tmp_path / "base")), tiny.tokenizer(), tmp_path / "saved")
    saved = str(tmp_path / "saved")
    trained_on = f"its virtual tokens cannot be merged into a model, and no stage .* base model '{tmp_path}/base'"
    for refused, words in (
        (
            lambda: adapters.require_merging(method, "a reward model"),
            f"--adapter {method}: its virtual tokens",
        ),
        (lambda: check_start(saved, "auto", 8), trained_on),
        (lambda: load_causal_lm(saved, torch.float32, tiny.VOCAB), trained_on),
        (lambda: load_backbone(saved, torch.float32, tiny.VOCAB), trained_on),
        (lambda: adapters.wrap(tiny.causal_lm("opt", word_embed_proj_dim=16), method), "expected the model's width"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            refused()
        assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(OLDER_RUN, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("method", [marked_long(method, {"p_tuning"}) for method in VIRTUAL])
def test_evaluation_verification_and_chat_open_what_a_run_saves(method: str, folder: Path) -> None:
    whole = forked.program(*STEP_1.split(), method + FEW, "--output-dir", "whole", cwd=folder)
    assert whole.returncode == 0, whole.stderr
    saved = {path.name for path in (folder / "whole/step1_sft/model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} < saved
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = (
        "evaluate --policies whole/step1_sft model --prompts prompts.jsonl --response-length 4 --reward length,target=4"
    )
    for arguments in (words, "verify whole"):
        ran = forked.program("rlhf", *arguments.split(), cwd=folder)
        assert ran.returncode == 0, ran.stderr + ran.stdout
    models = load_models({"tuned": str(folder / "whole/step1_sft/model")}, None, "auto", "fp32")
    chat = Generation(models, "tuned", [Message("user", "a")], Sampling(1.0, 4, (0, 0, 0)))
    assert [*chat] and chat.response is not None


def test_a_chain_that_goes_on_after_it_is_refused_before_it_begins(folder: Path) -> None:
    words = "--actor-model model --data-path rows.jsonl --output-dir out --sft.adapter p_tuning --steps 1 3"
    words += " --max-length 24 --max-prompt-length 8 --ppo.response-length 8 --sft.batch-size 4"
    ran = forked.program("train", *words.split(), cwd=folder)
    assert "its virtual tokens cannot be merged into a model, but step3_ppo, which follows it" in ran.stderr
    assert ran.returncode == 2 and ran.stderr.count("\n") == 2  # a line of status before it

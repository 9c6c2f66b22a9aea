"""Which ids end a response: those that the model's files list, as `generate` of transformers has it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rlhf import plugins, rewards
from rlhf.chat.responses import Generation, Models, Sampling
from rlhf.config.options import SamplingOptions, TrainingOptions
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.training import Engine
from rlhf.generation import loop
from rlhf.models.ends import end_ids
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.scalar import new_scalar_model
from rlhf.types import Message
from tests.support import tiny

PROMPTS = tiny.prompts([3, 9, 8])
SAMPLING = SamplingOptions(response_length=12)
ENDS = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}


def saved(folder: Path, ends: object, in_config: object = tiny.EOS, **settings: object) -> Path:
    """A model's directory whose files name these ends."""
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    names = {"generation_config.json": {"eos_token_id": ends, **settings}, "config.json": {"eos_token_id": in_config}}
    for name, values in names.items():
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def greedy_words(folder: Path) -> list[int]:
    """The third id of each greedy response of the model without further ends: ordinary words."""
    rollout = loop.build(loop.Config(**ENDS))(load(folder), PROMPTS, SAMPLING, None)
    return rollout.response_ids[:, 2].tolist()


def load(folder: Path) -> PreTrainedModel:
    return load_causal_lm(str(folder), torch.float32, tiny.VOCAB)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("backend", plugins.names("rlhf.generation"))
def test_every_listed_id_ends_a_response_as_in_transformers(backend: str, tmp_path: Path) -> None:
    words = greedy_words(saved(tmp_path / "one", tiny.EOS))
    model = load(saved(tmp_path / "several", [tiny.EOS, *words[:2]]))
    generate = plugins.build("rlhf.generation", {"name": backend, **ENDS})
    rollout = generate(model, PROMPTS, SAMPLING, None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "several")
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": tiny.PAD}
    theirs = plain.generate(input_ids=PROMPTS.ids, attention_mask=PROMPTS.mask.long(), **options)
    expected = theirs[:, PROMPTS.ids.shape[1] :]
    assert torch.equal(rollout.response_ids, expected)
    assert rollout.ended[:2].all() and (rollout.lengths[:2] <= 3).all()


@pytest.mark.parametrize(
    ("ends", "in_config", "expected"),
    [
        ([2, 4, 6], 2, (2, 4, 6)),
        (None, [4, 2], (2, 4)),  # in config.json alone
        ([4, 6], 2, (2, 4, 6)),  # a response ends in the tokenizer's token, too
        (5, 5, (2,)),  # a base model's single token is none of the template's
        ([2, 4, tiny.VOCAB, -1], 2, (2, 4)),  # ids of no row
    ],
)
def test_ends_by_hand(ends: object, in_config: object, expected: tuple[int, ...], tmp_path: Path) -> None:
    assert end_ids(load(saved(tmp_path, ends, in_config)), tiny.EOS) == expected


@pytest.mark.parametrize(
    ("ends", "in_config", "expected"),
    [([4, 2, 6], 2, [4, 2, 6]), ([4, 999], 2, [2, 4, 999]), (None, [6, 2], [6, 2]), (5, 5, 2)],
)
def test_a_saved_model_has_the_list_as_it_came(
    ends: object, in_config: object, expected: object, tmp_path: Path
) -> None:
    path = str(saved(tmp_path / "before", ends, in_config))
    with tiny.one_rank():
        policy = Engine(Policy(load(Path(path))), TrainingOptions(dtype="fp32"), 1)
        save_policy(policy, None, tiny.tokenizer(), tmp_path / "policy")
        scalar = Engine(new_scalar_model(path, torch.float32, tiny.VOCAB), TrainingOptions(dtype="fp32"), 1)
        (tmp_path / "scalar").mkdir()
        save_scalar(scalar, None, tiny.tokenizer(), tmp_path / "scalar")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").config
    generation = GenerationConfig.from_pretrained(tmp_path / "policy")
    assert (config.eos_token_id, generation.eos_token_id, generation.pad_token_id) == (expected, expected, tiny.PAD)
    scalar_ends = json.loads((tmp_path / "scalar/config.json").read_text())["eos_token_id"]
    assert scalar_ends == (expected if isinstance(in_config, list) or expected == 2 else 2)  # it reads config.json


def test_an_end_that_is_a_word_is_in_no_text(tmp_path: Path) -> None:
    """In a stream, in a whole response of a chat, and in what a reward reads."""
    word = greedy_words(saved(tmp_path / "one", tiny.EOS))[0]
    lm = load(saved(tmp_path / "several", [tiny.EOS, word]))
    rollout = loop.build(loop.Config(**ENDS))(lm, PROMPTS[:1], SAMPLING, None)
    assert rollout.response_tokens()[0][-1] == word
    spelled = f"w{word}"
    assert spelled not in rewards.as_samples(rollout, tiny.tokenizer()).responses[0].split()
    models = Models(tiny.tokenizer(), {"one": Policy(lm)}, {"one": ""}, None)
    messages = PROMPTS.rows[0].prompt
    stream = Generation(models, "one", [Message("user", messages[0].content)], Sampling(0.0, 12, (0,)))
    text = "".join(stream)
    response = stream.finish()
    assert response.ended and response.text == text and spelled not in text.split()


def test_a_stop_that_is_not_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(saved(tmp_path / "plain", tiny.EOS))
    assert "stop_strings" not in capsys.readouterr().out
    load(saved(tmp_path / "stops", tiny.EOS, stop_strings=["\n\n"]))
    assert "stop_strings of its generation_config.json is not used" in capsys.readouterr().out

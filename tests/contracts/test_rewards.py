"""Every score source: one finite number a response, whatever pads it and in whatever order it comes."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlhf import plugins, rewards
from rlhf.errors import UserError
from rlhf.types import Message, Samples
from tests.rlhf.rewards.responses import context, other_tokenizer, padded, reward_model, rollout, samples
from tests.support import judges, tiny

SOURCES = [*plugins.names("rlhf.rewards"), "learned (other tokenizer)"]
OPTIONS = {"length": ",target=3,penalty=0.5", "repetition": ",n=2", "classifier": ",model={folder},label=1"}
OPTIONS["openai"] = ",base_url={judge},model=m"
CONSTANT = ("vader",)
"""What has nothing to say of made-up words."""
PACKAGES = {"vader": "vaderSentiment"}
FUNCTION = "def score(prompts, responses):\n    return [len(p) - 2 * len(r) for p, r in zip(prompts, responses)]\n"


def opened(source: str, folder: Path, micro_batch_size: int = 2) -> rewards.Source:
    """A source by name, with what it needs in `folder`."""
    package = PACKAGES.get(source)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if source == "python":
        (folder / "mine.py").write_text(FUNCTION)
        return rewards.open_source(f"{folder}/mine.py", context(folder))
    if source.startswith("learned"):
        reward_model(folder, tiny.tokenizer() if source == "learned" else other_tokenizer())
    if source == "classifier":
        reward_model(folder, tiny.tokenizer(), labels=3, pad_token_id=tiny.PAD)
    name = source.split()[0]
    options = OPTIONS.get(name, "").format(folder=folder, judge=judges.always())
    return rewards.open_source(name + options, context(folder, micro_batch_size))


each = pytest.mark.parametrize("source", SOURCES)


@each
def test_one_finite_number_a_response(source: str, tmp_path: Path) -> None:
    scores = opened(source, tmp_path)(samples(rollout()))
    assert scores.shape == (3,) and scores.dtype == torch.float32
    assert torch.isfinite(scores).all() and not scores.requires_grad
    assert source in CONSTANT or len(scores.unique()) > 1


@each
def test_padding_changes_no_score(source: str, tmp_path: Path) -> None:
    score = opened(source, tmp_path)
    torch.testing.assert_close(score(samples(padded(rollout()))), score(samples(rollout())), rtol=0, atol=1e-5)


@each
def test_the_order_and_the_company_change_no_score(source: str, tmp_path: Path) -> None:
    score = opened(source, tmp_path)
    r = rollout()
    expected = score(samples(r))
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(score(samples(r[order])), expected[order], rtol=0, atol=1e-5)
    alone = torch.cat([score(samples(r[b : b + 1])) for b in range(3)])
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


@each
def test_the_rollout_stays_as_it_is(source: str, tmp_path: Path) -> None:
    r = rollout()
    opened(source, tmp_path)(samples(r))
    for name in ("prompt_ids", "prompt_mask", "response_ids", "mask"):
        assert torch.equal(getattr(r, name), getattr(rollout(), name))


# --- learned: the oracle is transformers' own classifier on one unpadded row


@torch.no_grad()
def alone(model: PreTrainedModel, ids: list[int]) -> float:
    return model(input_ids=torch.tensor([ids])).logits.item()


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "llama"])
def test_a_model_with_our_tokenizer_gets_the_very_ids(family: str, tmp_path: Path) -> None:
    model = reward_model(tmp_path, tiny.tokenizer(), family, pad_token_id=tiny.PAD)
    r = rollout()
    scores = rewards.open_source("learned", context(tmp_path))(samples(r))
    for b in range(3):
        ids = [*r.prompt_ids[b][r.prompt_mask[b]].tolist(), *r.response_ids[b][r.mask[b]].tolist()]
        assert scores[b].item() == pytest.approx(alone(model, ids), abs=1e-5)


def test_a_swapped_pair_of_ids_makes_another_tokenizer(tmp_path: Path) -> None:
    """Same size, same words: compared by content, not by length."""
    words = tiny.WORDS.copy()
    words[0], words[1] = words[1], words[0]
    swapped = tiny.tokenizer(words=words)
    model = reward_model(tmp_path, swapped, pad_token_id=tiny.PAD)
    r = rollout()
    rows = tuple(replace(row, prompt=(Message("user", "w4"),)) for row in r.rows)
    ids = torch.tensor([[4, 5, tiny.EOS]] * 3)
    ours = replace(r, rows=rows, response_ids=ids, mask=ids >= 0, ended=ids[:, 0] > 0)
    scores = rewards.open_source("learned", context(tmp_path))(samples(ours))
    expected = alone(model, [tiny.BOS, 5, 5, 4, tiny.EOS])
    assert scores[0].item() == pytest.approx(expected, abs=1e-5)


def test_what_does_not_fit_the_model_s_context_is_refused(tmp_path: Path) -> None:
    reward_model(tmp_path, tiny.tokenizer(), n_positions=15)
    with pytest.raises(UserError, match="context is 15 tokens, but a prompt and response have 16"):
        rewards.open_source("learned", context(tmp_path))(samples(rollout()))


# --- the user's own function


def test_the_three_ways_to_name_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_scores.py").write_text(FUNCTION + "other = score\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    s = samples(rollout())
    expected = [float(len(p) - 2 * len(r)) for p, r in zip(s.prompts, s.responses, strict=True)]
    for name in (f"{tmp_path}/my_scores.py", f"{tmp_path}/my_scores.py:other", "my_scores:score"):
        assert rewards.open_source(name, context(tmp_path))(s).tolist() == expected


def score_by(tmp_path: Path, text: str, s: Samples | None = None) -> list[float]:
    (tmp_path / "mine.py").write_text(text)
    scores: list[float] = rewards.open_source(f"{tmp_path}/mine.py", context(tmp_path))(
        s or samples(rollout())
    ).tolist()
    return scores


@pytest.mark.parametrize(
    "value", ["[True, 2, 0.5]", "(1, 2, 0.5)", "__import__('torch').tensor([1, 2, 0.5])", "iter([1, 2, 0.5])"]
)
def test_any_sequence_of_numbers_will_do(tmp_path: Path, value: str) -> None:
    assert score_by(tmp_path, f"def score(p, r): return {value}") == [1.0, 2.0, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def score(p, r): return [1, 2]", "got [2] scores, expected [3]"),
        ("def score(p, r): return None", "got NoneType, expected a list of numbers"),
        ("def score(p, r): return ['a', 1, 2]", "got list, expected a list of numbers"),
        ("def score(p, r): return [10**400, 1, 2]", "got list, expected a list of numbers (int too large to convert"),
        ("def score(p, r): return [1, 2, -float('inf')]", "got nan for prompt"),
        ("def score(p, r): raise SystemExit", "mine.py:1: in score: SystemExit:, for prompt"),
        ("def score(p, r): raise SystemExit(3)", "mine.py:1: in score: SystemExit: 3, for prompt"),
        ("def points(p, r): return [1, 2, 3]", "no function 'score'"),
        ("class Config: pass", "or Config and build(config, context)"),
        ("score = [1, 2, 3]", "no function 'score'"),
        ("def score(responses): return [1, 2, 3]", "got score(responses), expected function(prompts, responses, **col"),
        ("def score(p, r, gold, /): return gold", "got score(p, r, gold, /), expected function("),
        ("def score(responses, prompts): return [1, 2, 3]", "got score(responses, prompts), expected function(prompts"),
        ("import operator\nscore = operator.itemgetter(1)", "got score, expected function(prompts, responses, **col"),
        ("def score(p, r): return {0: 1.5, 1: 2.5, 2: 3.5}", "got dict, expected a list of numbers"),
        ("def score(p, r): return {1.5, 2.5, 3.5}", "got set, expected a list of numbers"),
        ("def score(p, r): return '123'", "got str, expected a list of numbers"),
    ],
)
def test_mistakes_of_a_function_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        score_by(tmp_path, text)
    assert message in str(caught.value) and "mine.py" in str(caught.value) and "\n" not in str(caught.value)


def test_a_score_that_is_none_names_its_response(tmp_path: Path) -> None:
    s = samples(rollout())
    with pytest.raises(UserError) as caught:
        score_by(tmp_path, "def score(p, r): return [1, 2, None]", s)
    assert f"got None for prompt {s.prompts[2][-60:]!r}" in str(caught.value)


def test_a_score_that_is_not_finite_names_its_prompt_and_response(tmp_path: Path) -> None:
    s = samples(rollout())
    with pytest.raises(UserError) as caught:
        score_by(tmp_path, "def score(p, r): return [1, 2, float('nan')]", s)
    assert repr(s.prompts[2][-60:]) in str(caught.value) and repr(s.responses[2][:60]) in str(caught.value)


def test_a_reward_model_that_says_nan_is_refused(tmp_path: Path) -> None:
    """Finite weights whose product is not."""
    model = reward_model(tmp_path, tiny.tokenizer())
    with torch.no_grad():
        model.score.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"reward 'learned': got (nan|inf|-inf) for prompt"):
        rewards.open_source("learned", context(tmp_path))(samples(rollout()))


def test_columns_called_prompts_and_responses_are_no_arguments(tmp_path: Path) -> None:
    r = rollout()
    rows = tuple(replace(row, columns={"responses": ["a"], "prompts": "b", "gold": 2.0}) for row in r.rows)
    s = samples(replace(r, rows=rows))
    text = "def score(prompts, responses, gold, **columns):\n    assert not columns\n    return gold"
    assert score_by(tmp_path, text, s) == [2.0, 2.0, 2.0]
    text = "def score(asked, answers, **columns):\n    return [len(columns['responses'][0])] * len(answers)"
    assert score_by(tmp_path, text, s) == [1.0, 1.0, 1.0]


def test_a_source_that_returns_a_list(tmp_path: Path) -> None:
    text = "from rlhf.config import Config\ndef build(config, context): return lambda samples: [1.0] * 3"
    with pytest.raises(UserError, match=r"mine\.py.*: got list, expected a tensor of scores, \[B\]"):
        score_by(tmp_path, text)


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyError('x')"])
def test_a_source_that_fails_is_named(tmp_path: Path, error: str) -> None:
    text = f"from rlhf.config import Config\ndef fail(samples): raise {error}\ndef build(config, context): return fail"
    with pytest.raises(UserError, match=r"mine\.py: score: .*mine\.py:2: in fail: (SystemExit: 3|KeyError: 'x')$"):
        score_by(tmp_path, text)


@pytest.mark.parametrize("name", ["/nothing/here.py", "nothing_here:score", "lerned"])
def test_a_source_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        rewards.open_source(name, context(tmp_path))
    assert name.split(":")[0] in str(caught.value) and "\n" not in str(caught.value)


def test_scores_normalised_by_what_the_stage_measured(tmp_path: Path) -> None:
    model = reward_model(tmp_path, tiny.tokenizer())
    model.config.score_mean, model.config.score_std = 1.5, 4.0
    model.save_pretrained(tmp_path)
    s = samples(rollout())
    plain, normal = (rewards.open_source(spec, context(tmp_path))(s) for spec in ("learned", "learned,normalize=true"))
    torch.testing.assert_close(normal, (plain - 1.5) / 4.0)


@pytest.mark.parametrize("std", [None, 0.0])
def test_a_reward_model_without_statistics_cannot_be_normalised(tmp_path: Path, std: float | None) -> None:
    model = reward_model(tmp_path, tiny.tokenizer())
    model.config.score_mean, model.config.score_std = 0.0, std
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"got score_mean 0.0 and score_std .*expected two numbers"):
        rewards.open_source("learned,normalize=true", context(tmp_path))

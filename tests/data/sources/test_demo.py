"""The demo's true score by hand, and what its rows are made of."""

from collections import Counter
from statistics import mean

import pytest

from data.sources.demo import COLOURS, SUBJECTS, WORTH, Config, build, true_score
from rlhf.errors import UserError

PROMPT = "tell me about the red fox in the forest"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("the red fox is kind and calm and brave .", 1.0),
        ("the red fox is kind and kind and kind .", 1.0),
        ("the red fox is kind and tall and brave .", 2 / 3),
        ("the red fox is kind and tall and rude .", 0.0),
        ("the red fox is mean and tall and rude .", -2 / 3),
        ("the red fox is mean and cruel and rude .", -1.0),
        (" the red fox is  kind and calm and brave . ", 1.0),  # spaces are the tokenizer's business
        ("the blue fox is kind and calm and brave .", -1.0),
        ("the red owl is kind and calm and brave .", -1.0),
        ("the red fox is kind and calm .", -1.0),
        ("the red fox is kind and calm and brave and gentle .", -1.0),
        ("the red fox is kind and calm and brave", -1.0),
        ("the red fox is kind calm and brave .", -1.0),
        ("the red fox is kind and calm and fox .", -1.0),
        ("red fox is kind and calm and brave .", -1.0),
        ("the red fox is kind and calm and brave . the red fox is kind and calm and brave .", -1.0),
        ("", -1.0),
    ],
)
def test_true_score_by_hand(response: str, score: float) -> None:
    assert true_score([PROMPT], [response]) == [pytest.approx(score)]


def test_true_score_finds_the_prompt_in_a_template_and_takes_columns() -> None:
    rendered = f"<s>\n\nHuman: {PROMPT}\n\nAssistant:"
    assert true_score([rendered], ["the red fox is kind and calm and brave ."], label=[1]) == [1.0]
    with pytest.raises(UserError, match="expected 'tell me about"):
        true_score(["hello"], ["x"])


def test_demonstrations_are_well_formed_and_score_about_zero() -> None:
    rows = list(build(Config(rows=3000), "").rows("sft"))
    scores = true_score([row.prompt[0].content for row in rows], [row.response or "" for row in rows])
    # Three adjectives of variance 2/3: the mean of 3000 has standard deviation 0.0086.
    assert abs(mean(scores)) < 0.04
    used = Counter(word for row in rows for word in (row.response or "").split() if word in WORTH)
    assert set(used) == set(WORTH)
    assert max(used.values()) < 1.3 * min(used.values())


def test_preferences_put_the_better_response_first() -> None:
    rows = list(build(Config(rows=2000), "").rows("reward"))
    prompts = [row.prompt[0].content for row in rows]
    better = true_score(prompts, [row.response or "" for row in rows])
    worse = true_score(prompts, [row.rejected or "" for row in rows])
    assert all(high > low for high, low in zip(better, worse, strict=True))
    frames = {len((row.rejected or "").split()) for row in rows}
    assert frames == {9, 10, 11}  # a word too few, none, a word too many
    wrong = sum((row.rejected or " ").split()[1] not in (row.prompt[0].content.split()[4], *"x") for row in rows)
    assert wrong > 20


def test_many_prompts_and_none_twice_for_ppo() -> None:
    assert len({subject.prompt for subject in SUBJECTS}) == len(SUBJECTS) == len(COLOURS) * 16 * 6
    prompts = [row.prompt for row in build(Config(), "").rows("ppo")]
    assert len(prompts) == len(set(prompts)) == len(SUBJECTS)
    assert [row.prompt for row in build(Config(rows=100), "").rows("sft")] == prompts[:100]


def test_a_seed_determines_the_rows_and_a_path_is_refused() -> None:
    one, other = (list(build(Config(rows=50, seed=seed), "").rows("sft")) for seed in (1, 2))
    assert one != other
    with pytest.raises(UserError, match="the demo is generated"):
        build(Config(), "somewhere")

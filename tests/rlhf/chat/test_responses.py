"""A response that is streamed: its text, its sampler, its numbers; against transformers, and against `evaluate`."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.chain.chat import BY_NAME
from rlhf.chat.responses import Generation, Models, Sampling
from rlhf.chat.run_models import run_models
from rlhf.chat.session import open_session
from rlhf.errors import UserError
from rlhf.evaluation import comparison
from rlhf.evaluation.options import EvaluateConfig
from rlhf.text.dialogues import Template
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.types import Message
from tests.support import chat_runs, texts, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_runs.write(tmp_path_factory.mktemp("world") / "run")


@pytest.fixture(scope="module")
def models(run: Path) -> Models:
    return chat_runs.loaded(run, "sft", "ppo")


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def long_sampling(models: Models) -> Sampling:
    """The first random numbers with which the answer to `w4 w7` has five words and an end."""
    for key in range(100):
        response = Generation(models, "ppo", user("w4 w7"), Sampling(1.0, 24, (key,))).finish()
        if response.ended and response.tokens > 5:
            break
    return Sampling(1.0, 24, (key,))


# --- text


@pytest.mark.parametrize("kind", texts.MAKERS)
@pytest.mark.parametrize("template", ["plain", "human_assistant", "chatml"])
def test_pieces_join_to_the_whole_text(kind: str, template: str) -> None:
    """Of real and random ids, cut anywhere: only whole characters, no special tokens, nothing taken back."""
    tokenizer = prepare_tokenizer(texts.MAKERS[kind](), template)
    t = Template(tokenizer)
    draw = torch.Generator().manual_seed(0)
    responses = [t.response_ids(text) for text in (*texts.HORRIBLE, "é 你好 👩‍👩‍👧‍👦 the end")]
    responses += [torch.randint(len(tokenizer), (40,), generator=draw).tolist() for _ in range(20)]
    for ids in responses:
        shown = ""
        for size in range(len(ids) + 1):
            settled = t.settled_text(ids[:size])
            assert settled.startswith(shown) or shown.startswith(settled)
            shown = max(shown, settled, key=len)
            assert not shown.endswith("\ufffd")
            assert t.response_text(ids[:size]).startswith(shown)
        assert t.response_text(ids).startswith(shown)


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    t = Template(prepare_tokenizer(texts.byte_tokenizer(), "plain"))
    ids = t.encode_many(["a你b"], split=True)[0]
    assert [t.settled_text(ids[:size]) for size in range(len(ids) + 1)] == ["", "a", "a", "a", "a你", "a你b"]


def test_a_stream_is_the_whole_response(models: Models) -> None:
    sampling = long_sampling(models)
    generation = Generation(models, "ppo", user("w4 w7"), sampling)
    pieces = list(generation)
    whole = generation.finish()
    assert "".join(pieces) == whole.text and len(pieces) > 3 and "<" not in whole.text


def test_each_step_may_be_in_another_thread(models: Models) -> None:
    """Gradio takes the steps of a generator in any of its threads."""
    sampling = long_sampling(models)
    whole = Generation(models, "ppo", user("w4 w7"), sampling).finish()
    generation = Generation(models, "ppo", user("w4 w7"), sampling)
    steps, pieces = iter(generation), list[str | None]([""])
    while pieces[-1] is not None:
        thread = threading.Thread(target=lambda: pieces.append(next(steps, None)))
        thread.start()
        thread.join()
    assert "".join(map(str, pieces[:-1])) == whole.text and not models.lock.locked()
    assert generation.response is not None
    assert torch.equal(generation.response.rollout.sampled_logprobs, whole.rollout.sampled_logprobs)


# --- sampling and numbers


@torch.no_grad()
def test_temperature_0_is_greedy_generate_of_transformers(models: Models, run: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(run / "step3_ppo/actor", dtype=torch.float32)
    for prompt in chat_runs.PROMPTS:
        ids = torch.tensor([models.template.prompt_ids(user(prompt))])
        expected = theirs.generate(
            ids, max_new_tokens=20, do_sample=False, eos_token_id=tiny.EOS, pad_token_id=tiny.PAD
        )
        response = Generation(models, "ppo", user(prompt), Sampling(0.0, 20, (0,))).finish()
        assert response.rollout.response_ids[0].tolist() == expected[0, ids.shape[1] :].tolist()


def test_sampler_and_score_are_those_of_evaluate(run: Path) -> None:
    """The same random numbers give the same response; its score is equal up to the order of additions."""
    judge = f"learned,model={run}/step2_reward"
    o = EvaluateConfig(
        policies=(str(run / "step3_ppo"), str(run / "step1_sft")), reference=str(run / "step1_sft"), dtype="fp32",
        prompts=str(run / "p.jsonl"), reward=judge, response_length=24, temperature=0.8, seed=5,
    )  # fmt: skip
    expected = next(iter(comparison.measure_all(comparison.check(o)).values()))
    session = open_session(chat_runs.options_of(run, policy="ppo"), run_models(str(run), BY_NAME))
    for n, prompt in enumerate(chat_runs.PROMPTS):
        for k in range(2):
            sampling = Sampling(0.8, 24, (5, 0, 2 * n + k))
            response = Generation(session.models, "ppo", user(prompt), sampling).finish()
            assert response.text == expected.texts[n][k] and response.ended == bool(expected.ended[n, k])
            # one matrix product after the other in fp32, of numbers of the order of 1: see tiny.ORDERS
            tolerance = tiny.ORDERS * 24 * 4
            assert session.models.score(response) == pytest.approx(expected.scores[n, k].item(), abs=tolerance)


def test_a_response_that_is_left_leaves_the_model_as_it_was(models: Models) -> None:
    before = Generation(models, "sft", user("w9"), Sampling(1.0, 24, (1,))).finish()
    pieces = iter(Generation(models, "sft", user("w9"), Sampling(1.0, 24, (1,))))
    next(pieces)
    assert models.lock.locked()
    pieces.close()
    assert not models.lock.locked()
    assert Generation(models, "sft", user("w9"), Sampling(1.0, 24, (1,))).finish().text == before.text


def test_a_dialogue_has_the_room_of_the_context(models: Models) -> None:
    words = " ".join(["w5"] * (tiny.CONTEXT - 8))
    size = len(models.template.prompt_ids(user(words)))
    response = Generation(models, "sft", user(words), Sampling(1.0, 500, (0,))).finish()
    assert int(response.rollout.prompt_mask.sum()) == size and response.tokens <= tiny.CONTEXT - size
    with pytest.raises(UserError, match="start a new dialogue"):
        Generation(models, "sft", user(words + " w5" * 8), Sampling(1.0, 1, (0,)))


# --- which models a run has


def test_the_models_of_a_run(run: Path, tmp_path: Path) -> None:
    models = run_models(str(run), BY_NAME)
    assert list(models.policies) == ["base", "sft", "ppo"] and models.newest == "ppo"
    assert models.path("base") == str(run / "base") and models.path("sft") == str(run / "step1_sft/model")
    reward = f"learned,model={run / 'step2_reward/model'}"
    assert models.references == {"sft": str(run / "base"), "ppo": str(run / "step1_sft/model")}
    assert models.reward == reward
    stage = run_models(str(run / "step3_ppo"), BY_NAME)
    assert (stage.newest, stage.path("step3_ppo"), stage.references, stage.reward) == (
        "step3_ppo", str(run / "step3_ppo/actor"), {"step3_ppo": str(run / "step1_sft/model")}, None,
    )  # fmt: skip
    alone = run_models(str(run / "base"), BY_NAME)
    assert (alone.path("base"), alone.references) == (str(run / "base"), {})
    with pytest.raises(UserError, match="expected one of base, sft, ppo, or the path"):
        models.path("ppp")
    with pytest.raises(UserError, match="stage without a policy"):
        run_models(str(run / "step2_reward"), BY_NAME)
    (tmp_path / "step1_sft").mkdir()
    with pytest.raises(UserError, match="no stage with a policy is finished"):
        run_models(str(tmp_path), BY_NAME)


def test_a_run_that_was_moved_has_its_own_reference(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    chat_runs.finish(tmp_path / "copy", "step3_ppo", "actor", {"actor_model": Path("gone/step1_sft/model")})
    assert run_models(str(tmp_path / "copy"), BY_NAME).references["ppo"] == str(tmp_path / "copy/step1_sft/model")

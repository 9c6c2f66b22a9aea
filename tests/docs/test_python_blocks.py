"""Every Python block of README and docs/*.md works as it is printed, in a folder with nothing but its page's blocks."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer

from data.prepare.mixture import open_origin
from rlhf import adapters, rewards
from rlhf.config.options import RunOptions
from rlhf.training.reporting import Reporter
from rlhf.types import SampledRollout, Samples
from tests.contracts import test_adapters as adapter_contract
from tests.contracts import test_generation as backend_contract
from tests.rlhf.rewards import responses
from tests.support import forked, reward_runs, tiny
from tests.support.players import first, on_course, players, twice_each

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.stem != "LOG"}


def blocks(page: Path) -> dict[str, str]:
    """The Python files of a page by the name in their first line, exactly as printed."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"```python\n(# (\w+\.py)\b.*?)```", text, re.DOTALL)
    assert len(named) == text.count("```python\n"), f"{page.name}: a Python block does not begin with '# NAME.py'"
    return {name: code for code, name in named}


def require_rows(location: str, count: int) -> None:
    rows = list(open_origin(location).rows("reward"))
    assert len(rows) == count
    assert all(row.prompt and row.response and row.rejected and row.response != row.rejected for row in rows)


def numbers() -> None:
    require_rows("my_dataset.py,rows=3", 3)


def lines() -> None:
    Path("answers.txt").write_text("Why? | Because. | No.\nWho?|You.|I.\n")
    require_rows("my_dataset.py:answers.txt", 2)
    Path("answers.txt").write_text("Why?;Because.;No.\n")
    require_rows("my_dataset.py,separator=;:answers.txt", 1)


def scored(name: str, *responses: str) -> list[float]:
    """What the function `score` of a file says of these responses."""
    nothing = torch.zeros(len(responses), 1, dtype=torch.long)
    rollout = SampledRollout(nothing, nothing > 0, nothing, nothing == 0, nothing.float(), nothing[:, 0] == 0, rows=())
    context = rewards.Context(None, torch.device("cpu"), torch.float32, "", 1)  # type: ignore[arg-type]
    samples = Samples(("a",) * len(responses), responses, rollout, responses)
    return rewards.open_source(f"{name}:score", context)(samples).tolist()


def reward() -> None:
    # float32 of numbers of two decimals
    assert scored("my_reward.py", "so cheerful", "no") == pytest.approx([1 - 0.11, -0.02])


def llama_2() -> None:
    """By hand, from the scores of both models; a threshold between the safety scores."""
    safe, helpful = Path("safe"), Path("helpful")
    for path, family in ((safe, "gpt2"), (helpful, "llama")):
        responses.reward_model(path, tiny.tokenizer(), family, pad_token_id=tiny.PAD)
    context, samples = responses.context(safe), responses.samples(responses.rollout())
    s, h = (rewards.open_source(f"learned,model={path}", context)(samples) for path in (safe, helpful))
    middle = s.sigmoid().median().item() + 1e-6
    spec = f"llama_2.py,safe=safe,helpful=helpful,threshold={middle}"
    expected = [x if low else y for low, x, y in zip((s.sigmoid() < middle).tolist(), s, h, strict=True)]
    assert torch.equal(rewards.open_source(spec, context)(samples), torch.stack(expected))


def functions_of_other_libraries() -> None:
    """The first response has the number of its row, the others do not."""
    rollout = responses.rollout()
    truths = [row.columns["answer"].split()[-1] for row in rollout.rows]
    rows = [replace(row, columns={**row.columns, "label": x}) for row, x in zip(rollout.rows, truths, strict=True)]
    samples = responses.samples(replace(rollout, rows=tuple(rows)))
    for spec in ("trl_reward.py:correct", "openrlhf_reward.py:reward_func"):
        assert rewards.open_source(spec, responses.context(Path()))(samples).tolist() == [1, 0, 0]
    verl = [{"data_source": "sums", "reward_model": {"ground_truth": x}} for x in truths]
    verl[2]["data_source"] = "others"
    rows = [replace(row, columns=columns) for row, columns in zip(rows, verl, strict=True)]
    samples = responses.samples(replace(rollout, rows=tuple(rows)))
    scores = rewards.open_unchecked("verl_reward.py:compute_score", responses.context(Path()))(samples)
    assert scores.tolist() == [1, 0, rewards.NO_SCORE]


def gsm8k() -> None:
    rollout = responses.rollout()
    rows = [replace(row, columns={"answer": "So 9 + 9.\n#### 1,018"}) for row in rollout.rows]
    texts = ("#### $1,018", "1018", "#### 7\n#### 1018 eggs")
    samples = replace(responses.samples(replace(rollout, rows=tuple(rows))), responses=texts, answers=texts)
    for name, expected in (("correct", [1, 0, 1]), ("readable", [1, 0, 1])):
        source = rewards.open_source(f"gsm8k_reward.py:{name}", responses.context(Path()))
        assert source(samples).tolist() == expected


def kind_or_rude() -> None:
    assert scored("judge.py", "kind and kind", "rude", "tall", "kind rude") == [2, -1, 0, 0]


def kind_share() -> None:
    assert scored("judge.py", "kind and calm", "rude", "tall", "kind rude .") == [1, -1, 0, 0]


def hinge() -> None:
    """Its loss of the first step, row by row in float64; it trains."""
    run = reward_runs.run(Path("run"), objective="my_objective.py,gap=0.5", num_train_epochs=2)
    model, expected = reward_runs.scalar_model().double(), 0.0
    for record in reward_runs.records():
        pairs = list(reward_runs.scores_of(model, record))
        expected += sum(max(0.0, 0.5 - (c - r).item()) for c, r, _ in pairs) / len(pairs)
    first, second = (step["loss"] for step in run["metrics"])
    assert first == pytest.approx(expected / len(reward_runs.records()), abs=1e-5)  # some 100 operations in fp32
    assert second < first


def bounded_ppo() -> None:
    """It trains, and its bound holds."""
    game = players("my_algorithm.py", total_episodes=8, bound=0.1)
    credit = game.algorithm.credit(game.score(game.sample(twice_each())), first(game.algorithm))
    (metrics,) = on_course(game)
    assert credit.advantages.abs().max() <= torch.tensor(0.1) and game.critic is not None
    assert {"policy_loss", "value_loss"} <= metrics.keys() and metrics["optimizer_steps"] == 4


def reinforce() -> None:
    """Advantages sum to 0 over the responses, and it trains without a critic."""
    game = players("my_reinforce.py", total_episodes=8)
    rollout = game.score(game.sample(twice_each()))
    assert rollout.scores is not None
    expected = torch.stack(
        [(score - rollout.scores.mean()) * row for score, row in zip(rollout.scores, rollout.mask, strict=True)]
    )
    assert torch.equal(game.algorithm.credit(rollout, first(game.algorithm)).advantages, expected)
    (metrics,) = on_course(game)
    assert game.critic is None and metrics["optimizer_steps"] == 4


def wrapped(spec: str) -> torch.nn.Module:
    """A model with the adapter, whose weights alone learn."""
    plain = tiny.causal_lm()
    base = [*plain.parameters()]
    model: torch.nn.Module = adapters.wrap(plain, spec)
    learns = [weight for weight in model.parameters() if weight.requires_grad]
    assert learns and not any(weight is old for weight in learns for old in base)
    return model


def adapter() -> None:
    """It meets the contract of every adapter."""
    wrapped("my_adapter.py")
    adapter_contract.test_merged_weights_say_what_wrapped_ones_do("qwen2", "my_adapter.py")
    adapter_contract.test_with_the_adapter_off_it_is_the_reference("llama", "my_adapter.py")


def adapter_of_peft() -> None:
    """It meets the contract of every adapter, and its scale is that of the paper."""
    spec = "my_rslora.py,r=4"
    adapter_contract.test_merged_weights_say_what_wrapped_ones_do("gpt2", spec)
    scales = [module.scaling for module in wrapped(spec).modules() if isinstance(module, LoraLayer)]
    assert scales and all(scale == {"default": 16 / 4**0.5} for scale in scales)


def backend() -> None:
    """It meets the contract of every backend."""
    name = "my_backend.py"
    backend_contract.test_greedy_tokens_equal_those_of_transformers(name, "llama")
    backend_contract.test_logprobs_of_sampling_equal_those_of_a_forward_pass(name, "gpt2")
    backend_contract.test_padding_of_the_prompt_changes_no_token(name, "opt")
    backend_contract.test_logprobs_with_other_options_are_those_of_the_tempered_distribution(name)
    backend_contract.test_the_draws_decide(name)
    backend_contract.test_an_end_at_once_and_no_end_at_all(name)


def tracker() -> None:
    """Every call of a run arrives."""
    stage = Path("demo/step1_sft").absolute()
    stage.mkdir(parents=True)
    reporter = Reporter(stage, RunOptions(report_to=("my_tracker.py,path=all.jsonl",)))
    reporter.metrics("train", 1, {"loss": 2.0})
    reporter.text("warning", 1, "x", "look")
    reporter.table("samples", 1, [{"prompt": "a", "after": "b"}])
    reporter.close()
    config, *rows = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert config["config"]["seed"] == 0
    assert rows == [
        {"run": "demo/step1_sft", "step": 1, "train/loss": 2.0},
        {"run": "demo/step1_sft", "step": 1, "warning/x": "look"},
        {"run": "demo/step1_sft", "step": 1, "samples": [{"prompt": "a", "after": "b"}]},
        {"run": "demo/step1_sft", "end": True},
    ]


def converted() -> None:
    """Scores are those of DeepSpeed-Chat's model: `v_head` of the last token's hidden state."""
    body, rollout, folder = tiny.backbone("opt"), responses.rollout(), Path("old")
    head = torch.nn.Linear(body.config.word_embed_proj_dim, 1, bias=False)
    weights = {f"rwtransformer.{name}": weight for name, weight in body.state_dict().items()}
    for part in (body.config, tiny.tokenizer()):
        part.save_pretrained(folder)
    torch.save({**weights, "v_head.weight": head.weight.data}, folder / "pytorch_model.bin")
    done = forked.python("from_deepspeed_chat.py", "old", "new")
    assert done.returncode == 0, done.stderr
    scores = rewards.open_source("learned,model=new", responses.context(folder))(responses.samples(rollout))
    rows = zip(rollout.prompt_ids, rollout.prompt_mask, rollout.response_tokens(), strict=True)
    ids = [torch.tensor([[*prompt[mask].tolist(), *response]]) for prompt, mask, response in rows]
    expected = torch.cat([head(body.eval()(row).last_hidden_state[:, -1]) for row in ids]).flatten()
    assert torch.allclose(scores, expected, atol=1e-5 * expected.abs().max().item())  # a few hundred roundings


CHECKS: dict[tuple[str, str], Callable[..., None]] = {
    ("data.md", "my_dataset.py"): numbers,
    ("evaluate.md", "judge.py"): kind_or_rude,
    ("online_preferences.md", "judge.py"): kind_or_rude,
    ("tutorial.md", "judge.py"): kind_share,
    ("extending.md", "my_dataset.py"): lines,
    ("extending.md", "my_reward.py"): reward,
    ("extending.md", "my_objective.py"): hinge,
    ("models.md", "from_deepspeed_chat.py"): converted,
    ("rewards.md", "llama_2.py"): llama_2,
    ("rewards.md", "trl_reward.py"): functions_of_other_libraries,
    ("rewards.md", "verl_reward.py"): functions_of_other_libraries,
    ("rewards.md", "openrlhf_reward.py"): functions_of_other_libraries,
    ("reasoning.md", "gsm8k_reward.py"): gsm8k,
    ("extending.md", "my_algorithm.py"): bounded_ppo,
    ("extending.md", "my_reinforce.py"): reinforce,
    ("extending.md", "my_adapter.py"): adapter,
    ("extending.md", "my_rslora.py"): adapter_of_peft,
    ("extending.md", "my_backend.py"): backend,
    ("extending.md", "my_tracker.py"): tracker,
}
ELSEWHERE = {
    ("tutorial.md", "make_pairs.py"),
    ("tutorial.md", "use_policy.py"),
    ("python.md", "my_run.py"),
    ("chat.md", "ask.py"),
    ("online_preferences.md", "rounds.py"),
}
"""run by tests/docs/test_tutorial.py, tests/rlhf/chain/test_api.py and tests/docs/test_chat_page.py"""


def test_every_block_has_its_check() -> None:
    printed = {(page, name) for page, path in PAGES.items() for name in blocks(path)}
    assert printed == CHECKS.keys() | ELSEWHERE


@pytest.mark.parametrize(("page", "name"), CHECKS)
def test_a_block_works_as_printed(page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, code in blocks(PAGES[page]).items():
        (tmp_path / file).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with tiny.one_rank():
        CHECKS[page, name]()

"""The comparison of policies: numbers by hand and on small models, files, and mistakes of the user."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from rlhf.evaluation import comparison, evaluate
from rlhf.evaluation.comparison import Responses
from rlhf.evaluation.results_table import distinct, policy_results
from rlhf.hub.short_names import resolve
from rlhf.launch import launcher
from rlhf.maths.intervals import Interval, mean_interval
from rlhf.models.load import load_causal_lm
from rlhf.storage import manifests
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from tests.support import even_policies, forked_ranks, power, tiny
from tests.support.programs import Run, runner

KIND = (
    "def score(prompts, responses):\n"
    "    return [sum(w in ('kind', 'calm', 'brave') for w in r.split()) for r in responses]\n"
)


# --- the results of a policy


def responses(scores: list[list[float]], kl: float = 0.0, texts: Sequence[str] = ("a", "b")) -> Responses:
    size = (len(scores), 2)
    numbered = [[text + str(n) for text in texts] for n in range(len(scores))]
    return Responses(
        texts=numbered,
        tokens=[[1, 2, 3], [1, 2, 4]] * len(scores),
        scores=torch.tensor(scores, dtype=torch.float64),
        kl=torch.full(size, kl, dtype=torch.float64),
        ref_nll=torch.tensor([[2.0, 6.0]] * len(scores), dtype=torch.float64),
        lengths=torch.tensor([[1.0, 3.0]] * len(scores), dtype=torch.float64),
        ended=torch.tensor([[1.0, 0.0]] * len(scores), dtype=torch.float64),
    )


def test_the_numbers_of_a_policy_by_hand() -> None:
    baseline = responses([[0.0, 1.0], [2.0, 2.0], [1.0, 0.0]])
    policy = responses([[2.0, 3.0], [2.0, 2.0], [2.0, 2.0]], kl=1.5, texts=("c", "d"))
    first, second = policy_results({"old": baseline, "new": policy})
    assert (first.gain, first.win_rate) == (None, None)
    assert first.score.mean == 1.0
    assert second.win_rate is not None and second.win_rate.mean == pytest.approx((1 + 0.5 + 1) / 3)
    # Wins (1, 1), (1/2, 1/2), (1, 1) of pairs that are 2 tokens shorter and 2 longer: length explains nothing.
    assert second.length_controlled_win_rate == pytest.approx(2.5 / 3, abs=0.01)
    assert first.length_controlled_win_rate is None
    gain = mean_interval(torch.tensor([2.0, 0.0, 1.5]))
    assert second.gain == gain
    assert second.kl == Interval(1.5, 1.5, 1.5)
    assert (second.response_length, second.ended) == (2.0, 0.5)
    assert second.ref_nll == 2.0  # 8 nats over 4 tokens, not the mean of 2 and 2
    assert second.distinct_2 == pytest.approx(3 / 12)  # 1-2, 2-3, 2-4


def test_what_a_response_is_worth_is_what_the_selector_can_choose() -> None:
    """The selector prefers the response that the judge likes less, so no best-of-n of the baseline has the gain."""
    selector = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    baseline = replace(responses([[0.0, 1.0], [2.0, 4.0]]), selector=selector)
    policy = responses([[0.6, 0.6], [3.2, 3.2]], texts=("c", "d"))
    worth = policy_results({"old": baseline, "new": policy})[1].worth
    assert worth is not None and worth.mean == 2.0
    blind = replace(baseline, selector=-selector)  # the judge's own choice: a gain of 0.15 of 0.75
    worth = policy_results({"old": blind, "new": policy})[1].worth
    assert worth is not None and worth.mean == pytest.approx(1.2)


def test_equal_responses_tie_despite_rounding_of_their_scores() -> None:
    baseline = responses([[0.0, 1.0]] * 3)
    other = responses([[1.0 + 1e-6, 1e-6]] * 3, texts=("b", "a"))  # "b" is its first response and the baseline's second
    _, second = policy_results({"old": baseline, "new": other})
    assert second.win_rate is not None and second.win_rate.mean == 1.0  # one ended, the other was cut
    other = replace(other, ended=baseline.ended.flip(1))
    _, second = policy_results({"old": baseline, "new": other})
    assert second.win_rate is not None and second.win_rate.mean == 0.5


def test_distinct_counts_bigrams() -> None:
    assert distinct([[1, 2, 1, 2]], 2) == 2 / 3
    assert distinct([[1]], 2) == 0.0


# --- the program


@pytest.fixture
def no_progress_bar() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_progress_bar: None) -> Run:
    """The program in this process."""
    return runner("evaluate", evaluate.main, monkeypatch, capsys)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base; even, which samples words with even numbers more often; prompts and a judge that counts those."""
    folder = tmp_path_factory.mktemp("world")
    rows = [{"prompt": f"w{i} w{i + 3}", "kind": i} for i in range(4, 16)]
    even_policies.write(folder, {"base": 1.0, "even": 1.5, "more": 1.5}, rows)
    return folder


@pytest.fixture
def options(world: Path) -> list[str]:
    reward = ["--prompts", f"{world}/p.jsonl", "--reward", f"{world}/judge.py:score"]
    return [*reward, "--response-length", "10", "--dtype", "fp32", "--rollout-batch-size", "10", "--sample-rows", "1"]


def results(output: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((output / "results.json").read_text())
    return result


def samples(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def test_a_policy_against_itself(run: Run, world: Path, options: list[str], tmp_path: Path) -> None:
    base = str(world / "base")
    code, _, error = run("--policies", base, base, "--output", str(tmp_path), *options)
    assert (code, error) == (0, "")
    first, second = results(tmp_path)["policies"]
    assert (first["win_rate"], second["policy"]) == (None, f"{base} (2)")
    assert second["win_rate"]["mean"] == 0.5
    assert second["gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert abs(first["kl"]["mean"]) < 1e-5 and abs(second["kl"]["mean"]) < 1e-5
    for row in samples(tmp_path):
        response, twin = row["responses"].values()
        assert response == twin


def test_after_a_power_cut_results_have_their_files(
    run: Run, world: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, base = power.Disk(tmp_path, promised=False), str(world / "base")
    with disk.watched(monkeypatch):
        assert run("--policies", base, base, "--output", str(tmp_path), *options)[0] == 0
        disk.promised = True
    whole = disk.states[-1][1]
    assert {*whole} >= {"results.json", "results.md", "samples.jsonl"} and "" not in {*whole.values()} - {None}
    assert all(tree == whole for promised, tree in disk.states if promised or "results.json" in tree)


def require_selection(curve: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Of three responses: the judge's score of the shortest, and the share of the gain of the best."""
    assert [(each["n"], each["policy"]) for each in curve] == [(n, p) for p in rows[0]["responses"] for n in (2, 3)]
    for whole in curve[1::2]:
        responses = [row["responses"][whole["policy"]] for row in rows]
        prompts = [responses[i : i + 3] for i in range(0, len(responses), 3)]
        shortest = [max((r["selector"], k, r["score"]) for k, r in enumerate(each))[2] for each in prompts]
        assert [r["selector"] for r in responses] == [-float(r["length"]) for r in responses]
        score, mean = sum(shortest) / len(shortest), sum(r["score"] for r in responses) / len(responses)
        best = sum(max(r["score"] for r in each) for each in prompts) / len(prompts)
        assert whole["score"]["mean"] == pytest.approx(score)
        assert whole["gain"]["mean"] == pytest.approx(score - mean, abs=1e-9)
        assert whole["share"] == pytest.approx((score - mean) / (best - mean), abs=1e-9)
        assert whole["kl"] == pytest.approx(math.log(3) - 2 / 3)


def require_worth(curve: list[dict[str, Any]], policies: list[dict[str, Any]]) -> None:
    """The score of a policy, linear between the scores of the baseline's best of 1, 2 and 3."""
    first, *others = policies
    knots = [first["score"]["mean"], *(each["score"]["mean"] for each in curve[:2])]
    for score, worth in ((policy["score"]["mean"], policy["worth"]) for policy in others):
        assert worth["low"] <= worth["mean"] <= worth["high"]
        end = (score <= knots[0]) if worth["mean"] == 1 else (score >= max(knots) - 1e-9)
        assert end or np.interp(worth["mean"], (1, 2, 3), knots) == pytest.approx(score)


def test_the_files_agree_with_each_other(run: Run, world: Path, options: list[str], tmp_path: Path) -> None:
    paths = [str(world / name) for name in ("base", "even", "more")]
    out = tmp_path / "out"
    selecting = ("--samples", "3", "--select-by", "length,target=0,penalty=1")
    code, printed, error = run("--policies", *paths, *selecting, "--output", str(out), *options)
    assert (code, error) == (0, "")
    result, rows = results(out), samples(out)
    require_selection(result["best_of_n"], rows)
    require_worth(result["best_of_n"], result["policies"])
    assert len(rows) == 12 * 3 and result["prompts"] == 12
    assert [policy["policy"] for policy in result["policies"]] == paths
    for path, policy in zip(paths, result["policies"], strict=True):
        responses = [row["responses"][path] for row in rows]
        for answer in responses:
            words = [int(word[1:]) for word in answer["response"].split()]
            assert answer["score"] == sum(word % 2 == 0 for word in words)
        assert policy["score"]["mean"] == pytest.approx(sum(answer["score"] for answer in responses) / 36)
        assert policy["ended"] == pytest.approx(sum(answer["ended"] for answer in responses) / 36)
        assert policy["kl"]["mean"] == pytest.approx(sum(answer["kl"] for answer in responses) / 36, abs=1e-9)
    base, even, more = result["policies"]
    assert abs(base["kl"]["mean"]) < 1e-5 < even["kl"]["low"] < more["kl"]["mean"]
    assert more["gain"]["low"] > 0 and more["win_rate"]["low"] > 0.5
    page = (out / "results.md").read_text()
    assert page.count("\n| ") == (1 + 1 + 3) + (1 + 1 + 2 * 3)
    rows_of = {line.split(" | ")[0]: line for line in page.split("\n\n")[1].splitlines()}
    for policy in result["policies"]:
        line, controlled, worth = (
            rows_of[f"| {policy['policy']}"],
            policy["length_controlled_win_rate"],
            policy["worth"],
        )
        assert f"| {policy['score']['mean']:.4g} ±" in line
        assert worth is None or (f"| {controlled:.3f} |" in line and f"| {worth['mean']:.3g} [" in line)
    assert "distinct-2" in printed


def test_two_processes_write_what_one_writes(
    run: Run, world: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself: batches of 10 of 24 responses are divided among two processes."""
    words = ["--policies", str(world / "base"), str(world / "even"), *options]
    assert run(*words, "--output", str(tmp_path / "1"))[0] == 0
    words += ["--output", str(tmp_path / "2"), "--deployment-type", "single_node", "--num-processes", "2"]
    monkeypatch.setattr(launcher, "run", forked_ranks.launch)
    code, printed, error = run(*words)
    assert code == 0, error
    assert printed.count("wrote results.json") == 1
    assert samples(tmp_path / "1") == samples(tmp_path / "2")
    one, two = ({k: v for k, v in results(tmp_path / n).items() if k != "options"} for n in "12")
    assert one == two


def test_kl_and_perplexity_are_those_of_the_models(
    run: Run, world: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against log-softmax over the whole text, one response at a time, in float64."""
    measured: dict[str, Responses] = {}
    measure = comparison.measure_all
    monkeypatch.setattr(comparison, "measure_all", lambda setting: measured.update(measure(setting)) or measured)
    paths = [str(world / "base"), str(world / "even")]
    assert run("--policies", *paths, "--temperature", "0.7", "--output", str(tmp_path), *options)[0] == 0
    models = [AutoModelForCausalLM.from_pretrained(path).double().eval() for path in paths]
    total, count = 0.0, 0
    for row, tokens in zip(samples(tmp_path), measured[paths[1]].tokens, strict=True):
        prompt = tiny.tokenizer()(row["prompt"]).input_ids
        ids, positions = prompt + tokens, range(len(prompt), len(prompt) + len(tokens))
        with torch.no_grad():
            logprobs = [torch.log_softmax(model(torch.tensor([ids])).logits[0] / 0.7, -1) for model in models]
        ref, own = (sum(of_model[i - 1, ids[i]].item() for i in positions) for of_model in logprobs)
        answer = row["responses"][paths[1]]
        assert answer["kl"] == pytest.approx(own - ref, abs=1e-4)
        assert (answer["length"], answer["ended"]) == (len(tokens), tokens[-1] == tiny.EOS)
        total, count = total - ref, count + len(tokens)
    assert results(tmp_path)["policies"][1]["ref_nll"] == pytest.approx(total / count, abs=1e-5)


def test_responses_depend_on_the_seed_not_on_the_micro_batch(
    run: Run, world: Path, options: list[str], tmp_path: Path
) -> None:
    def sampled(name: str, *more: str) -> list[str]:
        paths = [str(world / "base"), str(world / "even")]
        assert run("--policies", *paths, "--output", str(tmp_path / name), *options, *more)[0] == 0
        return [answer["response"] for row in samples(tmp_path / name) for answer in row["responses"].values()]

    first = sampled("first")
    assert sampled("again", "--micro-batch-size", "3") == first
    assert sampled("batches", "--rollout-batch-size", "4") == first
    assert sampled("other", "--seed", "1") != first
    numbers = [results(tmp_path / name)["policies"][1]["kl"]["mean"] for name in ("first", "again")]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


def test_the_demo_model_from_its_description(run: Run, tmp_path: Path) -> None:
    """A text file, a model that a YAML file describes, and the same one saved."""
    tokenizer = prepare_tokenizer(load_tokenizer(resolve("demo-llama")), "auto")
    model = load_causal_lm(resolve("demo-llama"), torch.float32, len(tokenizer))
    model.save_pretrained(tmp_path / "same")
    tokenizer.save_pretrained(tmp_path / "same")
    prompts = [f"tell me about the {colour} fox in the forest" for colour in ("red", "blue", "green", "white")]
    (tmp_path / "p.txt").write_text("\n".join([*prompts, prompts[1]]))
    (tmp_path / "judge.py").write_text(KIND)
    words = ["--prompts", f"{tmp_path}/p.txt", "--reward", f"{tmp_path}/judge.py", "--response-length", "12"]
    code, printed, error = run("--policies", "demo-llama", str(tmp_path / "same"), *words)
    assert (code, error) == (0, "")
    assert "p.txt: 1 of 5 rows repeat an earlier one and are left out\n" in printed
    assert "tell me about the red fox" in printed and "0.500 [" in printed
    assert "Human: tell" not in printed and "<s>" not in printed  # what the template writes is no user's word


def test_a_stage_directory_names_its_policy(run: Run, world: Path, options: list[str], tmp_path: Path) -> None:
    stage = tmp_path / "step3_ppo"
    (stage / "actor").mkdir(parents=True)
    for file in (world / "even").iterdir():
        (stage / "actor" / file.name).write_bytes(file.read_bytes())
    (stage / "config.yaml").write_text("")
    paths = [str(world / "even"), str(stage)]
    (stage / "metrics.jsonl").write_text("")
    code, _, error = run("--policies", *paths, *options)
    assert code == 2 and "unfinished stage" in error
    manifest = {"stage": "step3_ppo", "inputs": {}, "models": ["actor"], "metrics": {}, "config": {}}
    files = manifests.file_digests(stage, ["actor"])
    manifests.write_manifest(stage / "manifest.json", manifest | {"files": files})
    code, _, error = run("--policies", *paths, "--output", str(tmp_path / "out"), *options)
    assert code == 0, error
    result = results(tmp_path / "out")["policies"][1]
    assert result["path"] == str(stage / "actor") and len(result["manifest_sha256"]) == 64
    assert result["win_rate"]["mean"] == 0.5


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "no policy there": (["--policies", "base", "./no"], ["./no", "no such directory"]),
    "one prompt": (["--prompts", "one.txt"], ["--prompts one.txt", "got 1 prompts"]),
    "a prompt too long": (["--prompts", "long.txt"], ["long.txt:2", "61 tokens", "--response-length 10", "64"]),
    "no result": (["--policies", "base", "./no", "--select-by", "match"], ["'match': no row has a column 'answer'"]),
    "no reward model": (["--reward", "learned"], ["--reward learned", "learned,model=DIR"]),
    "a judge that says nothing": (["--reward", "none.py"], ["none.py", "nan"]),
    "another tokenizer": (["--policies", "base", "demo-llama"], ["demo-llama", "gives other ids"]),
    "no directory to write": (["--output", "judge.py/out"], ["--output judge.py/out", "cannot write"]),
    "results of before": (["--output", "old"], ["--output old", "--overwrite"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(name: str, run: Run, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    (world / "one.txt").write_text("w4\n")
    (world / "long.txt").write_text("w4\n" + "w5 " * 60)
    (world / "none.py").write_text("def score(prompts, responses):\n    return [float('nan')] * len(prompts)\n")
    (world / "old").mkdir(exist_ok=True)
    (world / "old" / "results.json").write_text("{}")
    argv, words = MISTAKES[name]
    base = ["--policies", "base", "even", "--prompts", "p.jsonl", "--reward", "judge.py", "--response-length", "10"]
    code, printed, error = run(*base, *argv)
    assert (code, printed) == (2, ""), error
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error


def test_overwriting_on_request(run: Run, world: Path, options: list[str], tmp_path: Path) -> None:
    paths = [str(world / "base"), str(world / "even")]
    (tmp_path / "results.json").write_text("{}")
    assert run("--policies", *paths, "--output", str(tmp_path), "--overwrite", *options)[0] == 0
    assert len(results(tmp_path)["policies"]) == 2


def test_log_probs_that_are_not_finite_end_with_code_3(
    run: Run, world: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = comparison.response_logprobs
    monkeypatch.setattr(comparison, "response_logprobs", lambda *a: real(*a) + torch.tensor(torch.nan))
    code, _, error = run("--policies", str(world / "base"), str(world / "even"), *options)
    assert code == 3 and error.count("\n") == 1 and "not finite" in error

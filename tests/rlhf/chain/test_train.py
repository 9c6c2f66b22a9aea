"""The chain as a user meets it: one command, three stages, and what the same command does again."""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from data.sources import demo
from rlhf import console, errors
from rlhf.chain import command as train
from rlhf.chain import recount, verify
from rlhf.config import yaml_files
from rlhf.launch import launcher
from rlhf.pages.numbers import short
from rlhf.storage import manifests
from rlhf.supervised.demonstrations import held_out
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from tests.support import changed_runs
from tests.support.programs import STATUS, without_status

ROOT = Path(train.__file__).parents[2]
SMALL = [
    *("--data-path", "demo,rows=2400", "--max-eval-rows", "40", "--ppo.eval-samples", "12"),
    *("--sft.num-train-epochs", "2", "--reward.num-train-epochs", "1", "--ppo.total-episodes", "384"),
]
"""The demo's three stages with fewer steps; the whole demo: test_demo.py."""
MODELS = ("step1_sft/model", "step2_reward/model", "step3_ppo/actor", "step3_ppo/critic")
STAGES = ("step1_sft", "step2_reward", "step3_ppo")


def start(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", *argv]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, encoding="utf-8", check=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The one run of this file: a short demo, on a terminal that knows ASCII only."""
    out = tmp_path_factory.mktemp("run") / "out"
    done = start(*SMALL, "--output-dir", str(out), PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    return out, done


@pytest.fixture
def out(finished: tuple[Path, Any]) -> Path:
    return finished[0]


@pytest.fixture
def again(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[str]]]:
    """The chain in this process, its stages noted instead of started: (exit code, what it says, stages)."""

    def run(*argv: str, copied_from: Path | None = None) -> tuple[int, str, list[str]]:
        started: list[str] = []

        def stage(module: str, words: list[str], target: Any) -> int:
            started.append(module)
            if copied_from is not None:
                directory = Path(yaml_files.read_yaml(words[1])["output_dir"])
                shutil.copytree(copied_from / module, directory / module)
            return 0

        monkeypatch.setattr(console, "quiet_libraries", lambda: None)
        monkeypatch.setattr(launcher, "run", stage)
        if copied_from is None:
            monkeypatch.setattr(train, "save", lambda chain: None)
            versions = iter(range(9))
            monkeypatch.setattr(train, "manifest_version", lambda stage: (next(versions), 0))
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *argv])
        code = errors.run_as_user(train.main)
        captured = capsys.readouterr()
        return code, captured.out + without_status(captured.err), started

    return run


def manifest(out: Path, stage: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / stage / "manifest.json").read_text(encoding="utf-8"))
    return content


def metrics(out: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / stage / "metrics.jsonl").read_text().splitlines()]


def test_every_stage_leaves_what_it_promises(out: Path) -> None:
    assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "report.html", *STAGES]
    for stage in STAGES:
        assert {"config.yaml", "metrics.jsonl", "manifest.json"} <= {path.name for path in (out / stage).iterdir()}
        assert not list((out / stage).glob(".tmp-*"))
        assert manifests.read_manifest(out / stage)["stage"] == stage
        written = (out / stage / "manifest.json").stat().st_mtime_ns
        assert all(path.stat().st_mtime_ns <= written for path in (out / stage).rglob("*.safetensors"))
    assert sorted(f"{s}/{m}" for s in STAGES for m in manifest(out, s)["models"]) == sorted(MODELS)


def test_the_chain_ends_with_a_report(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Its pairs, samples and hardware are those that real stages write."""
    out, done = finished
    assert f"\nreport: {out}/report.html\n" in done.stdout
    page = (out / "report.html").read_text(encoding="utf-8")
    for text in ("Scores of held-out pairs", "tell me about the", "1 process on ", "Judge against KL"):
        assert text in page, text
    kinds = {kind: [name for name, other in demo.KINDS.items() if other == kind] for kind in ("bird", "tame")}
    for line in (out / "step3_ppo/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["group"] == next((kind for kind in kinds if sample["question"].split()[5] in kinds[kind]), "wild")
    assert "For whom" in page and re.search(r"wild \(2\d pairs\): ", page)
    assert len(page) < 1_000_000


def test_metrics_have_one_line_a_step(out: Path) -> None:
    account = {stage: json.loads((out / stage / "data.json").read_text()) for stage in STAGES}
    trained_on = {stage: account[stage]["train"]["rows"] for stage in STAGES}
    steps = {
        "step1_sft": 2 * math.ceil(trained_on["step1_sft"] / 32),
        "step2_reward": math.ceil(trained_on["step2_reward"] / 32),
        "step3_ppo": 384 // 128,
    }
    for stage, count in steps.items():
        [source] = account[stage]["sources"]
        assert sum(source["outcomes"].values()) == source["rows"]
        rows = metrics(out, stage)
        assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, count + 1))
        before = [] if stage == "step2_reward" else [0]
        each_epoch = [count // 2] if stage == "step1_sft" else []
        assert [row["step"] for row in rows if row["kind"] == "eval"] == [*before, *each_epoch, count]
        seconds = [row["seconds"] for row in rows]
        assert seconds == sorted(seconds)
    first = metrics(out, "step3_ppo")[1]
    assert abs(first["first_approx_kl"]) < 1e-6, "on the first minibatch the policy is the one that sampled"
    assert abs(first["kl"]) < 1e-3, "and the reference is the policy"


def test_step_3_says_what_it_cost(out: Path) -> None:
    """The perplexity of step 1's held-out demonstrations, by transformers in float64, one row at a time."""
    first, last = metrics(out, "step3_ppo")[0], metrics(out, "step3_ppo")[-1]
    before = metrics(out, "step1_sft")[-1]["eval_perplexity"]
    model = AutoModelForCausalLM.from_pretrained(out / "step3_ppo/actor", dtype=torch.float64)
    rows = held_out(out / "step1_sft", prepare_tokenizer(load_tokenizer(str(out / "step3_ppo/actor")), "auto"))
    assert rows is not None and len(rows) == 40
    nll, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logprobs = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        for start, end in row.spans:
            nll -= sum(float(logprobs[i - 1, row.ids[i]]) for i in range(start, end))
            count += end - start
    assert last["eval_perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert first["eval_perplexity"] == last["eval_perplexity_before"] == pytest.approx(before, rel=1e-5)
    assert last["eval_perplexity"] > 1.001 * before  # it is not what the training was for
    shown = f"Cost: perplexity of demonstrations {short(before)} → {short(last['eval_perplexity'])}."
    assert shown in (out / "report.html").read_text(encoding="utf-8")


def test_a_run_proves_itself(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(out)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"score of the samples, the farthest of \d\d ", text) and "DIFFERS" not in text
    assert re.search(r"verified: (\d\d) numbers hold; 6 were not computed again", text)
    assert "6 were not computed again" in (out / "report.html").read_text(encoding="utf-8")
    sealed = json.loads((out / "verified.json").read_text())["files"]
    files = {f"{stage}/{name}" for stage in STAGES for name in ("manifest.json", "metrics.jsonl")}
    files |= {"step2_reward/heldout_scores.json", "step3_ppo/samples.jsonl", "step3_ppo/best_of.jsonl"}
    assert files | {f"{model}/model.safetensors" for model in MODELS} <= {*sealed}
    (out / "verified.json").unlink()


@pytest.mark.parametrize("change", changed_runs.CHANGES)
def test_a_changed_run_does_not(
    out: Path, tmp_path: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the digests; and by its numbers, if the digests were made after the change."""
    stage = tmp_path / "step1_sft"
    shutil.copytree(out / "step1_sft", stage)
    change(stage)
    assert verify.main([str(stage)]) == 1
    assert re.search("can be computed again .*(damaged|edited).*DIFFERS", capsys.readouterr().out)
    changed_runs.reseal(stage)
    assert verify.main([str(stage)]) == 1
    assert re.search("eval_perplexity .*DIFFERS", capsys.readouterr().out)


def test_every_number_of_a_manifest_is_computed_again_or_named(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "run")
    numbers = {stage: changed_runs.change_all_numbers(tmp_path / "run" / stage) for stage in STAGES}
    for step, stage in recount.finished_stages(tmp_path / "run"):
        claims, names = [*recount.recount(step, stage)], numbers[stage.directory.name]
        left = changed_runs.LEFT[stage.directory.name]
        assert {claim.name.partition(",")[0] for claim in claims if not claim.holds} == names - left
        assert {claim.name for claim in claims if claim.recount is None} == left


def test_files_with_other_numbers_do_not_hold(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "run")
    false = {2: changed_runs.change_pairs(tmp_path / "run/step2_reward")}
    false[3] = changed_runs.change_samples(tmp_path / "run/step3_ppo")
    for step, stage in recount.finished_stages(tmp_path / "run")[1:]:
        differ = {claim.name.partition(",")[0] for claim in recount.recount(step, stage) if not claim.holds}
        best_of_n = {name for name in differ if "_worth_" in name or "_efficiency" in name}
        assert differ - best_of_n == false[step]


def test_each_stage_names_what_it_started_from(out: Path) -> None:
    inputs = manifest(out, "step3_ppo")["inputs"]
    for name, maker in (("actor_model", STAGES[0]), ("reward_model", STAGES[1]), ("critic_model", STAGES[1])):
        assert inputs[name] == {
            "path": str(out / maker / "model"),
            "manifest_sha256": manifests.manifest_digest(str(out / maker)),
            "weights": weights_digest(out / maker / "model"),
        }
    described = hashlib.sha256(Path("configs/models/demo-llama.yaml").read_bytes()).hexdigest()
    started = {"path": "demo-llama", "manifest_sha256": None, "weights": described}
    assert manifest(out, "step1_sft")["inputs"]["model"] == started


def weights_digest(model: Path) -> str:
    """As manifests have it: of the names and sha256 of the files of weights."""
    files = sorted(model.glob("*.safetensors"))
    named = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def test_nothing_is_said_but_our_lines(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = finished
    assert without_status(done.stderr) == "", "a log has whole lines, each with its time"
    messages = STATUS.findall(done.stderr)
    assert messages[:2] == ["train.py: loading libraries", "checking options, models and data"]
    for stage in STAGES:
        steps = len([line for line in metrics(out, stage) if line["kind"] == "train"])
        own = [line.removeprefix(f"{stage}: ") for line in messages if line.startswith(stage)]
        assert own[0] == "loading libraries" and own[1] == "reading the data" and own[2].startswith("loading the model")
        assert own[-1].startswith(f"{steps} of {steps} (100 %), ") and own[-1].count("=") == 0
    ours = re.compile(
        r"step\d_\w+: |chosen |rejected |held-out prompts|[+|-]|(The policy|No difference) .* By the judge `[^`]*` "
        r"|report: |The tuned policy|next: |$"
    )
    assert all(ours.match(line) for line in done.stdout.splitlines()), done.stdout
    [end] = re.findall(r"^step3_ppo: (eval_.*)$", done.stdout, re.MULTILINE)
    assert re.sub(r" -?\d[\d.e-]*", "", end) == "eval_judge_before, eval_judge, eval_score_before, eval_score, eval_kl"
    assert done.stdout.endswith(
        f"\nreport: {out}/report.html\nThe tuned policy is {out}/step3_ppo/actor: "
        f"AutoModelForCausalLM.from_pretrained loads it.\nnext: {sys.executable} -m rlhf chat {out}\n"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [printed] = re.findall(r"```\n(step1_sft: .*?)```", readme, re.DOTALL)
    said = done.stdout.replace(str(out), "runs/demo").replace(sys.executable, ".venv/bin/python")
    shown = [re.sub(r" -?\d[\d.e-]*", "", line) for line in printed.splitlines() if not line.startswith("The policy")]
    assert [line for line in re.sub(r" -?\d[\d.e-]*", "", said).splitlines() if line in shown] == shown
    assert done.stdout.isascii()
    for stage in STAGES:
        assert f"{stage}: wrote " in done.stdout


# --- the same command again


def test_the_saved_options_are_the_resolved_ones(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for argv in (["--output-dir", str(out)], ["--config", f"{out}/config.yaml"]):
        monkeypatch.setattr(sys, "argv", ["train.py", *argv, "--print-config"])
        train.main()
        printed.append(yaml.safe_load(capsys.readouterr().out))
    assert printed[0] == printed[1] == yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    for section, stage in zip(("sft", "reward", "ppo"), STAGES, strict=True):
        assert printed[0][section] == yaml.safe_load((out / stage / "config.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("argv", "stages"),
    [
        (["--overwrite"], STAGES),
        (["--sft.overwrite", "--ppo.overwrite"], (STAGES[0], STAGES[2])),
        (["--steps", "2", "--overwrite"], STAGES[1:2]),
        (["--reward.overwrite", "--ppo.overwrite", "--reward.seed", "5"], STAGES[1:]),
    ],
)
def test_overwriting_runs_a_stage_and_those_that_start_from_it(
    again: Callable[..., Any], out: Path, argv: list[str], stages: tuple[str, ...]
) -> None:
    code, _, started = again(*argv, "--output-dir", str(out))
    assert (code, tuple(started)) == (0, stages)


def test_a_finished_stage_is_not_overwritten_with_its_input(again: Callable[..., Any], out: Path) -> None:
    code, output, started = again("--sft.overwrite", "--output-dir", str(out))
    assert (code, started) == (2, []) and "step3_ppo" in output and "--overwrite" in output


def test_a_command_without_config_and_model_takes_the_options_of_the_directory(
    again: Callable[..., Any], out: Path
) -> None:
    """Whichever steps it names."""
    for steps in ([], ["--steps", "3"]):
        code, output, started = again(*steps, "--output-dir", str(out))
        assert (code, started) == (0, []) and "step3_ppo: already complete" in output
        code, output, started = again(*steps, "--ppo.kl-coef", "0.7", "--ppo.overwrite", "--output-dir", str(out))
        assert (code, started) == (0, ["step3_ppo"]) and f"options that are not set: as in {out}/config.yaml" in output


NAMED = {1: ("--actor-model", STAGES[0]), 2: ("--reward-model", STAGES[1])}


@pytest.mark.parametrize("steps", [(1,), (2,), (3,), (1, 3)], ids=str)
def test_every_next_command_that_is_printed_can_be_typed(
    steps: tuple[int, ...], again: Callable[..., Any], out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that is started leaves what the stage of the finished run has left."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(out / STAGES[0] / "model", "base")  # by a relative path
    inputs = [word for step in {1, 2} - {*steps} for word in (NAMED[step][0], f"{out}/{NAMED[step][1]}") if 3 in steps]
    models = ["--actor-model", "demo-llama", "--reward-model", "./base"] if 3 not in steps else []
    command = ["--config", str(train.DEMO), *SMALL, *models, *inputs, "--steps", *map(str, steps)]
    command += ["--output-dir", "a run"]
    ran: list[str] = []
    while command:
        code, output, started = again(*command, copied_from=out)
        assert code == 0, output
        ran += started
        command = shlex.split(output.partition("next: python train.py")[2])
    whole = {STAGES[step - 1] for step in (steps if 3 in steps else (1, 2, 3))}
    assert sorted(ran) == sorted(whole) and "The tuned policy is" in output


def test_a_chain_that_asks_no_reward_model_makes_none(again: Callable[..., Any], out: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompts, responses):\n    return [float(len(r)) for r in responses]\n")
    own = ["--config", str(train.DEMO), *SMALL, "--ppo.reward", f"{tmp_path}/mine.py:score"]
    own += ["--output-dir", str(tmp_path / "new")]
    code, output, started = again(*own, "--ppo.algorithm", "rloo")
    assert (code, started) == (0, [STAGES[0], STAGES[2]]) and "step2_reward: skipped" in output
    assert again(*own, "--ppo.algorithm", "rloo", "--steps", "1", "2", "3")[::2] == (0, list(STAGES))
    assert again(*own, "--ppo.critic-model", "reward")[::2] == (0, list(STAGES))
    code, output, started = again(*own, "--ppo.algorithm", "rloo", "--ppo.actor-model", f"{out}/step1_sft")
    assert (code, started) == (0, [STAGES[2]]) and "step1_sft: skipped" in output
    output = again(*own, "--ppo.algorithm", "rloo", "--steps", "1", copied_from=out)[1]
    assert output.endswith(f"next: python train.py --steps 3 --output-dir {tmp_path}/new\n")


def test_a_part_elsewhere_starts_from_named_models(again: Callable[..., Any], out: Path, tmp_path: Path) -> None:
    named = ["--actor-model", f"{out}/step1_sft", "--reward-model", f"{out}/step2_reward/model"]
    other = ["--config", str(train.DEMO), *SMALL, "--steps", "3", "--output-dir", str(tmp_path / "other")]
    assert again(*other, *named)[::2] == (0, ["step3_ppo"])
    code, output, started = again(*other, *named[:2])
    assert (code, started) == (2, []) and "reward_model not found" in output and "--reward-model" in output


def test_a_named_model_that_is_not_what_the_run_started_from(again: Callable[..., Any], out: Path) -> None:
    here = ["--config", f"{out}/config.yaml", "--steps", "3"]
    assert again(*here, "--actor-model", "demo-llama")[::2] == (0, [])
    code, output, started = again(*here, "--actor-model", "gpt2")
    assert (code, started) == (2, []) and "made from 'demo-llama'" in output and "--ppo.actor-model" in output


def test_the_reward_model_may_start_from_step_1(again: Callable[..., Any], tmp_path: Path) -> None:
    run_path = str(tmp_path / "new")
    argv = ["--config", str(train.DEMO), *SMALL, "--reward-model", f"{run_path}/step1_sft", "--output-dir", run_path]
    assert again(*argv)[::2] == (0, list(STAGES))

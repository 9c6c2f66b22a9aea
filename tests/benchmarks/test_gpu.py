"""benchmarks/gpu.py at tiny sizes on a CPU: every part runs to its end, so that a lent GPU finds no mistake of ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, harness, trl_trainers
from benchmarks.gpu_part import Options, Results
from rlhf.chain import command as train
from rlhf.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def numbers_of(part: str, folder: Path, **options: Any) -> dict[str, Any]:
    """What a part writes."""
    path = folder / f"gpu-{part}.json"
    gpu.PARTS[part](Options(tiny=True, output=str(folder), work=str(folder), **options), Results(path))
    numbers: dict[str, Any] = json.loads(path.read_text())
    assert {"device", "torch", "date"} <= set(numbers.pop("machine"))
    return numbers


def test_decode_steps_are_a_share_of_the_bandwidth(folder: Path) -> None:
    numbers = numbers_of("decode", folder)
    assert 0 < numbers["eager_2_share"] < 1 and numbers["eager_2_step_ms"] > 0 and numbers["eager_2_same_tokens"] == 1


def test_an_iteration_counts_all_tokens_and_scoring(folder: Path) -> None:
    numbers = numbers_of("ppo", folder)
    parts = sum(numbers[name] for name in ("generate", "score", "update"))
    assert parts < numbers["seconds"] and numbers["planned_peak_gb"] > 0
    assert numbers["tokens_per_s"] == pytest.approx(4 * (8 + 8) / numbers["seconds"])
    assert numbers["over_published"] == pytest.approx(numbers["tokens_per_s"] * 11.7 * 3600 / (264_292 * 512), rel=1e-3)
    assert numbers["update_tflops"] > 0 and numbers["score_tflops"] > 0


def test_a_sweep_takes_other_batches_of_the_same_models(folder: Path) -> None:
    numbers = numbers_of("sweep", folder)
    assert numbers["4_1_once_tokens_per_s"] == pytest.approx(4 * (8 + 8) / numbers["4_1_once_seconds"])


def test_a_profile_names_kernels_of_each_half(folder: Path) -> None:
    numbers = numbers_of("profile", folder)
    assert all(numbers[f"{name}_operations"] > 100 for name in ("decode", "score", "update"))
    text = (folder / "gpu-profile.txt").read_text()
    assert text.count("Self CPU total") >= 3 or text.count("Self CPU time total") == 3


def test_rates_of_the_device(folder: Path) -> None:
    numbers = numbers_of("rates", folder)
    assert numbers.pop("flash") is numbers.pop("flex") is torch.cuda.is_available()
    assert all(value > 0 for value in numbers.values())


def test_a_cpu_repeats_a_backward_pass_to_the_bit(folder: Path) -> None:
    numbers = numbers_of("determinism", folder)
    assert numbers["default_same_bits"] and numbers["deterministic_same_bits"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_training_is_a_share_of_the_peak(folder: Path) -> None:
    numbers = numbers_of("train", folder)
    assert 0 < numbers["eager_mfu"] < 1 and numbers["tokens_of_a_step"] == 64


def test_parts_that_are_programs_start_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(gpu, "_run", lambda words, **_: started.append(words) or 0)
    assert numbers_of("demo", folder)["fp32_code"] == 0
    assert numbers_of("tests", folder) == dict.fromkeys(gpu.TINY_TESTS, 0)
    for name in gpu.BENCHMARKS:
        assert numbers_of(f"trl-{name}", folder) == {name: "left out"}
    assert [words[0] for words in started] == ["train.py", "-m"]
    root = Path(gpu.__file__).parents[1]
    assert all((root / "tests" / name).exists() for name in (*gpu.TESTS, *gpu.TINY_TESTS))
    assert all((root / "benchmarks" / f"{name}.py").is_file() for name in gpu.BENCHMARKS)


@pytest.mark.parametrize("tiny", [True, False])
def test_train_takes_the_options_of_the_demo(
    tiny: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse(words: list[str], **_: str) -> int:
        monkeypatch.setattr("sys.argv", [*words, "--print-config"])
        return train.main()

    monkeypatch.setattr(gpu, "_run", parse)
    results = Results(tmp_path / "demo.json")
    gpu.demo(Options(tiny=tiny, work=str(tmp_path)), results)
    assert not results.failed and capsys.readouterr().out.count("actor_model: demo-llama") == (1 if tiny else 2)


def test_a_part_whose_program_fails_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (0, 3):
        monkeypatch.setattr(gpu, "_run", lambda words, code=code, **_: code)
        for part in ("demo", "tests"):
            monkeypatch.setattr(
                "sys.argv", ["gpu", "--tiny", "--output", str(tmp_path), "--work", str(tmp_path), "--part", part]
            )
            assert gpu.main() == int(code != 0), part


def test_the_peers_of_a_gpu_are_measured_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(gpu, "_run", lambda words, **_: started.append(words) or 0)
    for name in gpu.BENCHMARKS:
        gpu.PARTS[f"trl-{name}"](Options(output=str(tmp_path)), Results(tmp_path / f"gpu-trl-{name}.json"))
    assert [words[1] for words in started] == [f"benchmarks.{name}" for name in gpu.BENCHMARKS]
    settings = {"folder": "f", "batch_size": 8, "peer_compile": False, "dtype": "bf16"}
    for available in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert trl_trainers.arguments(settings)["use_cpu"] is not available


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(UserError, match=r"^make gpu: torch finds no GPU here; --tiny .*$"):
        gpu.main()


@pytest.mark.long
def test_the_program_runs_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--tiny", "--output", str(tmp_path), "--work", str(tmp_path)])
    assert gpu.main() == 0
    assert {path.stem for path in tmp_path.glob("gpu-*.json")} == {f"gpu-{name}" for name in gpu.PARTS}


def test_a_clock_of_the_comparisons_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("done"))
    assert harness.clock() <= harness.clock() and waits == ["done", "done"]
    for name in ("sft", "ppo", "rollout", "trl_trainers"):  # of both sides
        assert "perf_counter" not in (gpu.ROOT / "benchmarks" / f"{name}.py").read_text()

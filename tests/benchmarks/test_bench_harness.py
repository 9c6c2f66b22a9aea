"""benchmarks/harness.py and its outcome on contenders that only count: no model, no peer, no clock that decides."""

import ast
import graphlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks import goals, harness, inputs, limits, outcome, peers, reward, rollout, sft, trl_trainers
from benchmarks.harness import MACHINE, OURS, WARM_UP, Contender, Options, Program
from rlhf.errors import UserError

FAKE = """
import sys, json
from pathlib import Path
from benchmarks.harness import WorkerPipe
wire = WorkerPipe()
print("what a library prints is no answer")
wire.mark_baseline()
wire.ready()
log = Path(sys.argv[1])
while (work := wire.next_request()):
    if work == "fail":
        sys.exit("out of luck")
    with log.open("a") as file:
        file.write(f"{sys.argv[2]} {work}\\n")
    wire.reply(seconds=float(sys.argv[3]), tokens=100)
"""


NOTHING = Program(lambda settings, pipe: None)


def contender(name: str, folder: Path, seconds: float = 1.0) -> Contender:
    command = [sys.executable, "-c", FAKE, str(folder / "order"), name, str(seconds)]
    return Contender(name, command, {}, folder)


def test_contenders_take_turns_and_end(tmp_path: Path) -> None:
    both = {name: contender(name, tmp_path, seconds) for name, seconds in ((OURS, 2.0), ("peer", 4.0))}
    rows = harness.alternate(both, 2, ("a", "b"))
    assert (tmp_path / "order").read_text().splitlines() == [
        f"{name} {work}" for work in (WARM_UP, "a", "b", "a", "b") for name in (OURS, "peer")
    ]
    for each in both.values():
        each.close()
        assert each._process.returncode == 0
    summary = outcome.summary(both["peer"], rows["peer"], "tokens")
    assert summary["tokens_per_s"]["a"]["each"] == [25.0, 25.0] and summary["peak_mb"] > 0
    assert summary["peak_over_imports_mb"] < summary["peak_mb"]


def test_a_contender_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    one = contender("peer", tmp_path)
    with pytest.raises(UserError, match=r"contender 'peer' ended with code 1: (.|\n)*out of luck"):
        one.ask("fail")
    one.close()


def rows_of(seconds: dict[str, list[float]]) -> harness.Rows:
    row = {"tokens": 10, "peak_bytes": 1}
    return {name: {WARM_UP: [], "all": [row | {"seconds": s} for s in each]} for name, each in seconds.items()}


def test_ratios_are_taken_pair_by_pair() -> None:
    rows = rows_of({OURS: [1.0, 2.0, 1.0], "peer": [4.0, 4.0, 3.0], MACHINE: [1.0, 1.0, 1.0]})
    ratios = outcome.ratios(rows, "tokens", {("peer", "all"): (2.5, 5.0)})
    assert ratios == {
        "tokens a second, ours / peer": {
            "median": 3.0, "min": 2.0, "max": 4.0, "each": [4.0, 2.0, 3.0], "at_least": 2.5, "aim": 5.0,
        }
    }  # fmt: skip
    assert outcome.ratios(rows_of({"peer": [1.0]}), "tokens", {}) == {}


def result(ratio: float, share: float) -> dict[str, Any]:
    return {
        "ratios": {"r": {"median": ratio, "min": ratio, "max": ratio, "at_least": 2.0, "aim": 3.0}},
        "shares": {"s": {"median": share, "min": share, "max": share, "at_least": None, "aim": None}},
        "contenders": {OURS: {"start_up_s": 1.0, "warm_up_s": 1.0, "peak_mb": 5, "peak_over_imports_mb": 3}},
        "limits": {},
        "peak_memory_ours_over": {"peer": 1.2},
    }


def test_the_table_says_what_is_met() -> None:
    table = outcome.table(result(2.5, 0.5))
    assert "| r | 2.5 (2.5 to 2.5) | 2.0 | 3.0 | met |" in table
    assert "| s | 0.5 (0.5 to 0.5) |  |  |  |" in table
    assert "| peak memory over imports, ours / peer | 1.2 | at most 1 | | not met |" in table


def test_paths_of_this_machine_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--data", "/somewhere/on/this/machine.gz", "--threads", "2"])
    assert outcome.command_line().endswith("--data machine.gz --threads 2")
    assert outcome.option_values(Options(model="/some/model"))["model"] == "model"


def test_only_known_contenders_are_chosen() -> None:
    programs = dict.fromkeys((OURS, "peer", MACHINE), NOTHING)
    programs["vLLM"] = Program(NOTHING.run, python=Path("no/such/python"))
    assert list(harness.select_contenders(programs, Options(only=("peer",)))) == ["peer", MACHINE]
    assert list(harness.select_contenders(programs, Options())) == [OURS, "peer", MACHINE]
    with pytest.raises(UserError, match="--only others: expected some of 'ours', 'peer', 'machine'"):
        harness.select_contenders(programs, Options(only=("others",)))


def test_a_contender_starts_with_its_interpreter_variables_and_release_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, tuple[Any, ...]] = {}

    class Started:
        start: ClassVar = {"start_up_s": 1.0}

        def __init__(self, name: str, command: list[str], env: dict[str, str], folder: Path) -> None:
            started[name] = command[0], env

        def close(self) -> None:
            pass

    monkeypatch.setattr(harness, "Contender", Started)
    monkeypatch.setattr(peers, "install_trl", lambda version: Path(version))
    programs = {OURS: NOTHING, "peer": replace(NOTHING, release="1.2.3")}
    programs["vLLM"] = Program(NOTHING.run, python=Path("other/python"), variables={"A": "1"})
    with harness.start_contenders("m", programs, {}, 2, tmp_path) as running:
        assert list(running) == [OURS, "peer", "vLLM"]
    assert [python for python, _ in started.values()] == [sys.executable, sys.executable, "other/python"]
    assert all(env["OMP_NUM_THREADS"] == "2" for _, env in started.values())
    assert "PYTHONPATH" not in started[OURS][1] and started["peer"][1]["PYTHONPATH"].startswith("1.2.3")
    assert started["vLLM"][1]["A"] == "1"


def test_vllm_samples_whole_responses_with_their_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}

    class Engine:
        def __init__(self, model: str, **given: Any) -> None:
            options.update(given, model=model)

        def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
            assert sampling.ignore_eos and sampling.logprobs == 0 and not use_tqdm
            assert [each["prompt_token_ids"] for each in prompts] == [[5, 6, 7], [8]]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * sampling.max_tokens)]) for _ in prompts]

    requests, replies = iter(("2 prompts", None)), []
    pipe: Any = SimpleNamespace(
        mark_baseline=int, ready=int, next_request=lambda: next(requests), reply=lambda **row: replies.append(row)
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=SimpleNamespace))
    settings = {"prompts": [[5, 6, 7], [8]], "sizes": [2], "response_length": 4, "dtype": "bf16", "model": "m"}
    rollout.COMPARISON.programs["vLLM"].run(settings, pipe)
    assert [row["tokens"] for row in replies] == [2 * 4]
    assert options["dtype"] == "bfloat16" and options["max_model_len"] == 3 + 4
    assert not options["enable_prefix_caching"] and options["logprobs_mode"] == "processed_logprobs"


def test_only_default_options_write_the_file_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outcome, "RESULTS", tmp_path)
    for options in (sft.Options(rows=8), sft.Options(only=(OURS,))):
        outcome.save({"name": "sft"}, options)
        assert "not written" in capsys.readouterr().out and not list(tmp_path.iterdir())
    outcome.save({"name": "sft"}, sft.Options(data="elsewhere.jsonl.gz"))
    outcome.save({"name": "sft"}, sft.Options(rows=8, output=str(tmp_path / "rows-8.json")))
    assert {path.name for path in tmp_path.iterdir()} == {"sft.json", "rows-8.json"}


def test_the_page_has_the_commands_of_the_results() -> None:
    page = (harness.ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name in ("sft", "reward", "ppo", "rollout", "sft_lora", "ppo_lora"):
        path = outcome.RESULTS / f"{name}.json"
        command = json.loads(path.read_text(encoding="utf-8"))["command"].split(" --data ")[0]
        assert f"\n{command} --output benchmarks/results/{name}.json\n" in page


def test_rows_fill_whole_batches() -> None:
    for options in (sft.Options, reward.Options):
        assert options(rows=24, batch_size=12).rows == 24
        with pytest.raises(ValueError, match="rows 24: expected a multiple of batch_size, 16"):
            options(rows=24, batch_size=16)


def test_the_data_of_a_benchmark_may_be_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "rows.jsonl").write_text("a row\n")
    monkeypatch.setattr(inputs, "_open", lambda *_: SimpleNamespace(train=[0]))
    options = Options(model=str(tmp_path), data=str(tmp_path / "rows.jsonl"))
    with pytest.raises(UserError, match="got 1 rows that fit, expected 2; ask for fewer, or name a larger file"):
        inputs.first_rows(options, "ppo", 2, tmp_path)


def test_a_limit_is_measured_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def clock() -> float:
        events.append("done")
        return len(events)

    monkeypatch.setattr(harness, "clock", clock)
    assert limits._seconds(lambda: events.append("call"), 0.0) > 0
    assert events == ["call", *["done", "call", "done"] * 3]


def test_trl_gets_left_padded_prompts() -> None:
    result = trl_trainers.prompt_batches([[[5, 6], [7]], [[8]]], pad=0)
    assert [part["input_ids"].tolist() for part in result] == [[[5, 6], [0, 7]], [[8]]]


def test_work_by_hand() -> None:
    """Two rows of 3 and 2 tokens, of which 2 are predicted; each sees itself and those before: 6 + 3 pairs."""
    work = limits.Work(linear=10, head=100, attention=4, cache=6)
    assert limits.attention_pairs([3, 2]) == 9 and limits.attention_pairs([2], before=3) == 9
    assert work.forward(5, 2, 9) == 2 * 10 * 5 + 2 * 100 * 2 + 4 * 4 * 9
    assert work.training(5, 2, 9) == 3 * work.forward(5, 2, 9)
    assert work.decoding_bytes(cached=7, width=2) == 2 * (10 + 100 + 6 * 7)


def test_results_state_the_goals_of_today() -> None:
    known = {goal for goals_of_name in goals.GOALS.values() for goal in goals_of_name}
    for path in outcome.RESULTS.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        values = [*content.get("ratios", {}).values(), *content.get("shares", {}).values()]
        stated = {(value["at_least"], value["aim"]) for value in values if value.get("at_least") is not None}
        assert stated <= known, path.name


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        (["avx2", "amx_bf16"], None, True),
        (["avx2", "amx_bf16"], "", True),
        (["avx2", "amx_bf16"], "AVX512_CORE_AMX", True),
        (["avx2", "amx_bf16"], "avx512_core_bf16", False),
        (["avx2", "avx512_bf16"], None, False),
    ],
)
def test_goals_depend_on_amx(
    flags: list[str], limit: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "hardware", lambda: {"flags": flags})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit or "")
    if limit is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert goals.goal("ppo") == ((3.0, 4.0) if expected else (2.3, 3.0))
    assert goals.goal("sft beside packed", lora=16) == ((3.0, 5.0) if expected else (3.0, 4.0))


def test_no_import_goes_in_a_circle() -> None:
    """Neither at import time nor hidden in functions."""
    graph: dict[str, set[str]] = {}
    for path in (harness.ROOT / "benchmarks").glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        whole = {alias.name for node in imports if node.module == "benchmarks" for alias in node.names}
        parts = {str(node.module).split(".")[1] for node in imports if str(node.module).startswith("benchmarks.")}
        graph[path.stem] = whole | parts
    assert graph["outcome"] == {"harness"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError

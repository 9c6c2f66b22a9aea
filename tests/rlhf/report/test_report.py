"""The report: its numbers are those of the files, strangers' texts are shown and not run, every run has a report."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.chain import report
from rlhf.chain.stages import STAGES
from rlhf.cli import main as cli_main
from rlhf.errors import UserError
from rlhf.maths.intervals import mean_interval
from rlhf.pages.charts import histogram
from rlhf.pages.numbers import UNKNOWN
from rlhf.report import figures, meanings
from rlhf.report.records import read_runs
from rlhf.report.samples import MOST, sample_table
from rlhf.report.verdict import _source, changes, judge, stage_verdict
from rlhf.report.write import render_report
from rlhf.storage.manifests import METRICS_VERSION
from tests.support import programs, recorded_runs

DECLARATIONS = [*STAGES.values()]
VOID = {"meta", "link", "br", "img", "input", "path", "circle", "rect"}


class Reader(HTMLParser):
    """The titles of the figures; the page's visible text; every tag that was opened."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.figures: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.text += data
        if self.open[-2:] == ["figcaption", "strong"]:
            self.figures.append(data)


def rendered(*paths: Path) -> str:
    return render_report(read_runs([str(path) for path in paths], DECLARATIONS), DECLARATIONS)


def rows_of(stage: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]


def drawn(*paths: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By the title of each figure and the name of each line: the points."""
    runs = read_runs([str(path) for path in paths], DECLARATIONS)
    stages = [(figures.stages_of(runs, each), each) for each in DECLARATIONS]
    every = [f for stage in stages for f in (*figures.curves(*stage), *figures.frontiers(*stage))]
    return {f.chart.title: {x.name: [(p.x, p.y) for p in x.points] for x in f.chart.series} for f in every}


def test_the_numbers_of_the_page_are_those_of_the_files(tmp_path: Path) -> None:
    out = recorded_runs.run(tmp_path / "run")
    lines, page = drawn(out), Reader(rendered(out))
    assert {*lines} <= {*page.figures}
    rows = rows_of(out / "step3_ppo")
    for title, name, metric in (
        ("Score", "training", "score"),
        ("Score", "held out", "eval_score"),
        ("Judge", "eval_judge", "eval_judge"),
        ("KL from the reference", "held out", "eval_kl"),
    ):
        expected = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
        assert lines[title][name] == expected, title
    evaluations = [(row["eval_kl"], row["eval_judge"]) for row in rows if row["kind"] == "eval"]
    assert lines["Judge against KL"]["held out"] == evaluations
    for text in (
        "empty response",
        "my <data>.jsonl",
        "2 processes on a CPU, 2 cores",
        "70 of 100 rows to train on",
        "1.5 GB of one process",
        "step1_sft/model",
        "after step 40",
    ):
        assert text in page.text, text
    assert "step0/model" in page.text and "/step0/model" not in page.text  # of the same run


def test_gains_and_intervals_by_hand(tmp_path: Path) -> None:
    """Gains of 0.4 and 0.6 in turn: mean 0.5; s = 0.1 sqrt(8/7), t of 7 degrees 2.3646, so half = 0.0894."""
    out = recorded_runs.run(tmp_path / "run")
    [run] = read_runs([str(out)], DECLARATIONS)
    by_metric = {change.result.metric: change for stage in run.stages for change in changes(stage)}
    gain = by_metric["eval_judge"].gain
    assert gain is not None and gain.mean == pytest.approx(0.5, abs=1e-6)
    half = 2.3646 * 0.1 * (8 / 7) ** 0.5 / 8**0.5
    assert (gain.high - gain.low) / 2 == pytest.approx(half, rel=0.01)  # student_t is exact to a percent
    assert gain == mean_interval(torch.tensor([r.numbers[0].gain for r in samples_of(run)], dtype=torch.float64))
    assert (by_metric["eval_judge"].wins, by_metric["eval_judge"].losses) == (8, 0)
    assert (by_metric["eval_perplexity"].before, by_metric["eval_perplexity"].after) == (8.0, 4.0)
    assert by_metric["eval_accuracy"].half_width is not None and by_metric["eval_accuracy"].before is None
    assert judge(run).headline == "The policy got better." and judge(run).tone == "good"


def samples_of(run: Any) -> Any:
    return reversed(sample_table([(0, run.name, run.stage("step3_ppo"))]).samples)


@pytest.mark.parametrize(
    ("gains", "tone", "words"),
    [
        ((1.0, 0.5), "good", "got better."),
        ((1.0, -0.5), "bad", "the policy exploits its reward"),
        ((1.0, 0.01), "unsure", "the judge shows no gain"),
        ((1.0, None), "good", "No independent judge"),
        ((-1.0, None), "bad", "got worse"),
    ],
)
def test_the_verdict_follows_the_judge(
    gains: tuple[float, float | None], tone: str, words: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    recorded_runs.reinforcement(out / "step3_ppo", gains)
    [run] = read_runs([str(out)], DECLARATIONS)
    verdict = judge(run)
    assert verdict.tone == tone
    assert words in " ".join((verdict.headline, *verdict.cautions))


@pytest.mark.parametrize(
    ("sources", "by"),
    [
        ("[learned, my_judge.py:score]", " by the judge that it was trained on."),
        ("['0.5*my_judge.py:score']", " by the judge that it was trained on."),
        ("[learned, '0.0*my_judge.py:score']", "."),
        ("['2*my_judge:score']", " by the judge that it was trained on."),
        ("['python,function=./my_judge.py']", " by the judge that it was trained on."),
        ("[my_judge.py:kindness, 'match,pattern=.*my_judge.py:score']", "."),
    ],
)
def test_a_judge_that_is_also_a_reward_is_not_independent(sources: str, by: str, tmp_path: Path) -> None:
    recorded_runs.reinforcement(tmp_path / "run/step3_ppo", (1.0, 1.0))
    (tmp_path / "run/step3_ppo/config.yaml").write_text(f"reward: {sources}\njudge: my_judge.py:score\n")
    [run] = read_runs([str(tmp_path / "run")], DECLARATIONS)
    assert judge(run).headline == f"The policy got better{by}"
    assert ("(no stage trained on it)" in judge(run).sentence) is (by == ".")


@pytest.mark.parametrize(
    ("spec", "same", "is_same"),
    [
        ("package.judges:kind", "package/judges.py:kind", True),
        ("learned,model=opt-350m,normalize=true", "learned,normalize=true,model=facebook/opt-350m", True),
        ("learned,model=runs/rm", f"learned,model={Path.cwd()}/runs/rm", True),
        ("learned,model=runs/rm", "learned,model=runs/other", False),
        ("learned,model=runs/rm", "learned", False),
        ("length,target=3", "length,target=4", False),
        ("judges.py:kind", "judges.py", False),
    ],
)
def test_a_source_has_several_spellings(spec: str, same: str, is_same: bool) -> None:
    assert (_source(spec) == _source(same)) is is_same


def test_a_stage_whose_input_was_made_again_has_no_verdict(tmp_path: Path) -> None:
    recorded_runs.supervised(tmp_path / "step2_reward", {"eval_accuracy": 0.75})
    recorded_runs.reinforcement(tmp_path / "step3_ppo", (1.0, 1.0))
    inputs = {"reward_model": {"path": str(tmp_path / "step2_reward/critic"), "manifest_sha256": "1st"}}
    recorded_runs.finish(tmp_path / "step3_ppo", inputs=inputs)
    for digest, words in {
        "1st": "The policy got better. By the judge",
        "2nd": "step2_reward: accuracy on held-out pairs 150 % → 75 %. `step3_ppo` is stale: `step2_reward`, ",
    }.items():
        recorded_runs.finish(tmp_path / "step2_reward", sha256=digest)
        [run] = read_runs([str(tmp_path)], DECLARATIONS)
        assert judge(run).sentence.startswith(words)


def test_a_collapse_makes_a_gain_unsure_and_is_said(tmp_path: Path) -> None:
    recorded_runs.reinforcement(tmp_path / "run/step3_ppo", (1.0, 0.5))
    warning = {"kind": "warning", "step": 6, "name": "policy_collapsed", "numbers": {}, "advice": "read samples"}
    with (tmp_path / "run/step3_ppo/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(warning) + "\n")
    [run] = read_runs([str(tmp_path / "run")], DECLARATIONS)
    verdict = judge(run)
    assert (verdict.tone, verdict.cautions[-1]) == ("unsure", "Warning `policy_collapsed` at step 6: read samples.")


def test_the_verdict_on_a_stage_in_words(tmp_path: Path) -> None:
    out = recorded_runs.run(tmp_path / "run", (1.0, -0.5))
    sft, reward, ppo = (stage_verdict(out / each.name, each) for each in DECLARATIONS)
    assert sft == "step1_sft: perplexity of held-out responses 8 → 4."
    assert reward == "step2_reward: accuracy on held-out pairs 75 %; Bradley-Terry loss on held-out pairs 0.5."
    headline, judged, *_, caution = ppo.split("\n\n")
    assert headline == "The policy got worse." and "0.35 → −0.15 on 8 held-out prompts" in judged
    assert caution == "But: The score rose while the judge fell: the policy exploits its reward (over-optimisation)."


def test_the_version_of_the_metrics_is_documented_and_checked(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text(encoding="utf-8")
    assert f"`metrics_version` {METRICS_VERSION}" in page
    out = recorded_runs.run(tmp_path / "run")
    recorded_runs.finish(out / "step3_ppo", metrics_version=METRICS_VERSION)
    read_runs([str(out)], DECLARATIONS)
    recorded_runs.finish(out / "step3_ppo", metrics_version=METRICS_VERSION + 1)
    with pytest.raises(UserError, match=rf"step3_ppo: metrics.jsonl has version {METRICS_VERSION + 1}, expected"):
        read_runs([str(out)], DECLARATIONS)


def test_strangers_texts_are_shown_and_not_run(tmp_path: Path) -> None:
    out = recorded_runs.run(tmp_path / "run <b>", responses=[*recorded_runs.HOSTILE])
    config = out / "step3_ppo/config.yaml"
    config.write_text(config.read_text() + 'reward: ["</pre><script>alert(2)</script>"]\n')
    path = report.write(report.ReportConfig(runs=(str(out),)))
    page = Reader(path.read_text(encoding="utf-8"))  # Reader requires that tags are nested
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not any(tag in ("img", "b", "iframe") for tag, _ in page.tags)
    assert not any(name.startswith("on") or name == "style" for _, attrs in page.tags for name in attrs)
    assert not any(str(attrs.get(name, "#"))[:1] not in "#d" for _, attrs in page.tags for name in ("href", "src"))
    escapes = {recorded_runs.HALF: "\\ud83d", "\u202e": "\\u202e", "\x07": "\\x07", "\x1b": "\\x1b"}
    for text in recorded_runs.HOSTILE:
        assert text.translate(str.maketrans(escapes)) in page.text, text
    [policy] = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_every_kind_of_run_has_a_report(tmp_path: Path) -> None:
    """One stage alone, no evaluation yet, a line cut short, no data.json, no manifest, an empty file of options."""
    recorded_runs.supervised(tmp_path / "one/step1_sft", {"eval_perplexity": 4.0})
    assert "perplexity of held-out responses 8 → 4" in Reader(rendered(tmp_path / "one")).text
    samples = recorded_runs.run(tmp_path / "single") / "step3_ppo/samples.jsonl"
    samples.write_text(samples.read_text().splitlines()[-1] + "\n")
    single = Reader(rendered(tmp_path / "single")).text
    assert "step3_ppo held out one prompt, and a verdict needs two or more: give it more rows." in single
    out = recorded_runs.run(tmp_path / "cut")
    stage = out / "step3_ppo"
    lines = (stage / "metrics.jsonl").read_text().splitlines()
    (stage / "metrics.jsonl").write_text("\n".join([*lines[:2], lines[2][:20]]))
    for name in ("manifest.json", "samples.jsonl"):
        (stage / name).unlink()
    (stage / "config.yaml").write_text("")
    (out / "step2_reward/data.json").write_text("{")
    (out / "step2_reward/heldout_scores.json").write_text("[]")
    text = Reader(rendered(out)).text
    [run] = read_runs([str(out)], DECLARATIONS)
    start = [change for change in changes(run.stages[-1]) if change.result.metric == "eval_score"]
    assert [(each.shown(each.before), each.shown(each.after), each.shown_half_width) for each in start] == [
        ("0.35", UNKNOWN, "")
    ]
    for line in ("step3_ppo has no evaluation after training yet.", "step3_ppo is unfinished: 1 steps are recorded"):
        assert line in text
    with pytest.raises(UserError, match="no stage has recorded metrics there; expected the --output-dir of a run"):
        rendered(tmp_path)


def test_warnings_have_their_meaning_and_cure(tmp_path: Path) -> None:
    out = recorded_runs.run(tmp_path / "run")
    row = {"kind": "warning", "step": 4, "seconds": 1.0, "name": "over_optimisation", "advice": "raise <it>"}
    with (out / "step3_ppo/metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | {"numbers": {"eval_judge": 0.25, "best": None}}) + "\n")
        file.write(json.dumps(row | {"name": "truncated", "numbers": {"truncated": 0.96}}) + "\n")
    page = Reader(rendered(out))
    assert re.sub("`", "", meanings.read_meanings()["over_optimisation"].meaning) in page.text
    assert "When: truncated above the limit" in page.text
    assert "What to do: raise <it>." in page.text and "eval_judge 0.25" in page.text


def test_several_runs_are_drawn_into_the_same_figures(tmp_path: Path) -> None:
    first, second = (recorded_runs.run(tmp_path / name / "out", gains) for name, gains in
                     (("a", (1.0, 0.5)), ("b", (1.0, -0.5))))  # fmt: skip
    page = Reader(rendered(first, second))
    assert [*drawn(first, second)["Judge"]] == ["a/out eval_judge", "b/out eval_judge"]
    assert "a/out" in page.text and "The policy got worse." in page.text and "The policy got better." in page.text


@pytest.mark.parametrize(("iterations", "alone", "against_kl"), [(3, "marks", "marks"), (4, "dotted", "path")])
def test_few_evaluations_are_no_curve(iterations: int, alone: str, against_kl: str, tmp_path: Path) -> None:
    """Of four evaluations (one before training) none is joined to the next; beside a training curve they never are."""
    recorded_runs.reinforcement(tmp_path / "run/step3_ppo", (1.0, 0.5), iterations=iterations)
    runs = read_runs([str(tmp_path / "run")], DECLARATIONS)
    stages, step3 = figures.stages_of(runs, DECLARATIONS[-1]), DECLARATIONS[-1]
    both = (*figures.curves(stages, step3), *figures.frontiers(stages, step3))
    kinds = {f.chart.title: {x.name: x.kind for x in f.chart.series} for f in both}
    assert kinds["Judge"] == {"eval_judge": alone} and kinds["Score"] == {"training": "line", "held out": "marks"}
    assert kinds["Score against KL"] == {"training": "path", "held out": against_kl}


def test_of_many_samples_the_page_has_some_of_each_gain(tmp_path: Path) -> None:
    for n in range(2):
        recorded_runs.reinforcement(tmp_path / f"{n}/step3_ppo", (1.0, 0.5 + n), [f"answer {i}" for i in range(MOST)])
    runs = read_runs([str(tmp_path / str(n)) for n in range(2)], DECLARATIONS)
    assert f"{MOST} of {2 * MOST} are shown" in Reader(render_report(runs, DECLARATIONS)).text
    every = [(n, run.name, stage) for n, run in enumerate(runs) if (stage := run.stage("step3_ppo")) is not None]
    gains = [sample.numbers[0].gain for sample in sample_table(every).samples]
    ends = [[sample.numbers[0].gain for sample in sample_table([one]).samples] for one in every]
    assert gains == sorted(gains, reverse=True) and (gains[0], gains[-1]) == (max(ends[1]), min(ends[0]))


def test_a_histogram_by_hand() -> None:
    chart = histogram("x", "score", [("all", 0, [0.0, 0.0, 24.0])])
    assert chart is not None
    assert {point.x: point.y for point in chart.series[0].points if point.y} == {0.0: 2.0, 23.0: 1.0}


def test_every_metric_that_a_stage_declares_is_on_the_page_of_metrics() -> None:
    headings = re.findall(r"^## (.*)$", meanings.METRICS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for declaration in DECLARATIONS:
        assert declaration.report.section in headings
        listed = meanings.read_meanings(declaration.report.section)
        metrics = {name for curve in declaration.report.curves for name in curve.metrics}
        metrics |= {result.metric for result in declaration.report.results}
        assert metrics <= {*listed}, declaration.name
        assert all(listed[name].meaning for name in metrics)
    assert "sigmoid" in meanings.read_meanings("Step 2, reward model")["loss"].meaning
    assert "likelihood" in meanings.read_meanings("Step 1, fine-tuning")["loss"].meaning


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rlhf = programs.runner("rlhf", cli_main, monkeypatch, capsys)
    out = recorded_runs.run(tmp_path / "run")
    assert rlhf("report", str(out)) == (0, f"{out}/report.html\n", "")
    assert (out / "report.html").is_file()
    assert rlhf("report")[::2] == (
        2,
        "error: rlhf report: no run is named; expected the --output-dir of one or more runs\n",
    )
    code, _, message = rlhf("report", str(tmp_path / "none"))
    assert code == 2 and message.startswith(f"error: {tmp_path}/none: no stage has recorded metrics there")


def test_a_run_that_is_going_has_a_report_after_each_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "POLL_S", 0.01)
    out = recorded_runs.run(tmp_path / "out")
    metrics, page = out / "step3_ppo/metrics.jsonl", out / report.REPORT
    rows = metrics.read_text().splitlines()
    metrics.write_text("\n".join(rows[:-2]) + "\n")

    def wait_for(text: str) -> None:
        end = time.monotonic() + 60
        while not (page.exists() and text in page.read_text()):
            assert time.monotonic() < end
            time.sleep(0.01)

    with report.written_while_going(str(out)), metrics.open("a") as file:
        print(rows[-2], file=file, flush=True)
        time.sleep(0.2)
        assert rows_of(out / "step3_ppo")[-1]["kind"] == "train" and not page.exists()
        print(rows[-1], file=file, flush=True)
        wait_for("after iteration 6 of step3_ppo")
        assert '<meta http-equiv="refresh" content="60">' in page.read_text()
    assert "The policy got better." in report.write_at_end(str(out)) and "refresh" not in page.read_text()


def test_a_report_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = recorded_runs.run(tmp_path / "run")
    _, verdict, path = report.write_at_end(str(out)).split("\n")
    assert verdict.startswith("The policy got better. By the judge `my_judge.py:score` (no stage trained on it): ")
    assert path == f"report: {out}/report.html"
    (out / "step3_ppo/metrics.jsonl").write_text('{"kind": "train", "step": "three", "seconds": 0, "score": 1}\n')
    [warning] = report.write_at_end(str(out)).split("\n")
    assert warning.startswith(f"warning: {out}: no report can be made of the files there (ValueError: ")


FOREIGN: dict[str, str] = {
    "step3_ppo/metrics.jsonl": '{"kind": "train", "step": [1], "seconds": "x", "score": 1}\n',
    "step1_sft/metrics.jsonl": '{"kind": "eval", "step": {}, "eval_perplexity": 3}\n',
    "step3_ppo/manifest.json": '{"inputs": [1], "hardware": 3, "models": 4}',
    "step1_sft/manifest.json": "[" * 100_000 + "]" * 100_000,
    "step2_reward/heldout_scores.json": '{"chosen": 1}',
    "step3_ppo/samples.jsonl": '{"iteration": 1, "prompt": 3}\n',
    "step3_ppo/config.yaml": "reward: 7\njudge: [x]\n",
    "step2_reward/data.json": '{"step2_reward": [1]}',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_directory_of_a_stranger_is_a_report_or_one_line(name: str, tmp_path: Path) -> None:
    out = recorded_runs.run(tmp_path / "run")
    (out / name).write_text(FOREIGN[name])
    try:
        report.write(report.ReportConfig(runs=(str(out),)))
    except UserError as error:
        assert str(out) in str(error) and "\n" not in str(error)

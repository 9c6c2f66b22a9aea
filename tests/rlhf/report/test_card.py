"""Model cards: what the hub reads of them, strangers' texts in them, and where base model and licences come from."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from huggingface_hub import ModelCard, constants
from huggingface_hub.repocard_data import EvalResult
from markdown_it import MarkdownIt

from rlhf.chain.stages import STAGES
from rlhf.hub import cards
from rlhf.report.card import data_name, plain, published, write_card
from rlhf.report.records import read_stage
from rlhf.text.dialogues import Template
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.training.run import Run
from rlhf.types import Message
from step1_sft.config import SFTConfig
from tests.support import recorded_runs, texts

HUB_ID = "owner/base-1b"


def snapshot(home: Path, kind: str, name: str, card: str) -> Path:
    """A repository in the hub's cache, with nothing but its card."""
    folder = home / f"{kind}s--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("a" * 40)
    content = folder / "snapshots" / ("a" * 40)
    content.mkdir(parents=True)
    (content / "README.md").write_text(card)
    return content


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    return tmp_path / "home"


def card_of(run: Path, step: int, inputs: dict[str, str], folder: str = "", **options: Any) -> ModelCard:
    declaration = STAGES[step]
    model = run / declaration.name / (folder or declaration.models[0])
    model.mkdir(parents=True)
    stage = read_stage(run / declaration.name, declaration)
    write_card(model, stage, folder or declaration.models[0], inputs, options)
    return ModelCard.load(model / "README.md")


def html(card: ModelCard) -> str:
    return str(MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text))


def recorded(card: ModelCard) -> dict[str, float]:
    results: list[EvalResult] = card.data.eval_results or []
    return {f"eval_{result.metric_type}": result.metric_value for result in results}


@pytest.mark.parametrize("step", STAGES)
def test_the_metadata_and_the_numbers_are_those_of_the_run(step: int, tmp_path: Path, home: Path) -> None:
    snapshot(home, "model", HUB_ID, "---\nlicense: apache-2.0\n---\n# Base")
    run = recorded_runs.run(tmp_path / "run")
    card = card_of(run, step, dict.fromkeys(("model", "actor_model", "reward_model"), HUB_ID), learning_rate=0.25)
    assert (card.data.base_model, card.data.license) == (HUB_ID, "apache-2.0")
    assert card.data.pipeline_tag == ("text-classification" if step == 2 else "text-generation")
    directory = run / STAGES[step].name
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "eval"][-1]
    numbers = recorded(card)
    assert numbers and numbers == {name: last[name] for name in numbers}
    expected = {result.metric for result in STAGES[step].report.results} & last.keys()
    assert numbers.keys() == expected
    assert "learning_rate: 0.25" in card.text and "![" in card.text
    drawing = ElementTree.parse(directory / STAGES[step].models[0] / "training.svg").getroot()
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg" and drawing.find(".//{*}path[@class]") is not None
    assert "var(" not in (directory / STAGES[step].models[0] / "training.svg").read_text()


def test_the_intervals_are_those_of_the_report(tmp_path: Path) -> None:
    """A gain of 1 for the score and 0.5 for the judge, whose differences alternate by 0.1: of 8 values the interval is
    2.3646 x 0.1 x sqrt(8 / 7) / sqrt(8)."""
    run = recorded_runs.run(tmp_path / "run")
    (run / "step3_ppo/config.yaml").write_text("judge: /srv/me/judge.py:score\n")
    text = html(card_of(run, 3, {"actor_model": HUB_ID}))
    assert "(judge.py:score)" in text and "/srv" not in text
    assert "+1.000 ± 0.089" in text and "+0.500 ± 0.089" in text


@pytest.mark.parametrize(
    ("objective", "is_logistic"), [("pairwise", True), ("every_token,token_coef=1", True), ("hinge.py,gap=2", False)]
)
def test_the_card_says_of_the_loss_what_the_run_had(objective: str, is_logistic: bool, tmp_path: Path) -> None:
    run = recorded_runs.run(tmp_path / "run")
    config = run / "step2_reward/config.yaml"
    config.write_text(config.read_text().replace("pairwise", objective))
    text = card_of(run, 2, {"model": HUB_ID}).text
    assert ("that of Bradley and Terry" in text) == ("sigmoid" in text) == is_logistic and "the higher score" in text


def test_a_model_without_an_evaluation_has_no_results(tmp_path: Path) -> None:
    run = recorded_runs.run(tmp_path / "run")
    inputs = {"actor_model": HUB_ID, "critic_model": "other/critic"}
    critic = card_of(run, 3, inputs, "critic")
    assert not recorded(critic) and critic.data.base_model == "other/critic"
    export = card_of(run, 3, inputs, "exports/step-00000002")
    assert not recorded(export) and export.data.pipeline_tag == "text-generation"


MARKUP = (
    "a|b", "`x`", "[x](javascript:alert(1))", "![x](y)", "a\n# b", "<!-- ", "**b**", "--- \nlicense: mit\n---",
    "{{ 7 * 7 }}", "https://x.y",
)  # fmt: skip


@pytest.mark.parametrize("text", [*recorded_runs.HOSTILE, *MARKUP])
def test_texts_of_strangers_are_shown_as_they_are(text: str, tmp_path: Path) -> None:
    """In a name of data, in the name of a local model and in an option."""
    run = recorded_runs.run(tmp_path / "run")
    clean = html(card_of(run, 1, {"model": "plain"}, "clean", value="plain"))
    data = {"sources": [{"data_path": text, "rows": 1, "hub_id": None}], "train": {"rows": 1}}
    (run / "step1_sft/data.json").write_text(json.dumps(data))
    card = card_of(run, 1, {"model": text}, "hostile", value=text)
    tags = [re.findall(r"<(/?\w+)", page) for page in (html(card), clean)]
    assert tags[0] == tags[1]
    assert card.data.license is None and card.data.base_model is None
    assert plain("<a|b>") == "&lt;a\\|b&gt;"


def test_paths_and_secrets_are_not_published() -> None:
    options = {
        "output_dir": "/srv/me/runs", "model": "/srv/me/models/base", "data_path": ["hh:~/x/a.jsonl=0.5", "own/data"],
        "actor": {"chat_template": "../t.jinja"}, "reward": ["hf_" + "a" * 30],
    }  # fmt: skip
    assert published(options) == {
        "model": "base", "data_path": ["hh:a.jsonl=0.5", "own/data"], "actor": {"chat_template": "t.jinja"},
        "reward": ["***"],
    }  # fmt: skip
    assert data_name("0.5*/srv/me/judge.py:score, ~/x/b.py:c") == "0.5*judge.py:score, b.py:c"
    assert data_name("files,split=train:/data/x y/b.jsonl") == "files,split=train:b.jsonl"
    assert data_name("/data/u/with,comma/x.jsonl") == "x.jsonl"
    assert data_name("0.5*openai,base_url=http://10.0.0.7:80/v1,model=m") == "0.5*openai,base_url=...,model=m"
    assert data_name("learned,model=/data/u/m,normalize=true") == "learned,model=m,normalize=true"
    assert data_name('learned,model="/data/u/lr=1,b/m"') == 'learned,model="m"'


def test_the_base_of_a_model(tmp_path: Path, home: Path) -> None:
    """Of a hub id, of its directory in the cache, and of a model of this project; another directory has no hub id."""
    cached = snapshot(home, "model", HUB_ID, "---\nlicense: mit\n---\n")
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    for folder, tags in ((own, [cards.TAG]), (foreign, [])):
        folder.mkdir()
        metadata = yaml.safe_dump({"base_model": HUB_ID, "license": "mit", "tags": tags, "datasets": ["a/b"]})
        (folder / "README.md").write_text(f"---\n{metadata}---\n")
    for path in (HUB_ID, str(cached)):
        assert cards.base_model(path) == cards.BaseModel(HUB_ID, HUB_ID, "mit")
    assert cards.base_model(str(own)) == cards.BaseModel(HUB_ID, HUB_ID, "mit", ("a/b",))
    assert cards.base_model(str(foreign)) == cards.BaseModel("foreign", None, "mit")
    assert cards.base_model("gpt2") == cards.BaseModel("openai-community/gpt2", "openai-community/gpt2", None)
    for broken in ("---\n: : {\n---\n", "---\n[1]\n---\n", "---\nlicense: [mit, x]\n---\n", "\0", ""):
        (foreign / "README.md").write_text(broken)
        assert cards.base_model(str(foreign)) == cards.BaseModel("foreign", None, None)


def test_the_base_is_the_model_that_the_chain_started_from(tmp_path: Path) -> None:
    """A local model without a card, through three stages."""
    run, path = recorded_runs.run(tmp_path / "run"), str(tmp_path / "my-llama")
    Path(path).mkdir()
    for step, option in ((1, "model"), (2, "model"), (3, "actor_model")):
        card = card_of(run, step, {option: path})
        assert "Made from my-llama, a local model" in card.text and card.data.base_model is None
        path = str(run / STAGES[step].name / STAGES[step].models[0])


@pytest.mark.parametrize("template", ["human_assistant", "llama_2", "alpaca", "chatml"])
def test_the_code_of_a_reward_model_reads_the_ids_that_it_has_learned(template: str, tmp_path: Path) -> None:
    """The code of the card as printed, with a tokenizer and a model that only show what they get."""
    own = prepare_tokenizer(texts.with_chat_tokens(texts.byte_tokenizer()), template)
    code = re.search(r"```python\n.*?(dialogue = .*?)print", card_of(
        recorded_runs.run(tmp_path / "run"), 2, {"model": HUB_ID}).text, re.DOTALL)  # fmt: skip
    assert code is not None
    names: dict[str, Any] = {"tokenizer": own}
    exec(code[1], names)
    question, response = (Message(**message) for message in names["dialogue"])
    reader = Template(own)
    expected = [*reader.prompt_ids([question]), *reader.response_ids(response.content)[:-1], *reader.ending]
    assert names["inputs"]["input_ids"].tolist() == [expected] and own.eos_token_id in reader.ending


def test_a_model_is_saved_without_a_card_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here no input of the stage is the base. Hours of training are not lost for it."""
    stage: Any = SimpleNamespace(options=SFTConfig(), directory=tmp_path, _declaration=STAGES[1], _inputs={})
    Run._write_card(stage, tmp_path, "model")
    assert f"warning: {tmp_path}/model: no model card (KeyError: 'model')" in capsys.readouterr().out
    assert not (tmp_path / "README.md").exists()

"""What every source of rows keeps to. A new file in data/sources gets its tests by a line in EXAMPLES."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from data.config import DataOptions
from data.dataset import PHASES, group_of, open_datasets, share_of
from data.mixture import open_sources
from data.reading import Phase, Source
from data.sources.demo import words
from rlhf.config import Config, UserError
from rlhf.plugins import find, names
from rlhf.text import Template, load_tokenizer, prepare_tokenizer
from rlhf.types import Message, Row

FOLDER = "data.sources"
DEMO_MODEL = str(Path(__file__).parents[2] / "configs/models/demo-llama.yaml")
COUNT = 60


@dataclass(frozen=True)
class Example:
    """How to make a place for a source, in a folder: some COUNT rows as its dataset writes them."""

    write: Callable[[Path], str]
    options: str = ""
    phases: tuple[Phase, ...] = PHASES
    broken: tuple[tuple[str, bytes, str], ...] = ()
    """(file, content, what the error says): a file of one malformed row, read as `NAME:file`"""


def hh_rlhf(folder: Path) -> str:
    before = "\n\nHuman: What grows in garden {}?\n\nAssistant: Peas.\n\nHuman: And else?\n\nAssistant:"
    rows = [{"chosen": before.format(i) + " Beans, too.", "rejected": before.format(i) + " No."} for i in range(COUNT)]
    (folder / "train.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return str(folder)


def rt_polarity(folder: Path) -> str:
    for side, judgement in (("pos", "warm"), ("neg", "cold")):
        lines = [f"film {i} , by {judgement} people , is {judgement} ." for i in range(COUNT)]
        (folder / f"rt-polarity.{side}").write_text("\n".join(lines))
    return str(folder)


def files(folder: Path) -> str:
    rows = [{"prompt": f"What is {i} and 1?", "chosen": f"{i + 1}", "rejected": f"{i}", "sum": i} for i in range(COUNT)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "sums.jsonl")


EXAMPLES = {
    "demo": Example(lambda folder: "", options=",rows=200"),
    "files": Example(
        files,
        broken=(
            ("x.jsonl", b'{"prompt": 3, "response": "x"}', r"x.jsonl:1: prompt: got 3, expected text"),
            ("x.csv", b"question\nwhy\n", r"x.csv:2: got the columns question; expected one of: "),
        ),
    ),
    "hh_rlhf": Example(
        hh_rlhf,
        broken=(
            ("x.jsonl", b'{"chosen": "x"}', r"x.jsonl:1: chosen: got text that begins 'x'"),
            ("x.jsonl", b'{"rejected": "x"}', r"x.jsonl:1: no column 'chosen'; have rejected"),
            ("x.jsonl", b'{"chosen": "\\n\\nHuman: x\\n\\nAssistant: y"}', r"x.jsonl:1: no column 'rejected'"),
            ("x.jsonl", b'{"chosen": null, "rejected": null}', r"x.jsonl:1: chosen: got null, expected text"),
        ),
    ),
    "rt_polarity": Example(rt_polarity),
}


@pytest.fixture(params=sorted(EXAMPLES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def location(name: str, tmp_path: Path) -> str:
    return f"{name}{EXAMPLES[name].options}:{EXAMPLES[name].write(tmp_path)}"


def all_rows(source: Source) -> Iterator[tuple[Phase, Row]]:
    return ((phase, row) for phase in PHASES for row in source.rows(phase))


def test_every_source_has_an_example() -> None:
    assert sorted(EXAMPLES) == names(FOLDER), "add the new source to EXAMPLES"


def test_it_has_a_config_and_says_what_it_reads(name: str) -> None:
    module = find(FOLDER, name)
    assert issubclass(module.Config, Config)
    assert module.Config() == module.Config()
    assert module.__doc__


def test_schema(name: str, location: str) -> None:
    counts = dict.fromkeys(PHASES, 0)
    for phase, row in all_rows(open_sources([location])):
        assert isinstance(row, Row)
        assert isinstance(row.prompt, tuple)
        for message in row.prompt:
            assert isinstance(message, Message)
            assert message.role in ("system", "user", "assistant")
            assert isinstance(message.content, str)
        assert not row.prompt or row.prompt[-1].role == "user"
        assert isinstance(row.group, str)
        assert isinstance(row.columns, dict)
        assert row.response is None or isinstance(row.response, str)
        assert row.rejected is None or isinstance(row.response, str)
        usable = {"sft": row.response, "reward": row.rejected, "ppo": any(m.content for m in row.prompt)}
        counts[phase] += bool(usable[phase])
        assert phase != "reward" or row.response != row.rejected
    for phase in EXAMPLES[name].phases:
        assert counts[phase] >= COUNT


def test_rows_are_the_same_every_time(location: str) -> None:
    source = open_sources([location])
    first = list(all_rows(source))
    assert list(all_rows(source)) == first
    assert list(all_rows(open_sources([location]))) == first


def test_no_prompt_and_no_group_is_in_two_splits(location: str) -> None:
    for seed in range(3):
        options = DataOptions(data_path=(location,), data_seed=seed)
        shares: dict[str, set[str]] = {}
        for _, row in all_rows(open_sources([location])):
            prompt = " ".join(message.content for message in row.prompt)
            for text in (f"prompt {prompt}" if prompt else "", f"group {group_of(row)}", f"response {row.response}"):
                # One response may answer many prompts; where it stands alone it is what must not be seen before.
                if text and (prompt or not text.startswith("prompt")) and not (prompt and text.startswith("response")):
                    shares.setdefault(text, set()).add(share_of(row, options))
        assert all(len(found) == 1 for found in shares.values())


def test_every_phase_opens(name: str, location: str, tmp_path: Path) -> None:
    texts = [text for _, row in all_rows(open_sources([location])) for text in (row.response or "", row.rejected or "")]
    known = sorted({word for text in texts for word in text.split()})
    (tmp_path / "model.yaml").write_text(json.dumps({"tokenizer": {"words": known}}))
    tokenizer = prepare_tokenizer(load_tokenizer(str(tmp_path / "model.yaml")), "plain")
    for phase in EXAMPLES[name].phases:
        train, evaluation = open_datasets(DataOptions(data_path=(location,), eval_fraction=0.3), phase, tokenizer)
        assert len(train) > 0
        assert len(evaluation) > 0


@pytest.mark.parametrize(
    ("source", "file", "content", "said"),
    [(n, *broken) for n, example in EXAMPLES.items() for broken in example.broken],
)
def test_malformed_rows_name_their_line(tmp_path: Path, source: str, file: str, content: bytes, said: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        list(open_sources([f"{source}:{tmp_path / file}"]).rows("reward"))
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["absent/folder/x.jsonl", "./absent", "no-such-owner/no-such-name"])
def test_a_missing_place_is_told_fast(name: str, place: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        list(open_sources([f"{name}:{place}"]).rows("sft"))
    assert place in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - start < 15


def test_the_demo_model_knows_every_word_of_the_demo() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    assert tokenizer.unk_token_id not in tokenizer.encode(" ".join(words()))
    known = set(words())
    for _, row in all_rows(open_sources(["demo,rows=1000"])):
        for text in (row.prompt[0].content, row.response or "", row.rejected or ""):
            assert known.issuperset(text.split())
            assert tokenizer.decode(tokenizer.encode(text)) == text
    for name in ("auto", "plain"):  # the words of the templates' frames too
        template = Template(prepare_tokenizer(tokenizer, name))
        ids = template.prompt_ids((Message("user", "tell me"),)) + template.response_ids("the fox")
        assert tokenizer.unk_token_id not in ids

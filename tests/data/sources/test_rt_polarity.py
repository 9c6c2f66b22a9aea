"""Review sentences: ordinary English out of tokenised text, and pairs that keep together."""

import gzip
import hashlib
from pathlib import Path

import pytest

from data.prepare.mixture import open_origin
from data.read.records import Skipped
from data.sources.rt_polarity import Config, detokenize
from rlhf.errors import UserError
from rlhf.types import Message, Row

SHARED = Path(__file__).parents[4] / "shared/data/rt-polarity"


@pytest.mark.parametrize(
    ("tokenised", "english"),
    [
        ("simple , silly and short .", "simple, silly and short."),
        ("a long film . . . too long ?", "a long film... too long?"),
        (". . . but who 's counting ; i do n't !", "... but who's counting; i don't!"),
        ('the film " up " is not " down , " it\'s up .', 'the film "up" is not "down," it\'s up.'),
        ("a plot ( or two ) and [ more ] : fine", "a plot (or two) and [more]: fine"),
        ("bland -- as visually bland as  paint", "bland -- as visually bland as paint"),
        ('an odd " quote', 'an odd "quote'),
        ("'the end' of the '60s", "'the end' of the '60s"),
    ],
)
def test_detokenize(tokenised: str, english: str) -> None:
    assert detokenize(tokenised) == english


def reviews(folder: Path, positive: str, negative: str) -> str:
    (folder / "rt-polarity.pos").write_bytes(positive.encode("latin-1"))
    (folder / "rt-polarity.neg.gz").write_bytes(gzip.compress(negative.encode()))
    return f"rt_polarity,prompt_words=2:{folder}"


def test_rows_by_hand(tmp_path: Path) -> None:
    path = reviews(tmp_path, "a naïve joy .\na naïve joy .\nsheer fun\n", "so very dull .\n\nweak\nspare\n")
    source = open_origin(path)
    left_out = [Skipped("repeated sentence"), Skipped("no sentence of the other kind left for it")]
    every = list(source.rows("reward"))
    assert every[:2] == left_out
    reward = [row for row in every if isinstance(row, Row)]
    assert [(row.prompt, row.response, row.rejected) for row in reward] == [
        ((), "a naïve joy.", "so very dull."),
        ((), "sheer fun", "weak"),
    ]
    sft = [row for row in source.rows("sft") if isinstance(row, Row)]
    prompts = [(Message("user", text),) for text in ("a naïve", "so very", "sheer fun", "weak")]
    assert [(row.prompt, row.response) for row in sft] == list(zip(prompts, [" joy.", " dull.", "", ""], strict=True))
    assert [row.columns for row in sft] == [{"label": 1}, {"label": 0}] * 2
    assert [row.group for row in sft] == [row.group for row in reward for _ in range(2)]
    assert list(source.rows("ppo")) == left_out + [Row(r.prompt, None, None, r.group, r.columns) for r in sft]


def test_pairs_that_share_a_prompt_share_a_group(tmp_path: Path) -> None:
    path = reviews(tmp_path, "one is x\ntwo is x\nthree is x\nfour is x\n", "a b c\ntwo is y\na b d\nlast one is\n")
    groups = [row.group for row in open_origin(path).rows("reward")]
    assert groups[0] == groups[2]  # by 'a b'
    assert len(set(groups)) == 3


def test_the_digest_of_the_files_is_that_of_earlier_runs(tmp_path: Path) -> None:
    """A run of before would be one of other data if it changed."""
    source = open_origin(reviews(tmp_path, "good\n", "bad\n")).source
    contents = (path.read_bytes() for path in (tmp_path / "rt-polarity.pos", tmp_path / "rt-polarity.neg.gz"))
    digest = hashlib.sha256(repr(("reward", Config(prompt_words=2))).encode())
    digest.update(b"".join(hashlib.sha256(content).digest() for content in contents))
    assert source.fingerprint is not None and source.fingerprint("reward") == digest.hexdigest()


def test_a_table_of_sentences_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good .", "label": 1}\n{"text": "bad !", "label": 0}\n{"text": "so so", "label": 2}\n')
    skipped, row = open_origin(f"rt_polarity:{path}").rows("reward")
    assert row == Row((), "good.", "bad!", "bad!")
    assert skipped == Skipped(f"{path}:3: label: got 2, expected 0 or 1", bad=True)


def test_a_directory_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no rt-polarity.pos or rt-polarity.pos.gz there"):
        open_origin(f"rt_polarity:{tmp_path}")


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data is not here")
def test_real_sentences() -> None:
    rows = list(open_origin(f"rt_polarity:{SHARED}").rows("sft"))
    assert len(rows) == 2 * 5331
    assert sum(" ," in (row.response or "") or " ." in (row.response or "") for row in rows) < 20
    assert max(len(row.prompt[0].content.split()) for row in rows) == 4

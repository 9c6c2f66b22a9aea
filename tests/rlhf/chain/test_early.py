"""What is refused before torch is imported, in words that later checks have too, and what is left to these."""

import subprocess
import sys
from pathlib import Path

import pytest

from data.config import SUFFIXES
from data.read.formats import FORMATS
from rlhf.chain import early
from rlhf.chain.options import read
from rlhf.config import parser
from rlhf.errors import UserError
from tests.golden.test_errors import table

PLAIN = {
    **{typed.partition(" ")[2]: line for typed, line in table() if typed in (
        "run-train --actor-model /no/model", "run-train --data-path no.jsonl", "train --dtype bf61",
        "train --ppo.learning-rat 1", "train --sft.lr 1e-3", "train --ppo.kl_coef x", "train --zero-stage 4",
        "train --steps 4", "train --max-length 0", "train --ppo.gamma", "train stray", "train --seed 2 3",
    )},
    "--data-path files:no.jsonl": "step1_sft: no.jsonl: no such file or directory; expected .json, ",
    "--data-path demo no.csv.gz=0.5": "step1_sft: no.csv.gz: no such file or directory; expected .json, ",
    "--steps 2 --eval-data-path ./no.parquet": "step2_reward: ./no.parquet: no such file or directory; expected ",
    "--steps 2 --reward-model ../no": "step2_reward: ../no: no such directory; expected a model directory",
    "--ppo.algorithm grpo --ppo.scale-reward": "no option '--ppo.scale-reward' (did you mean '--ppo.scale-rewards'?)",
}  # fmt: skip
"""words, and how the answer begins"""
LEFT = (
    "", "--data-path demo,rows=400", "--data-path here.jsonl", "--data-path here.jsonl=0.5", "--data-path no*.jsonl",
    "--data-path https://host/no.jsonl", "--data-path owner/no", "--data-path hh_rlhf:no.jsonl",
    "--data-path my.py:no.txt",
    "--data-path here.jsonl=2.jsonl", "--data-path odd.csv=2",
    "--actor-model ./here", "--actor-model opt-125m", "--actor-model /no/model.yaml",
    "--plan --data-path no.jsonl", "--output-dir old --data-path no.jsonl", "--steps 3 --ppo.actor-model ./no",
    "--ppo.actor-model ./here --actor-model ./no", "--ppo.algorithm my.py --zzz 1", "--ppo.algorithm pppo",
    "--ppo.gamma x --dtype bf61", "--ppo.no-whiten-advantages", "--ppo.whiten-advantages false", "--ppo.lam 0.9",
    "--ppo.algorithm rloo --ppo.num-generations 2 --config demo.yaml", "--config wrong.yaml",
    "--ppo.batch-size 6 --ppo.num-generations 4",
)  # fmt: skip
"""what may be right, or is not plain"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "old/step1_sft"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("here.jsonl", "here.jsonl=2.jsonl", "odd.csv=2"):
        (tmp_path / name).touch()
    (tmp_path / "demo.yaml").write_text("ppo: {cliprange_value: 0.3, kl_coef: 0.1}")
    (tmp_path / "wrong.yaml").write_text("dtype: bf61")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", LEFT)
def test_the_rest_is_left_to_later_checks(words: str, here: None) -> None:
    early.refuse_plain_mistakes(words.split(), parser.NO_OVERLAY)


@pytest.mark.parametrize("words", [typed.partition(" ")[2] for typed, _ in table() if typed.startswith("train ")])
def test_a_mistake_has_the_same_words_as_later(words: str) -> None:
    try:
        early.refuse_plain_mistakes(words.split(), parser.NO_OVERLAY)
    except UserError as plain:
        with pytest.raises(UserError) as later:
            read(words.split())
        assert str(plain) == str(later.value)


def test_a_plain_mistake_is_answered_without_torch(tmp_path: Path) -> None:
    """All of them in one process, in which torch cannot be imported."""
    program = """
import sys
sys.modules["torch"] = None
from rlhf.chain import early
from rlhf.config import parser
from rlhf.errors import UserError
for words in sys.argv[1:]:
    try:
        early.refuse_plain_mistakes(words.split(), parser.NO_OVERLAY)
        print("nothing")
    except UserError as error:
        print(error)
"""
    root = str(Path(early.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, *PLAIN], cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    answers = done.stdout.splitlines()
    assert len(answers) == len(PLAIN) > 15, done.stderr
    for (words, expected), line in zip(PLAIN.items(), answers, strict=True):
        assert line.startswith(expected), words


def test_the_files_that_are_known_are_those_that_are_read() -> None:
    assert tuple(FORMATS) == SUFFIXES

"""What is refused before torch is imported, and what is left to later checks."""

import subprocess
import sys
from pathlib import Path

import pytest

from data.config import SUFFIXES
from data.read.formats import FORMATS
from rlhf.chain import alone, command, early
from rlhf.chain.options import read
from step1_sft.config import SFTConfig
from tests.golden.test_errors import table

PLAIN = {
    **{typed.partition(" ")[2]: line for typed, line in table() if typed in (
        "run-train --actor-model /no/model", "run-train --data-path no.jsonl", "train --dtype bf61",
        "train --ppo.learning-rat 1", "train --sft.lr 1e-3", "train --ppo.kl_coef x", "train --zero-stage 4",
        "train --steps 4", "train --max-length 0", "train --ppo.gamma", "train stray", "train --seed 2 3",
    )},
    "--ppo.gamma x": "--ppo.gamma: ",
    "--ppo.algorithm pppo": "no 'pppo' in step3_ppo.algorithms; have a2c, best_of_n, grpo, ppo, reinforce, ",
    "--ppo.reward length 2*vadr": "no 'vadr' in rlhf.rewards; have classifier, learned, length, match, openai, ",
    "--ppo.judge lenth,target=3": "no 'lenth' in rlhf.rewards; have ",
    "--reward.objective pairwize": "no 'pairwize' in step2_reward.objectives; have every_token, pairwise (",
    "--adapter lora --data-path no.jsonl": "step1_sft: no.jsonl: no such file or directory",
    "--data-path files:no.jsonl": "step1_sft: no.jsonl: no such file or directory",
    "--data-path demo no.csv.gz=0.5": "step1_sft: no.csv.gz: no such file or directory",
    "--steps 2 --eval-data-path ./no.parquet": "step2_reward: ./no.parquet: no such file or directory",
    "--steps 3 --ppo.actor-model ./no": "step3_ppo: ./no: no such directory; expected a model directory",
    "--steps 2 --reward-model ../no": "step2_reward: ../no: no such directory; expected a model directory",
    "--ppo.algorithm grpo --ppo.scale-reward": "no option '--ppo.scale-reward' (did you mean '--ppo.scale-rewards'?)",
}  # fmt: skip
"""words of a chain, and how the answer begins"""
ALONE = {
    ("step3_ppo", "--ppo typo"): "no option '--ppo' (did you mean '--num-ppo-epochs' or ",
    ("step3_ppo", "--ppo.algorithm pppo"): "no option '--ppo.algorithm' (did you mean '--algorithm'?)",
    ("step3_ppo", "--algorithm rlo"): "no 'rlo' in step3_ppo.algorithms; have ",
    ("step3_ppo", "--algorithm rloo --kl-coeff 1"): "no option '--kl-coeff' (did you mean '--kl-coef'?)",
    ("step3_ppo", "--reward vadr"): "no 'vadr' in rlhf.rewards; have ",
    ("step3_ppo", "--actor-model ./no"): "./no: no such directory; expected a model directory",
    ("step2_reward", "--objective pairwize"): "no 'pairwize' in step2_reward.objectives; have ",
    ("step1_sft", "--lerning-rate 1"): "no option '--lerning-rate' (did you mean '--learning-rate'?)",
    ("step1_sft", "--model ./no"): "./no: no such directory; expected a model directory",
}
"""(stage, words), and how the answer begins"""
LEFT = (
    "", "--data-path demo,rows=400", "--data-path here.jsonl", "--data-path here.jsonl=0.5", "--data-path no*.jsonl",
    "--data-path https://host/no.jsonl", "--data-path owner/no", "--data-path hh_rlhf:no.jsonl",
    "--data-path my.py:no.txt",
    "--data-path here.jsonl=2.jsonl", "--data-path odd.csv=2",
    "--actor-model ./here", "--actor-model opt-125m", "--actor-model /no/model.yaml",
    "--plan --data-path no.jsonl", "--output-dir old --data-path no.jsonl",
    "--ppo.actor-model ./here --actor-model ./no",
    "--ppo.reward my.py 0.5*my.py:score module:score ./folder length,target=9",
    "--ppo.judge openai,base_url=http://x,model=y",
    "--reward.objective my_objective.py,gap=2",
)  # fmt: skip
"""what may be right"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "old/step1_sft"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("here.jsonl", "here.jsonl=2.jsonl", "odd.csv=2"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", LEFT)
def test_the_rest_is_left_to_later_checks(words: str, here: None) -> None:
    early.refuse_plain_mistakes(read(words.split()))


def test_what_is_shown_is_not_looked_for(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data-path", "no.jsonl", "--print-config"]
    assert command.read_command(words, "") is None
    with pytest.raises(SystemExit):
        alone.read_command(1, lambda _: SFTConfig, words, "")
    assert capsys.readouterr().out.count("no.jsonl") == 5


def test_a_plain_mistake_is_answered_without_torch(tmp_path: Path) -> None:
    """All of them in one process, in which torch cannot be imported."""
    program = """
import sys
sys.modules["torch"] = None
from importlib import import_module
from rlhf import errors
from train import main
for line in sys.argv[1:]:
    stage, *words = line.split()
    run = main if stage == "train" else import_module(f"{stage}.__main__").main
    try:
        run(words)
        print("nothing")
    except errors.UserError as error:
        print(error)
"""
    expected = {f"train {words}": line for words, line in PLAIN.items()}
    expected |= {f"{stage} {words}": line for (stage, words), line in ALONE.items()}
    root = str(Path(early.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, *expected], cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    answers = done.stdout.splitlines()
    assert len(answers) == len(expected) > 30, done.stderr
    for (words, beginning), line in zip(expected.items(), answers, strict=True):
        assert line.startswith(beginning), words


def test_the_files_that_are_known_are_those_that_are_read() -> None:
    assert tuple(FORMATS) == SUFFIXES

"""What users read of a mistake, word by word: errors.txt has what is typed, and under it the line that answers it.

`python -m tests.golden.test_errors` writes the answers anew; the difference in git is the review.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rlhf import adapters, generation, rewards
from rlhf.chain.options import read
from rlhf.errors import UserError
from rlhf.evaluation import evaluate, pairs
from rlhf.text.prompt_file import read_prompts
from rlhf.text.templates import find_template
from tests.support import tiny

FILE = Path(__file__).with_name("errors.txt")


def _wrap(typed: str) -> object:
    family, _, spec = typed.partition(" ")
    return adapters.wrap(tiny.causal_lm(family), spec)


def _prompt(typed: str) -> object:
    """The line is the second one of a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "p.jsonl"
        file.write_bytes(b'{"prompt": "good"}\n' + typed.encode("latin-1"))
        try:
            return read_prompts(str(file))
        except UserError as error:
            raise UserError(str(error).replace(f"{folder}/", "")) from None


def _rewards(typed: str) -> object:
    return rewards.open_sources(typed.split(), rewards.Context(None, torch.device("cpu"), torch.float32, "", 1))  # type: ignore[arg-type]


def _program(main: Callable[[Sequence[str]], int], typed: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as output:
        code = main(typed.split())
    if code == 2:
        raise UserError(output.getvalue().removesuffix("\n"))


KINDS: Mapping[str, Callable[[str], object]] = {
    "--adapter": _wrap,
    "--ppo.reward": _rewards,
    "--rollout-backend": lambda typed: generation.open_backend(typed, eos_token_id=2, pad_token_id=0),
    "--chat-template": lambda typed: find_template(typed, None),
    "train": lambda typed: read(typed.split()),
    "evaluate": lambda typed: _program(evaluate.main, typed),
    "pairs": lambda typed: _program(pairs.main, typed),
    "--prompts": _prompt,
}
"""by the option or program; a model type stands before an adapter, and --prompts has a line of the file"""


def table() -> list[tuple[str, str]]:
    """(what is typed, the answer) of each row."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return list(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


def answer(typed: str) -> str:
    kind, _, rest = typed.partition(" ")
    try:
        KINDS[kind](rest)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("typed", "expected"), table(), ids=[typed for typed, _ in table()])
def test_a_mistake_is_answered_in_one_line(typed: str, expected: str) -> None:
    assert answer(typed) == expected and "\n" not in expected


if __name__ == "__main__":
    FILE.write_text("".join(f"{typed}\n    {answer(typed)}\n" for typed, _ in table()), encoding="utf-8")

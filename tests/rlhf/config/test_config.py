"""Configuration: what overrides what, and that every mistake is one line with its place and its cure."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from rlhf import errors
from rlhf.config import Config, parser, read_yaml, validate
from rlhf.errors import UserError

ROOT = Path(__file__).parents[3]


class Inner(Config):
    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL penalty"""
    gamma: float = 1.0
    """discount"""
    steps: int = 4
    """of the loop"""
    adapter: str | None = None
    """a plug-in"""

    @model_validator(mode="after")
    def _bounded(self) -> "Inner":
        if self.steps > 10:
            raise ValueError(f"steps is {self.steps}, expected 10 or fewer")
        return self


class Root(Config):
    inner: Inner = Inner()
    name: Literal["ppo", "rloo"] = "ppo"
    """which one"""
    shuffle: bool = True
    """or not"""
    sizes: tuple[int, ...] = (1, 2)
    """some"""
    every: int = Field(1, ge=1)
    """how often"""
    steps: tuple[Literal[1, 2, 3], ...] | None = Field(None, min_length=1)
    """which ones"""

    @model_validator(mode="after")
    def _consistent(self) -> "Root":
        if self.every > 1 and not self.shuffle:
            raise ValueError(f"every is {self.every}, but nothing is shuffled")
        return self


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def parse(*argv: str) -> Root:
    return parser.parse(Root, argv, prog="program", description="what it does")


def mistake(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(*argv)
    message = str(caught.value)
    assert "\n" not in message and "│" not in message
    return message


def test_files_compose_left_to_right_and_the_command_line_wins(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "inner: {kl_coef: 0.1, steps: 5}\nsizes: [7, 8, 9]\nname: rloo")
    second = write(tmp_path / "b.yaml", "inner: {kl_coef: 0.2}\nsizes: [3]")
    both = parse("--config", first, second)
    assert (both.inner.kl_coef, both.inner.steps, both.sizes, both.name) == (0.2, 5, (3,), "rloo")
    assert parse("--config", second, first).inner.kl_coef == 0.1
    assert parse(f"--config={first}", f"--config={second}") == both
    over = parse("--config", first, second, "--inner.kl-coef", "0.3")
    assert (over.inner.kl_coef, over.inner.steps) == (0.3, 5)
    assert parse("--inner.kl-coef", "0.3", "--config", first, second) == over
    assert parse() == Root()


def test_hyphen_and_underscore_are_one(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "inner:\n  kl-coef: 0.5")
    expected = Root(inner=Inner(kl_coef=0.5))
    assert parse("--config", file) == parse("--inner.kl-coef=0.5") == parse("--inner.kl_coef", "0.5") == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--no-shuffle"], Root(shuffle=False)),
        (["--sizes", "4", "5"], Root(sizes=(4, 5))),
        (["--steps", "1,2"], Root(steps=(1, 2))),
        (["--steps", "2", "3", "--steps=None"], Root()),
        (["--inner.adapter", "lora", "--inner.adapter", "none"], Root()),
        (["--shuffle=false"], Root(shuffle=False)),
        (["--shuffle", "False", "--no-shuffle", "--shuffle", "true"], Root(shuffle=True)),
        (["--shuffle", "False"], Root(shuffle=False)),
        (["--inner.kl-coef", "1e-3"], Root(inner=Inner(kl_coef=0.001))),
        (["--every", "1e4", "--sizes", "2"], Root(every=10_000, sizes=(2,))),
        (["--inner.adapter", "1e4"], Root(inner=Inner(adapter="1e4"))),
        (["--inner.adapter", "lora,r=8"], Root(inner=Inner(adapter="lora,r=8"))),
    ],
)
def test_values_of_the_command_line(argv: list[str], expected: Root) -> None:
    assert parse(*argv) == expected


def test_yaml_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    """And 2:4:4 is none: YAML 1.1 has it as 7444, of base 60."""
    read = parse("--config", write(tmp_path / "a.yaml", "inner: {kl_coef: 1e-3, adapter: 2:4:4}\nevery: 1e4"))
    assert (read.inner.kl_coef, read.inner.adapter, read.every) == (0.001, "2:4:4", 10_000)
    assert parse("--config", write(tmp_path / "a.yaml", "inner: {adapter: '1e4'}")).inner.adapter == "1e4"


def test_one_value_of_a_list_needs_no_brackets(tmp_path: Path) -> None:
    class Lists(Root):
        maybe: tuple[Literal[1, 2], ...] | None = None
        pair: tuple[int, int] = (3, 4)
        lengths: list[float] | None = None

    assert parser.parse(Lists, ["--lengths", "4", "0.5", "--every", "2"], "", "").lengths == [4.0, 0.5]
    file = write(tmp_path / "a.yaml", "sizes: 7\nmaybe: 2")
    lists = parser.parse(Lists, ["--config", str(file)], "", "")
    assert (lists.sizes, lists.maybe, lists.pair) == ((7,), (2,), (3, 4))
    for mistake in ("sizes: seven", "sizes: {a: 1}", "sizes:", "pair: 3"):
        with pytest.raises(UserError, match=rf"a\.yaml: {mistake.partition(':')[0]}"):
            parser.parse(Lists, ["--config", str(write(tmp_path / "a.yaml", mistake))], "", "")


@pytest.mark.parametrize("yaml", ["name: a\0b", "inner: 2020-13-45"])
def test_what_is_no_yaml_is_one_line(tmp_path: Path, yaml: str) -> None:
    bad = write(tmp_path / "bad.yaml", yaml)
    assert mistake("--config", bad).startswith(f"{bad}: not valid YAML")


def test_a_later_file_may_mend_what_an_earlier_one_gives(tmp_path: Path) -> None:
    high = write(tmp_path / "high.yaml", "inner: {steps: 11, kl_coef: 0.3}")
    low = write(tmp_path / "low.yaml", "inner: {steps: 2}")
    assert parse("--config", high, low).inner == Inner(steps=2, kl_coef=0.3)
    assert mistake("--config", low, high).startswith(f"{high}: inner: steps is 11")
    wrong = write(tmp_path / "wrong.yaml", "inner: {steps: 3, kl_cof: 1}")
    assert mistake("--config", high, wrong, low).startswith(f"{wrong}: no option 'inner.kl_cof'")


def test_the_nearest_option_of_a_list_of_sections() -> None:
    class Outer(Config):
        roots: tuple[Root, ...] = ()
        maybe: Inner | None = None

    with pytest.raises(UserError, match=r"^here: no option 'roots\.1\.inner\.stps' \(did you mean 'steps'\?\)"):
        validate(Outer, {"roots": [{}, {"inner": {"stps": 1}}]}, "here")
    with pytest.raises(UserError, match=r"no option 'maybe\.stps' \(did you mean 'steps'\?\)"):
        validate(Outer, {"maybe": {"stps": 1}}, "here")


def test_the_tree_reads_back_as_itself(tmp_path: Path) -> None:
    argv = ["--inner.kl-coef", "1e-05", "--sizes", "--no-shuffle", "--name", "rloo", "--inner.adapter", "ünï: [#"]
    before = parse(*argv)
    after = parser.parse(Root, ["--config", str(write(tmp_path / "tree.yaml", parser.to_yaml(before)))], "", "")
    assert after == before


def test_print_config_prints_the_whole_tree_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--inner.steps", "7", "--print-config")
    assert ended.value.code == 0
    printed = write(tmp_path / "printed.yaml", capsys.readouterr().out)
    assert parse("--config", printed) == Root(inner=Inner(steps=7))
    with pytest.raises(SystemExit):
        parse("--inner.steps", "7", "--print-config", "--changed")
    assert capsys.readouterr().out == "inner:\n  steps: 7\n"
    assert "no option '--changed'" in mistake("--changed")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "default"),
        (["--config", "FILE"], "from_file"),
        (["--config", "FILE", "--inner.adapter", "from_line"], "from_line"),
        (["--inner.adapter=a_b=c"], "a_b=c"),
        (["--inner.adapter", "first", "--inner.adapter", "last"], "last"),
        (["--inner.adapter"], "default"),
    ],
)
def test_peek_sees_what_parse_will_make_of_one_option(tmp_path: Path, argv: list[str], expected: str) -> None:
    file = write(tmp_path / "a.yaml", "inner: {adapter: from_file}")
    argv = [word.replace("FILE", file) for word in argv]
    assert parser.peek(argv, "inner.adapter", "default") == expected
    if "default" not in expected:
        assert parse(*argv).inner.adapter == expected


def test_peek_takes_hyphen_and_underscore_as_one(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "output_dir: a_b")
    for argv in (["--config", file], ["--output_dir", "a_b"], ["--output-dir=a_b"]):
        assert parser.peek(argv, "output-dir", "") == "a_b"


def test_a_config_is_frozen() -> None:
    root = Root()
    with pytest.raises(ValidationError, match="frozen"):
        root.inner.steps = 5  # type: ignore[misc]


def test_a_file_that_is_read_again_has_what_it_says_now(tmp_path: Path) -> None:
    """Whatever the first reader did to the values, and whatever was written since."""
    file = tmp_path / "a.yaml"
    for text, values in (("a: [1]", {"a": [1]}), ("a: [1]", {"a": [1]}), ("a: [2]", {"a": [2]})):
        file.write_text(text)
        read = read_yaml(file)
        assert read == values
        read["a"].append(3)


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("return 143", 143, ""),
        ("raise errors.UserError('a.yaml: no option x')", 2, "error: a.yaml: no option x\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_a_user_sees_one_line_and_an_exit_code(body: str, code: int, stderr: str) -> None:
    program = f"import sys\nfrom rlhf import errors\ndef main():\n    {body}\nsys.exit(errors.run_as_user(main))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (code, stderr)


def test_our_own_mistakes_keep_their_traceback() -> None:
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        errors.run_as_user(main)

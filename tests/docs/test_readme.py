"""What the READMEs and the pages of docs/ without a test of their own tell people to type is accepted."""

import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.preview.command import PreviewConfig
from rlhf import plugins
from rlhf.chain import command as train
from rlhf.chain.diff import DiffConfig
from rlhf.chain.report import ReportConfig
from rlhf.chain.verify import VerifyConfig
from rlhf.chat.options import ChatOptions
from rlhf.config import Config, option_names, parser
from rlhf.evaluation.evaluate import EvaluateConfig
from rlhf.evaluation.pairs import PairsConfig
from rlhf.launch.supervisor import EXPLAINED
from step1_sft import __main__ as sft
from step2_reward import __main__ as reward
from step2_reward.config import RewardConfig
from step2_reward.evaluation_options import EvaluateRewardConfig
from step3_ppo import __main__ as ppo
from step3_ppo.config import Step3Config

ROOT = Path(train.__file__).parents[2]
READMES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("step*/README.md")),
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("index", "tutorial", "running", "machines", "datasets", "results", "limits")
    ),
    *(ROOT / "docs" / f"{name}.md" for name in ("extending", "architecture", "testing", "zh/quickstart")),
    *(ROOT / "docs" / f"{name}.md" for name in ("rewards", "reasoning")),
]
CONFIGS: dict[str, Any] = {
    "data.preview": PreviewConfig,
    "rlhf evaluate": EvaluateConfig,
    "rlhf evaluate-reward": EvaluateRewardConfig,
    "rlhf pairs": PairsConfig,
    "rlhf chat": ChatOptions,
    "rlhf report": ReportConfig,
    "rlhf verify": VerifyConfig,
    "rlhf diff": DiffConfig,
    "rlhf reward": RewardConfig,
}
MAINS = {"step1_sft": sft.main, "step2_reward": reward.main, "step3_ppo": ppo.main}


def commands() -> list[str]:
    """Every line of code that starts as a command does, with what a backslash continues."""
    pages = [
        *READMES,
        *(ROOT / f"docs/{name}.md" for name in ("online_preferences", "chat", "evaluate", "report", "scaling")),
        *sorted((ROOT / "docs/results").glob("*.md")),
    ]
    lines = [line for path in pages for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()]
    code = [line.strip().removeprefix("$ ").split("  #")[0] for line in lines if not line.startswith(("|", "#"))]
    code = [re.sub(r"^rlhf (?=[a-z-]+ [\w-])", "python -m rlhf ", line) for line in code]
    code = [re.sub(r"^([A-Z0-9_]+=\S+ )+(?=python)", "", line) for line in code]  # variables before the command
    return sorted({line for line in code if re.match(r"(python|torchrun|make) [\w-]", line)})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing but the pages' files, in which the process works."""
    for page in READMES:
        for code, name in re.findall(r"```(?:python|yaml)\n(# ([\w.]+).*?)```", page.read_text(), re.DOTALL):
            (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_is_skimmed_in_two_minutes() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120 and "```python" not in lines


def test_the_page_of_rewards_has_every_option_of_each() -> None:
    page = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    name, table = "", dict[str, set[str]]()
    for line in re.findall(r"^\|(.*)$", page.partition("|---|---|---|---|\n")[2].partition("\n\n")[0], re.MULTILINE):
        source, options = (cell.strip() for cell in line.split("|")[:2])
        name = source.strip("`") or name
        table.setdefault(name, set()).update(re.findall(r"`(\w+)`", options))
    configs = {name: plugins.find("rlhf.rewards", name).Config for name in plugins.names("rlhf.rewards")}
    assert table == {name: set(config.model_fields) for name, config in configs.items()}


def test_a_plug_in_and_an_option_of_step_3_has_a_row() -> None:
    page = (ROOT / "step3_ppo/README.md").read_text(encoding="utf-8")
    algorithms = plugins.names("step3_ppo.algorithms")
    assert [name for name in algorithms if not re.search(rf"^\| `{name}` \|", page, re.MULTILINE)] == []
    rows = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    named = {name.replace("-", "_") for name in re.findall(r"`(?:--(?:no-)?)?([\w-]+)", rows)}
    configs = [Step3Config, *(plugins.find("step3_ppo.algorithms", name).Config for name in algorithms)]
    own = {cls for config in configs for cls in config.__mro__ if cls.__module__.startswith("step3_ppo.")}
    options = {name: config.model_fields[name].default for config in configs for name in config.model_fields}
    options = {name: default for name, default in options.items() if any(name in cls.__annotations__ for cls in own)}
    missing = {name for name, default in options.items() if name not in named and not isinstance(default, Config)}
    assert not missing, f"add rows to step3_ppo/README.md: {', '.join(sorted(missing))}"


def test_an_objective_of_step_2_has_a_row() -> None:
    page = (ROOT / "step2_reward/README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `--objective` \|.*$", page, re.MULTILINE)
    assert [name for name in plugins.names("step2_reward.objectives") if f"`{name}`" not in row] == []


@pytest.mark.parametrize("command", commands())
def test_a_command_is_accepted(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in words[1:] if "=" not in word)
        return
    (folder / "configs").symlink_to(ROOT / "configs")
    if words[1].endswith(".py") and words[1] != "train.py":
        assert (folder / words[1]).is_file() or (ROOT / words[1]).is_file()
        return
    module = words[words.index("-m") + 1] if "-m" in words else ""
    rest = words[words.index(module) + 1 if module else 2 :]
    if module == "rlhf":
        module, *rest = f"rlhf {rest[0]}", *rest[1:]
    if module in CONFIGS or module.startswith("benchmarks."):
        parser.parse(CONFIGS.get(module) or importlib.import_module(module).Options, rest, module, "")
        return
    monkeypatch.setattr(sys, "argv", [words[1], *rest, "--print-config"])
    try:
        (MAINS[module] if module else train.main)()
    except SystemExit as leaving:
        assert leaving.code not in EXPLAINED, capsys.readouterr().err
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["output_dir"].startswith("runs/")


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    ours = {"print-config", "config", "help", "help-all", "sft", "ppo", "output"}
    ours |= {"local-rank", "deepspeed", "module", "cpu"}
    chains = [train.chain_config(["--ppo.algorithm", name]) for name in plugins.names("step3_ppo.algorithms")]
    options = ours | {name.split(".")[-1] for chain in chains for name in option_names(chain)}
    for option in re.findall(r"`--([\w.-]*\w)", text):
        assert option.split(".")[-1].replace("_", "-").removeprefix("no-") in options, option
    for file in re.findall(
        r"(?<![\w/])(?:configs|rlhf|data|step\d_\w+|docs|tests)/[\w/.-]*\w(?:\.yaml|\.py|\.md)", text
    ):
        assert (ROOT / file).exists() or "NAME" in file, file

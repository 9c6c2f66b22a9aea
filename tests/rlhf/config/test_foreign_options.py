"""Options of other libraries are refused with the name that they have here."""

import json
import re
from pathlib import Path

import pytest

from rlhf import plugins
from rlhf.chain.options import chain_config, read
from rlhf.chat.options import ChatOptions
from rlhf.config import Config, option_names, parser
from rlhf.config.foreign_options import foreign, gone
from rlhf.errors import UserError
from rlhf.evaluation.options import EvaluateConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step2_reward.evaluation_options import EvaluateRewardConfig
from step3_ppo.algorithms.ppo import Config as PPOConfig

CHAIN = chain_config([])
KNOWN = [*option_names(CHAIN)]
PROGRAMS = (CHAIN, SFTConfig, RewardConfig, PPOConfig, EvaluateRewardConfig, EvaluateConfig, ChatOptions)
NAMES = {name for config in PROGRAMS for name in option_names(config)}


def refusal(config: type[Config], option: str) -> str:
    with pytest.raises(UserError) as refused:
        parser.parse(config, [option, "1"], "program", "what it does")
    return str(refused.value)


@pytest.mark.parametrize("name", foreign())
def test_a_foreign_option_is_refused_with_ours(name: str) -> None:
    ours, note = foreign()[name]
    assert set(ours.split()) <= NAMES
    written = {option for option in re.findall(r"--([\w.-]*\w)", note) if option.startswith("ppo.")}
    assert {*re.findall(r"--([\w.-]*\w)", note)} <= NAMES | written and written <= {*KNOWN}
    assert name not in KNOWN
    line = refusal(CHAIN, f"--{name.replace('-', '_')}")
    if not ours:
        assert line == f"no option '--{name}': {note}; see --help"
        return
    shown = re.match(rf"no option '--{name}': here it is (--\S+?)(?: or --\S+?)*(?:; |$)", line)
    assert shown and shown[1][2:] in KNOWN
    assert line.endswith(f"{note}; see --help" if note else "; see --help")


def test_a_config_file_gets_the_same_answer(tmp_path: Path) -> None:
    """At the top and in a section."""
    file = tmp_path / "theirs.yaml"
    for key, option in [*((name, name) for name in foreign()), ("sft.cutoff_len", "sft.cutoff-len")]:
        section, _, last = key.rpartition(".")
        entry = f"{last.replace('-', '_')}: 1"
        file.write_text(f"{section}: {{{entry}}}" if section else entry)
        with pytest.raises(UserError) as refused:
            parser.parse(CHAIN, ["--config", str(file)], "", "")
        cure = refusal(CHAIN, f"--{option}").partition("': ")[2].removesuffix("; see --help")
        assert str(refused.value) == f"{file}: no option '{key.replace('-', '_')}': {cure}"


def test_the_config_of_a_chain_of_before_is_read(tmp_path: Path) -> None:
    """What OUT/config.yaml of 2026-11-28 had and no option is now."""
    before = {"device_tflops": None, "push_to_hub": None, "private": False}
    ppo = {"kl_target": None, "abort_kl": None, "abort_kl_iterations": 3}
    (tmp_path / "config.yaml").write_text(json.dumps(before | {"actor_model": "a", "ppo": ppo}))
    assert read(["--config", str(tmp_path / "config.yaml")]).actor_model == "a"


def test_a_file_of_before_may_have_the_default_of_what_is_gone(tmp_path: Path) -> None:
    """At the top and in a section; another value gets the answer."""
    file = tmp_path / "before.yaml"
    for name, default in gone().items():
        value = json.dumps(default)
        file.write_text(f"{name}: {value}\nppo: {{{name}: {value}}}\n")
        assert parser.parse(CHAIN, ["--config", str(file)], "", "") == parser.parse(CHAIN, [], "", "")
        file.write_text(f"ppo: {{{name}: 1.5}}")
        with pytest.raises(UserError, match=f"no option 'ppo.{name}': "):
            parser.parse(CHAIN, ["--config", str(file)], "", "")


@pytest.mark.parametrize("name", ["Neptune", "visdom"])
def test_trackers_that_went_have_an_answer(name: str) -> None:
    with pytest.raises(UserError, match=rf"^no '{name}' in rlhf.training.trackers; write a tracker of yours"):
        plugins.find("rlhf.training.trackers", name)

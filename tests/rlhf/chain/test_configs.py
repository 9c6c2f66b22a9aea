"""Every YAML file under configs/ loads, and composes with the others as its comment says."""

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

from rlhf import plugins
from rlhf.chain import command as train
from rlhf.chain.options import SHORT_HELP, changed
from rlhf.chain.steps import next_step
from rlhf.config import option_names, parser, read_yaml
from rlhf.config.short_help import STAGE_GROUPS, short_help
from rlhf.models.load import load_config
from rlhf.text.tokenizer import load_tokenizer
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig

CONFIGS = Path(train.__file__).parents[2] / "configs"
CHAINS = [CONFIGS / "demo.yaml", *sorted(CONFIGS.glob("recipes/*.yaml"))]
BASES = [CONFIGS / "demo.yaml", CONFIGS / "recipes/smollm2-135m-sentiment-trunk-cpu.yaml"]
"""two chains whose sections set different options"""
OVERLAYS = sorted(CONFIGS.glob("overlays/*.yaml"))
ALGORITHMS = sorted(CONFIGS.glob("algorithms/*.yaml"))
MODELS = sorted(CONFIGS.glob("models/*.yaml"))
SHAPES = sorted(CONFIGS.glob("shapes/*.yaml"))  # for plans: tests/rlhf/plan/test_plan.py


@functools.cache
def resolved(*argv: str) -> dict[str, Any]:
    words = list(argv)
    tree: dict[str, Any] = train.read(words).model_dump(mode="json")
    return tree


def composed(*files: Path) -> dict[str, Any]:
    return resolved("--config", *map(str, files))


def leaves(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    values = {}
    for name, value in tree.items():
        values |= leaves(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return values


def test_every_file_is_of_a_known_kind() -> None:
    assert sorted(CONFIGS.rglob("*.yaml")) == sorted([*CHAINS, *OVERLAYS, *ALGORITHMS, *MODELS, *SHAPES])
    assert OVERLAYS and ALGORITHMS and MODELS and len(CHAINS) > 1


@pytest.mark.parametrize("path", CHAINS, ids=lambda path: path.stem)
def test_a_chain_resolves_and_names_its_models_and_data(path: Path) -> None:
    tree = resolved("--config", str(path))
    assert tree == composed(path)
    settings = read_yaml(path)
    assert {"actor_model", "data_path", "output_dir"} <= set(settings)
    reward_model = settings["actor_model" if settings.get("share_trunk") else "reward_model"]
    assert tree["sft"]["model"] == settings["actor_model"] and tree["reward"]["model"] == reward_model
    for section in ("sft", "reward", "ppo"):
        for name in ("data_path", "output_dir", "max_length"):
            assert tree[section][name] == settings.get(section, {}).get(name, tree[name])
    assert tree["ppo"]["max_prompt_length"] + tree["ppo"]["response_length"] <= tree["ppo"]["max_length"]
    assert tree["ppo"]["batch_size"] % tree["ppo"]["num_mini_batches"] == 0


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
@pytest.mark.parametrize("base", BASES, ids=lambda path: path.stem)
def test_an_overlay_changes_what_it_names_and_no_more(base: Path, overlay: Path) -> None:
    before, after = (leaves(composed(*files)) for files in ([base], [base, overlay]))
    named = leaves(read_yaml(overlay))
    assert {name: after[name] for name in named} == named
    wide = {f"{section}.{name}" for name in named for section in ("sft", "reward", "ppo") if "." not in name}
    assert {name for name in after if after[name] != before[name]} <= set(named) | wide
    for name in wide & set(after):
        assert after[name] == named.get(name, after[name.split(".")[1]]), "an overlay holds for all three stages"


@pytest.mark.parametrize("file", ALGORITHMS, ids=lambda path: path.stem)
@pytest.mark.parametrize("base", BASES, ids=lambda path: path.stem)
def test_an_algorithms_file_takes_ppos_place_and_leaves_the_rest_of_the_chain(base: Path, file: Path) -> None:
    settings, named = leaves(read_yaml(base)), leaves(read_yaml(file))
    tree = composed(base, file)
    after = leaves(tree)
    assert tree["ppo"]["algorithm"] == file.stem and all(name.startswith("ppo.") for name in named)
    assert {name: after[name] for name in named} == named
    assert {name: after[name] for name in settings if name not in named} == {
        name: value for name, value in settings.items() if name not in named
    }
    options = plugins.find("step3_ppo.algorithms", file.stem).Config(**tree["ppo"])
    assert options.batch_size % (options.num_generations * options.num_mini_batches) == 0


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_file_describes_a_model_and_its_tokenizer(path: Path) -> None:
    model, tokenizer = load_config(str(path)), load_tokenizer(str(path))
    assert model.vocab_size == len(tokenizer)
    assert model.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_what_is_given_at_the_top_holds_for_the_stages_that_set_nothing() -> None:
    tree = resolved("--max-length", "100", "--sft.max-length", "512", "--actor-model", "a", "--reward.model", "b")
    assert [tree[section]["max_length"] for section in ("sft", "reward", "ppo")] == [512, 100, 100]
    assert (tree["sft"]["model"], tree["reward"]["model"], tree["ppo"]["actor_model"]) == ("a", "b", None)


def test_the_reward_model_starts_from_the_actors_model_unless_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("actor_model: a")
    for words, model in (
        (["--actor-model", "a"], "a"),
        (["--config", str(file)], "a"),
        (["--config", str(file), "--actor-model", "b"], "b"),
        (["--actor-model", "a", "--reward-model", "b"], "b"),
        (["--config", str(CONFIGS / "demo.yaml"), "--actor-model", "a"], "demo-llama"),
    ):
        tree = resolved(*words)
        assert (tree["reward_model"], tree["reward"]["model"]) == (model, model)


@pytest.mark.parametrize(
    ("argv", "judge"),
    [
        ([], "data.sources.demo:true_score"),
        (["--data-path", "demo,rows=900"], "data.sources.demo:true_score"),
        (["--data-path", "mine.jsonl"], None),
        (["--data-path=demo_pairs.jsonl"], None),
        (["--data-path", "demo", "mine.jsonl"], None),
        (["--ppo-only-data-path", "mine.jsonl"], None),
        (["--data-path", "mine.jsonl", "--ppo.judge", "vader"], "vader"),
    ],
)
def test_other_data_than_the_demos_is_not_judged_by_the_demo(
    argv: list[str], judge: str | None, tmp_path: Path
) -> None:
    words, note = train.with_base([*argv, "--output-dir", str(tmp_path)])
    assert parser.parse(train.chain_config(words), words, "", "").ppo.judge == judge
    assert ("trains the demo's tiny model" in note) == (judge != "data.sources.demo:true_score")


def test_what_all_stages_have_with_one_default_stands_at_the_top() -> None:
    """README: an option at the top holds for all three stages."""
    sections = (SFTConfig, RewardConfig, plugins.find("step3_ppo.algorithms", "ppo").Config)
    common = set.intersection(*(set(options.model_fields) for options in sections))
    alike = {name for name in common if len({str(options.model_fields[name].default) for options in sections}) == 1}
    top = {name for name in train.chain_config([]).model_fields if name in common}
    of_one_stage = {"keep_best", "patience", "eval_every"}  # with a metric of the stage, in its steps
    assert top == alike - of_one_stage
    assert common - alike == {"learning_rate", "adam_epsilon", "batch_size"}


def test_an_algorithm_of_ones_own_keeps_its_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from step3_ppo.algorithms.ppo import *\nclass Config(Config):\n    max_grad_norm: float = 0.5\n")
    mine = ["--ppo.algorithm", str(file)]
    assert [resolved(*mine)[section]["max_grad_norm"] for section in ("reward", "ppo")] == [1.0, 0.5]
    assert resolved(*mine, "--max-grad-norm", "1.0")["ppo"]["max_grad_norm"] == 1.0


def test_the_resolved_tree_reads_back_and_still_follows_the_top(tmp_path: Path) -> None:
    argv = ["--config", str(CONFIGS / "demo.yaml"), "--sft.max-length", "40", "--ppo.kl-coef", "0.3", "--seed", "4"]
    file = tmp_path / "tree.yaml"
    file.write_text(parser.to_yaml(train.read(argv)))
    assert resolved("--config", str(file)) == resolved(*argv)
    tree = resolved("--config", str(file), "--max-prompt-length", "20", "--output-dir", "elsewhere")
    assert [tree[section]["max_length"] for section in ("sft", "reward", "ppo")] == [40, 48, 48]
    assert [tree[section]["max_prompt_length"] for section in ("sft", "reward", "ppo")] == [20, 20, 20]
    assert {tree[section]["output_dir"] for section in ("sft", "reward", "ppo")} == {"elsewhere"}
    over = resolved("--config", str(file), str(CONFIGS / "overlays" / "zero3.yaml"))
    assert [over[section]["zero_stage"] for section in ("sft", "reward", "ppo")] == [3, 3, 3]


def test_a_later_layer_decides_for_the_stages_too(tmp_path: Path) -> None:
    """At the top or in a section: what is written last, and in one layer the section."""
    section, top = tmp_path / "section.yaml", tmp_path / "top.yaml"
    section.write_text("dtype: bf16\nppo: {micro_batch_size: 4, dtype: fp32}")
    top.write_text("micro_batch_size: 2")
    for argv, expected in (
        (["--config", str(section)], ([8, 8, 4], ["bf16", "bf16", "fp32"])),
        (["--config", str(section), str(top)], ([2, 2, 2], ["bf16", "bf16", "fp32"])),
        (["--config", str(top), str(section)], ([2, 2, 4], ["bf16", "bf16", "fp32"])),
        (["--config", str(section), "--micro-batch-size", "16"], ([16, 16, 16], ["bf16", "bf16", "fp32"])),
        (["--config", str(section), "--dtype", "fp16", "--ppo.dtype", "auto"], ([8, 8, 4], ["fp16", "fp16", "auto"])),
    ):
        tree = resolved(*argv)
        sections = [tree[name] for name in ("sft", "reward", "ppo")]
        assert ([s["micro_batch_size"] for s in sections], [s["dtype"] for s in sections]) == expected, argv


def test_what_is_no_default_is_little_and_reads_back(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from step3_ppo.algorithms.ppo import *\nclass Config(Config):\n    max_grad_norm: float = 0.5\n")
    file = tmp_path / "changed.yaml"
    for argv, expected in (
        ([], {}),
        (["--max-length", "40", "--sft.max-length", "512"], {"max_length": 40, "sft": {"max_length": 512}}),
        (["--ppo.algorithm", "rloo", "--ppo.actor.zero-stage", "3"],
         {"ppo": {"algorithm": "rloo", "actor": {"zero_stage": 3}}}),
        (["--ppo.algorithm", str(mine), "--max-grad-norm", "1.0"],
         {"ppo": {"algorithm": str(mine), "max_grad_norm": 1.0}}),
        (["--actor-model", "a"], {"actor_model": "a"}),
        (["--actor-model", "a", "--reward-model", "b"], {"actor_model": "a", "reward_model": "b"}),
        (["--config", str(CONFIGS / "demo.yaml")], None),
    ):  # fmt: skip
        chain = train.read(argv)
        tree = changed(chain)
        assert expected in (None, tree)
        file.write_text(parser.tree_to_yaml(tree))
        again = train.read(["--config", str(file)])
        assert again.model_dump() == chain.model_dump(), argv


@pytest.mark.parametrize("stage", ["step1_sft", "step2_reward", "step3_ppo"])
def test_a_stage_has_a_short_help(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"{stage}.__main__")
    monkeypatch.setattr("sys.argv", [stage, "--help"])
    assert main.main() == 0
    text = capsys.readouterr().out
    listed = [*main.STAGE.help_groups.values(), *STAGE_GROUPS.values()]
    assert text.count("\n  --") == sum(map(len, listed)) < 30 and "--help-all" in text
    assert f"usage: python -m {stage} " in text and max(map(len, text.splitlines())) <= 100


def test_the_next_command_after_a_launcher_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As deepspeed starts it. Without the launcher the next step would run in one process."""
    words = ["--steps", "1", "--output-dir", str(tmp_path)]
    monkeypatch.setattr("sys.orig_argv", ["python", "-u", "train.py", "--local_rank=0", *words])
    chain = train.read(words)
    command = f"python -u train.py --steps 1 2 3 --output-dir {tmp_path}"
    assert next_step(chain, "python train.py") == f"next: {command}"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert next_step(chain, "python train.py") == f"next: on every host, with the launcher that started it: {command}"


def test_the_short_help_fits_a_page_and_has_the_defaults_of_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    train.main()
    text = capsys.readouterr().out
    assert text.count("\n  --") == sum(map(len, SHORT_HELP.values())) < 45 and text.count("\n") <= 110
    assert "--help-all" in text and max(map(len, text.splitlines())) <= 100
    first, full = "models and data:", short_help(train.chain_config([]), "", "", SHORT_HELP)
    assert text[text.index(first) :].strip() == full[full.index(first) :].strip(), "of the class without torch"
    lines = " ".join(text.split())
    assert "peak learning rate of AdamW (default: 2e-05)" in lines and "0.003" not in lines
    monkeypatch.setattr("sys.argv", ["train.py", "--help-all"])
    train.main()
    text = capsys.readouterr().out
    assert all(f"--{option}" in text for option in option_names(train.chain_config([]))) and "0.003" not in text

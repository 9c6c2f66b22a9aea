"""`rlhf rounds`: train the chain, label pairs of its policy's responses, and train again on old and new pairs.

The iterated online loop of Bai et al. 2022 (arXiv 2204.05862, section 4.5). Each round has a directory like that of a
chain; fine-tuning runs in the first one only, and every policy starts from its result.

rlhf rounds --rounds 3 --prompts prompts.jsonl --label judge.py:score --actor-model gpt2 --data-path old.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from rlhf import console
from rlhf.chain import command
from rlhf.chain.options import (
    ONE_RUN_ONLY,
    SHORT_HELP,
    chain_config,
    overlay,
    refuse_options,
    require_agreement,
    resolve,
)
from rlhf.chain.stages import STAGES
from rlhf.chain.steps import needed
from rlhf.config import Config, foreign_settings, parser, read_yaml
from rlhf.config.options import MAX_SEED
from rlhf.config.short_help import short_help
from rlhf.errors import UserError
from rlhf.launch import launcher, rank_variables

OPTIONS, CHAIN = "rounds.yaml", "chain.yaml"
METRICS = {2: ("eval_accuracy",), 3: ("eval_score_before", "eval_score", "eval_kl", "eval_judge_before", "eval_judge")}
"""metrics of the reward model and of the policy that are printed for each round"""


class RoundsOptions(Config):
    """What happens between two trainings."""

    rounds: int = Field(2, ge=1)
    """number of trainings; pairs of a policy's responses are labelled between two of them"""
    prompts: str | None = None
    """.jsonl with a column prompt, or .txt with one prompt a line: prompts that the data does not have yet"""
    label: tuple[str, ...] = ()
    """score sources that label the pairs: file.py:function, learned,model=DIR, or another name in rlhf/rewards/; of
    several the majority decides"""
    tie: float = Field(0.0, ge=0)
    """scores of a source that differ by no more than this are a tie"""


def main() -> int:
    """Run all rounds; those that are finished are skipped. Raises: UserError."""
    typed = foreign_settings.plain_words(sys.argv[1:])
    argv = _with_base(typed)
    options = _options(argv)
    program, about = console.program("python -m rlhf rounds"), (__doc__ or "").split("\n")[0]
    if {"--help", "-h"} & {*argv}:
        print(short_help(options, program, about, {"rounds": tuple(RoundsOptions.model_fields), **SHORT_HELP}))
        return 0
    settings = overlay(argv, over=int(argv != typed))
    chain = resolve(parser.parse(options, argv, program, about, settings), argv, settings)
    require_agreement(argv, chain)
    _check(chain)
    from rlhf.storage import disk, manifests  # imported here because it imports torch

    folder = Path(chain.output_dir)
    with manifests.locked(folder):
        _require_same_labels(chain, folder)
        earlier = {path: path.read_text("utf-8") for path in (folder / OPTIONS, folder / CHAIN) if path.is_file()}
        disk.write_text(folder / OPTIONS, parser.to_yaml(chain))
        tree = chain.model_dump(mode="json", exclude=set(RoundsOptions.model_fields))
        disk.write_text(folder / CHAIN, parser.tree_to_yaml(tree))
        for number in range(chain.rounds):
            console.say(f"round {number} of {chain.rounds}")
            try:
                _train(chain, number)
            except UserError:  # before a stage ran: the options are refused, and those of the rounds stay
                for path, text in earlier.items():
                    disk.write_text(path, text)
                raise
            if number + 1 < chain.rounds:
                _label(chain, number)
    for number in range(chain.rounds):
        print(_summary(folder / f"round-{number}"))
    return 0


def _options(argv: list[str]) -> type[Config]:
    """The options of the rounds and those of the chain, with the algorithm that `argv` names."""
    bases: Any = (RoundsOptions, chain_config(argv))
    return create_model("RoundsConfig", __base__=bases)


def _with_base(argv: list[str]) -> list[str]:
    """The command line; without --config and --actor-model with the options of the rounds in its output directory."""
    saved = Path(parser.peek(argv, "output-dir", "runs/demo")).expanduser() / OPTIONS
    named = any(word.partition("=")[0].replace("_", "-") in ("--config", "--actor-model") for word in argv)
    return [f"--config={saved}", *argv] if saved.is_file() and not named else command.with_base(argv)[0]


def _check(chain: Any) -> None:
    """Raises: UserError for a missing option, or one that does not fit several rounds."""
    if chain.rounds > 1 and (chain.prompts is None or not chain.label):
        raise UserError(
            f"--rounds {chain.rounds}: expected --prompts FILE and --label SOURCE, for the pairs in between"
        )
    from data.build.mixture import parse_data_path  # imported here because they import torch
    from rlhf.evaluation.batch_generation import check_judges
    from rlhf.text.prompt_file import read_prompts

    if chain.prompts is not None:
        read_prompts(chain.prompts)
    if chain.rounds > 1 and 2 not in needed(chain):
        raise UserError(
            f"--rounds {chain.rounds}: step 3 uses no reward model of the run, so the pairs of a round would teach it "
            "nothing; expected the reward `learned`, and no --ppo.reward-model"
        )
    paths = (*chain.reward.data_path, *chain.reward.reward_only_data_path)
    weighted = [path for path in paths if parse_data_path(path)[2] is not None]
    if chain.rounds > 1 and weighted:
        raise UserError(f"--data-path {weighted[0]}: got a weight, expected none, as the pairs of the rounds have none")
    refuse_options(
        chain,
        (*ONE_RUN_ONLY, "plan", "reward_models"),
        "rounds",
        "use it with `rlhf train` on a round's directory",
    )
    if rank_variables.world_size() > 1:
        raise UserError(
            "rounds: got several processes of another launcher, expected one; use --deployment-type single_node or "
            "multi_node"
        )
    check_judges(chain.label, str(chain.ppo.actor_model or chain.sft.model))


def _require_same_labels(chain: Any, folder: Path) -> None:
    """Raises: UserError if earlier pairs in the directory were labelled in another way."""
    path = folder / OPTIONS
    saved = read_yaml(path) if path.is_file() and list(folder.glob("pairs-*.jsonl")) else {}
    for name in ("prompts", "label", "tie"):
        value = chain.model_dump(mode="json")[name]
        if name in saved and saved[name] != value:
            raise UserError(
                f"--{name}: got {value}, expected {saved[name]} as for the pairs in {folder}; name another --output-dir"
            )


def _train(chain: Any, number: int) -> None:
    """Run the chain of one round: all steps, or from the second round on the reward model and the policy."""
    folder = Path(chain.output_dir)
    words = ["--config", str(folder / CHAIN), "--output-dir", str(folder / f"round-{number}")]
    if number:
        pairs = [str(folder / f"pairs-{earlier}.jsonl") for earlier in range(number)]
        words += ["--reward-only-data-path", *chain.reward.reward_only_data_path, *pairs, "--steps", "2", "3"]
        if chain.ppo.actor_model is None:
            words += ["--ppo.actor-model", str(folder / "round-0" / STAGES[1].name)]
    sys.argv = ["rlhf train", *words]
    command.main()


def _label(chain: Any, number: int) -> None:
    """Sample and label pairs of the round's policy, in a process that frees its memory; a whole file is kept."""
    folder = Path(chain.output_dir)
    output = folder / f"pairs-{number}.jsonl"
    if output.is_file():
        if not output.stat().st_size:
            raise UserError(f"{output}: has no pairs; remove it, and the same command labels them again")
        return
    words = ["pairs", "--policies", str(folder / f"round-{number}" / STAGES[3].name), "--prompts", chain.prompts]
    words += ["--output", str(output), "--reward", chain.label[0], "--tie", str(chain.tie)]
    words += ["--vote", *chain.label[1:]] if chain.label[1:] else []
    words += ["--seed", str((chain.seed + number) % (MAX_SEED + 1)), "--dtype", chain.dtype]
    words += ["--temperature", str(chain.ppo.temperature), "--response-length", str(chain.ppo.response_length)]
    status = launcher.run("rlhf", words)
    if status != 0:
        raise SystemExit(int(status) if status > 0 else 128 - status)


def _summary(folder: Path) -> str:
    numbers = []
    for step, names in METRICS.items():
        path = folder / STAGES[step].name / "manifest.json"
        if not path.is_file():  # step 3 did not need it
            continue
        manifest = json.loads(path.read_text(encoding="utf-8"))
        numbers += [f"{name} {manifest['metrics'][name]}" for name in names if name in manifest["metrics"]]
    return f"{folder}: {', '.join(numbers)}"

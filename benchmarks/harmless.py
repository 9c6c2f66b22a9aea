"""`python -m benchmarks.harmless --data-path harmless-base.jsonl.gz`: a policy for human preferences, and its judge.

The dialogues of the file are divided by their first message. From GOLD of them learns a gold reward model, the mean of
several members. From the rest but TEST a recipe makes an SFT model, a reward model and a policy, once with each seed.
On the prompts of TEST, which nothing learned from, both policies respond, and the gold model says which is better:

    rlhf evaluate --policies step1_sft step3_ppo --reward learned,model=gold --prompts prompts.jsonl

Only the base of the gold model and of the recipe's reward model is the same; their rows and heads are not. On the pairs
of TEST the table has the accuracy of both, and the correlation of their score differences.

Finished parts are skipped, so a run can be interrupted. Writes harmless.csv, and the table of harmless.md.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import inputs, page
from benchmarks.cells import ROOT, resolve_chain
from benchmarks.jobs import Job, JobOptions, run_jobs
from benchmarks.page import mean_text
from benchmarks.preferences import first_message_point, score_pairs
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.maths import preferences

GOLD, TEST = 0.45, 0.15
"""shares of the dialogues; the rest is the recipe's"""
MEMBERS = 2
"""reward models whose weights the gold model is the mean of: seeds of their order and head"""
RESPONSES, RESPONSE = 2, 64
"""of each policy to each prompt of TEST, and their most tokens"""
COLUMNS = (
    "seed", "reward model", "correlation", "kl", "gain", "gain low", "gain high", "win rate", "win rate low",
    "win rate high", "win rate at equal length", "length before", "length after", "distinct-2", "minutes",
)  # fmt: skip


class Options(JobOptions):
    """Data, recipe and seeds."""

    data_path: str = ""
    """HH-RLHF pairs: harmless-base.jsonl.gz"""
    recipe: str = str(ROOT / "configs" / "recipes" / "smollm2-135m-hh-cpu.yaml")
    """YAML file of a chain"""
    seeds: int = Field(5, ge=1)
    """seeds 0, 1, ... of the recipe"""
    output_dir: str = "runs/harmless"
    """directory of the divided data, models and results"""

    def rows(self, part: str) -> str:
        """The data path of a part of the dialogues: gold, main or test."""
        return f"hh_rlhf:{self.folder / part}.jsonl"

    def run(self, seed: int) -> Path:
        """The directory of the recipe with this seed."""
        return self.folder / f"seed-{seed}"

    def compared(self, seed: int) -> Path:
        """The results of the comparison, the last file that a seed writes."""
        return self.run(seed) / "compared" / "results.json"


# --- the rows


def divide(options: Options) -> None:
    """Write the rows of each part, and the prompts of TEST that the policy can read."""
    path = Path(options.data_path)
    if not path.is_file():
        raise UserError(f"--data-path {path}: no such file, expected HH-RLHF pairs, such as harmless-base.jsonl.gz")
    parts: dict[str, list[str]] = {"gold": [], "test": [], "main": []}
    for row in inputs.read_lines(path):
        parts[part_of(row)].append(row)
    options.folder.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        (options.folder / f"{part}.jsonl").write_text("".join(rows), encoding="utf-8")
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in test_prompts(options))
    (options.folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def part_of(row: str) -> str:
    """The part to which a dialogue's first message belongs."""
    point = first_message_point(row)
    return "gold" if point < GOLD else "test" if point < GOLD + TEST else "main"


def test_prompts(options: Options) -> Iterator[Any]:
    """The prompts of TEST of at most the recipe's length."""
    from data.prepare.mixture import open_origin
    from rlhf.hub.short_names import resolve
    from rlhf.text.dialogues import Template
    from rlhf.text.messages import format_prompt
    from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

    chain = chain_of(options, 0)
    tokenizer = prepare_tokenizer(load_tokenizer(resolve(chain.sft.model)), chain.chat_template)
    template = Template(tokenizer)
    for row in open_origin(options.rows("test")).source.rows("ppo"):
        prompt = getattr(row, "prompt", ())
        if prompt and len(tokenizer(template.prompt_text(prompt)).input_ids) <= chain.ppo.max_prompt_length:
            yield format_prompt(prompt)


# --- models


def chain_of(options: Options, seed: int) -> Any:
    """All options of the recipe with this seed."""
    seeds = ["--seed", str(seed), "--data-seed", str(seed), "--data-workers", "1"]
    words = ["--config", options.recipe, "--data-path", options.rows("main"), *seeds]
    return resolve_chain([*words, "--output-dir", str(options.run(seed))])


def train_gold(options: Options, member: int) -> None:
    """A member of the gold model: the recipe's reward model on all rows of GOLD."""
    from step2_reward.stage import REWARD_MODELLING

    own = {"data_path": (options.rows("gold"),), "data_split": (0, 1, 0), "max_train_rows": None}
    config = chain_of(options, member).reward.model_copy(update=own)
    REWARD_MODELLING.run(config.model_copy(update={"output_dir": str(options.folder / f"gold-{member}")}))


def join_gold(options: Options) -> None:
    """Write the mean of the members' weights (WARM, arXiv 2401.12187), which have the same files."""
    gold, draft = options.folder / "gold", options.folder / "gold.part"
    if gold.is_dir():
        return
    folders = [options.folder / f"gold-{member}" / "step2_reward" / "model" for member in range(MEMBERS)]
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(folders[0], draft)
    for file in draft.glob("*.safetensors"):
        states = [load_file(folder / file.name) for folder in folders]
        means = {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}
        save_file({name: mean.to(states[0][name].dtype) for name, mean in means.items()}, file, {"format": "pt"})
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    measured = {"score_mean", "score_std"}  # of the first member
    kept = {name: value for name, value in config.items() if name not in measured}
    (draft / "config.json").write_text(json.dumps(kept, indent=2), encoding="utf-8")
    draft.rename(gold)


def train_policy(options: Options, seed: int) -> None:
    """The three stages of the recipe, then the comparison by the gold model."""
    from step1_sft.stage import FINE_TUNING
    from step2_reward.stage import REWARD_MODELLING
    from step3_ppo import stage

    chain = chain_of(options, seed)
    FINE_TUNING.run(chain.sft)
    REWARD_MODELLING.run(chain.reward)
    stage.run(chain.ppo)
    compare(options, seed)


def compare(options: Options, seed: int) -> None:
    """`rlhf evaluate` of the policies before and after step 3."""
    from rlhf.evaluation import comparison, results_table
    from rlhf.evaluation.options import EvaluateConfig

    chain, run = chain_of(options, seed), options.run(seed)
    shutil.rmtree(run / "compared", ignore_errors=True)
    config = EvaluateConfig(
        policies=(str(run / "step1_sft"), str(run / "step3_ppo")), prompts=str(options.folder / "prompts.jsonl"),
        reward=f"learned,model={options.folder / 'gold'}", samples=RESPONSES, seed=seed,
        temperature=chain.ppo.temperature, response_length=RESPONSE, dtype=chain.dtype,
        output=str(run / "compared"),
    )  # fmt: skip
    policies = comparison.check(config)
    results_table.report_results(policies, comparison.measure_all(policies))


# --- the report


def gaps(options: Options, models: Sequence[Path]) -> list[Tensor]:
    """Score of the chosen minus that of the rejected response, float64, of each model on the pairs of TEST."""
    reward = chain_of(options, 0).reward
    scored = score_pairs(models, [options.rows("test")], (reward.max_prompt_length, reward.max_length))
    return [one.scores[:, 0] - one.scores[:, 1] for one in scored]


def row_of(options: Options, seed: int, reward: Tensor, gold: Tensor) -> list[Any]:
    """The line of a seed, as of COLUMNS. reward, gold: `gaps`"""
    run = options.run(seed)
    compared = json.loads(options.compared(seed).read_text(encoding="utf-8"))
    before, after = compared["policies"]
    seconds = 0.0
    for stage in ("step1_sft", "step2_reward", "step3_ppo"):
        lines = (run / stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds += json.loads(lines[-1])["seconds"]
    correlation = torch.corrcoef(torch.stack([reward, gold]))[0, 1].item()
    numbers = [preferences.in_order(reward).mean().item(), correlation, after["kl"]["mean"]]
    numbers += [after["gain"][name] for name in ("mean", "low", "high")]
    numbers += [after["win_rate"][name] for name in ("mean", "low", "high")]
    numbers += [after["length_controlled_win_rate"], before["response_length"], after["response_length"]]
    return [
        seed,
        *(f"{number:.3f}" for number in [*numbers, after["distinct_2"] / before["distinct_2"]]),
        f"{seconds / 60:.0f}",
    ]


def report(options: Options) -> None:
    """The table and the CSV of all finished seeds. Raises: UserError if there is none."""
    seeds = [seed for seed in range(options.seeds) if options.compared(seed).is_file()]
    if not seeds:
        raise UserError(f"{options.folder}: no seed is finished; see {options.folder}/logs")
    models = [options.folder / "gold", *(options.run(seed) / "step2_reward" for seed in seeds)]
    gold, *rewards = gaps(options, models)
    rows = [row_of(options, seed, reward, gold) for seed, reward in zip(seeds, rewards, strict=True)]
    accuracy = preferences.in_order(gold).mean().item()
    prompts = len((options.folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines())
    page.write(Path(options.results) / "harmless", COLUMNS, rows, table(rows, accuracy, len(gold), prompts))


def table(rows: Sequence[Sequence[Any]], accuracy: float, pairs: int, prompts: int) -> list[str]:
    """Markdown, with the mean over the seeds and its interval."""
    shown = (
        "seed", f"reward model's accuracy ({pairs} pairs)", "correlation with gold", "KL, nats", "gain by gold",
        f"win rate by gold ({prompts} prompts)", "at equal length", "tokens", "distinct-2 of SFT's", "minutes",
    )  # fmt: skip
    lines: list[Sequence[Any]] = []
    for seed, right, same, kl, gain, low, high, wins, fewest, most, equal, before, after, distinct, minutes in rows:
        tokens = f"{float(before):.0f} → {float(after):.0f}"
        intervals = f"{gain} [{low}, {high}]", f"{wins} [{fewest}, {most}]"
        lines.append((seed, right, same, kl, *intervals, equal, tokens, distinct, minutes))
    if len(rows) > 1:
        means = {name: mean_text([float(row[COLUMNS.index(name)]) for row in rows]) for name in COLUMNS[1:]}
        names = ("reward model", "correlation", "kl", "gain", "win rate", "win rate at equal length")
        lines.append(("mean", *(means[name] for name in names), "", means["distinct-2"], ""))
    return page.table(shown, [*lines, ("gold", f"{accuracy:.3f}", 1, *[""] * 7)])


def main() -> int:
    """Exit code 1 if a part failed."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.harmless", "A policy for human preferences.")
    divide(options)
    golds = [
        Job(f"gold {i}", partial(train_gold, options, i), options.folder / f"gold-{i}/step2_reward/manifest.json")
        for i in range(MEMBERS)
    ]
    if not run_jobs(golds, options):
        return 1
    join_gold(options)
    seeds = range(options.seeds)
    good = run_jobs([Job(f"seed {i}", partial(train_policy, options, i), options.compared(i)) for i in seeds], options)
    report(options)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

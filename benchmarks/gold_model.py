"""A reward model as the judge of the small world, as in Gao et al. 2023 (arXiv 2210.10760, section 2).

The gold model learns from pairs that a noisy reader of VADER's score has labelled (benchmarks.stories, another seed).
Then it labels the pairs of the world itself, without noise. Models that learn from these labels are its proxies.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from benchmarks import stories
from benchmarks.cells import CellOptions, Job, resolve_chain, run_jobs
from rlhf.errors import UserError
from rlhf.storage import disk

DATA_SEED = 1
"""of the gold model's stories and labels; the world has seed 0"""
EPOCHS = 3


def judge_words(folder: Path) -> list[str]:
    """The options of a chain whose judge and labels are those of the gold model in `folder`."""
    model = folder.absolute() / "step2_reward"
    return ["--reward-only-data-path", str(folder / "labelled.jsonl"), "--ppo.judge", f"learned,model={model}"]


def prepare(options: CellOptions, folder: Path) -> None:
    """Train the gold model and label the world's pairs with it; what is finished is kept. Raises: UserError."""
    data = resolve_chain(options.words).reward.reward_only_data_path
    if not (folder / "pairs.jsonl").is_file():
        own = stories.Options(model=resolve_chain(options.words).sft.model, seed=DATA_SEED, output_dir=str(folder))
        stories.write(own)
    labelled = folder / "labelled.jsonl"
    jobs = [
        Job("the gold model", lambda: train(options, folder), folder / "gold.log"),
        Job("the labels", lambda: label(data, folder, labelled), folder / "labels.log"),
    ]
    if not labelled.is_file() and any(run_jobs([job], 1) for job in jobs):
        raise UserError(f"{folder}: the gold model failed; see {folder}/*.log")


def train(options: CellOptions, folder: Path) -> None:
    """Steps 1 and 2 on the pairs of the folder."""
    from step1_sft.stage import FINE_TUNING
    from step2_reward.stage import REWARD_MODELLING

    words = ["--reward-only-data-path", str(folder / "pairs.jsonl"), "--reward.num-train-epochs", str(EPOCHS)]
    chain = resolve_chain([*options.words, *words, "--output-dir", str(folder)])
    for name, stage, own in (("step1_sft", FINE_TUNING, chain.sft), ("step2_reward", REWARD_MODELLING, chain.reward)):
        if not (folder / name / "manifest.json").is_file():
            stage.run(own)


def label(data: Sequence[str], folder: Path, path: Path) -> None:
    """Write the pairs of `data`, each with the side chosen that the gold model scores higher."""
    from step2_reward.evaluation_options import EvaluateRewardConfig
    from step2_reward.pair_scores import score_models

    evaluation = EvaluateRewardConfig(models=(str(folder / "step2_reward"),), data_path=tuple(data), dtype="fp32")
    [scored] = score_models(evaluation)
    rows = [json.loads(line) for line in Path(*data).read_text(encoding="utf-8").splitlines()]
    disk.write_text(path, "".join(json.dumps(row) + "\n" for row in in_order(rows, scored.scores)))


def in_order(rows: Sequence[dict[str, str]], scores: Tensor) -> list[dict[str, str]]:
    """The rows with the side of the higher score as `chosen`. scores: of chosen and rejected, [N, 2]."""
    sides = [("chosen", "rejected") if a >= b else ("rejected", "chosen") for a, b in scores.tolist()]
    return [
        {"prompt": row["prompt"], "chosen": row[first], "rejected": row[second]}
        for row, (first, second) in zip(rows, sides, strict=True)
    ]

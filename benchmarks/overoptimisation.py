"""`python -m benchmarks.overoptimisation`: how a policy overfits its reward model, after Gao et al. 2023 (2210.10760).

Reward models learn from few and from many pairs, which a gold reward model has labelled (benchmarks.gold_model).
Best-of-n sampling and PPO without a KL penalty maximise each of them, and the gold model gives the true score. With
d = sqrt(KL to the SFT policy), the gain in true score is, by their equation 1,

    best of n:  d (alpha - beta d),        KL = ln n - (n - 1) / n
    RL:         d (alpha - beta ln d)

Both are linear in alpha and beta, which least squares fits to each seed. With the reward model of the middle size, PPO
also runs with the means against over-optimisation (REMEDIES), and both methods maximise ensembles of it: models of the
same pairs and other seeds. Intervals: Student's t over the seeds. Writes overoptimisation.csv (every point), the table
in overoptimisation.md, and overoptimisation.svg. What is finished is not repeated.
"""

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from benchmarks import gold_model
from benchmarks.cells import (
    Cell,
    CellOptions,
    Job,
    Variant,
    model_directories,
    resolve_chain,
    run_grid,
    run_jobs,
    run_models,
)
from benchmarks.overoptimisation_report import BEST_OF_N, PPO, Points, report
from rlhf import errors
from rlhf.config import parser
from rlhf.maths import best_of_n
from rlhf.storage import disk

WINDOW = 2
"""iterations of PPO whose mean is one point"""
REMEDIES = {"KL penalty": "--ppo.kl-coef 0.1"}
"""options of PPO that may move the peak, by their names"""
UNCERTAINTY = 0.5
"""weight of the members' variance"""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """A rule that makes one score of those of K reward models (Coste et al. 2023, 2310.02743)."""

    score: Callable[[Tensor], Tensor]
    """[K, ...] to [...]"""
    ppo: str
    """the same, as options of train.py"""


ENSEMBLES = {
    "ensemble's mean": Ensemble(
        lambda scores: scores.mean(0), "--ppo.reward-combine uncertain --ppo.uncertainty-coef 0"
    ),
    "mean less variance": Ensemble(
        lambda scores: scores.mean(0) - UNCERTAINTY * scores.var(0, correction=0),
        f"--ppo.reward-combine uncertain --ppo.uncertainty-coef {UNCERTAINTY}",
    ),
    "ensemble's worst": Ensemble(lambda scores: scores.amin(0), "--ppo.reward-combine min"),
}


class Options(CellOptions):
    """Sizes of the reward models' data, of best-of-n and of PPO."""

    pairs: tuple[int, ...] = Field((100, 400, 1400), min_length=1)
    """pairs that the reward models learn from, in about as many steps: few pairs are read several times"""
    seeds: int = Field(3, ge=2)
    """seeds 0, 1, ... of models, rows and sampling"""
    best_of: int = Field(256, ge=2)
    """largest n; each prompt gets as many responses of the SFT policy"""
    prompts: int = Field(64, ge=1)
    """prompts of best-of-n"""
    episodes: int = Field(1024, ge=1)
    """responses of PPO"""
    ppo: str = "--ppo.kl-coef 0 --ppo.learning-rate 1e-3"
    """options of PPO, as of train.py"""
    members: int = Field(4, ge=2)
    """reward models of an ensemble"""
    epochs: int = Field(2, ge=1)
    """passes of the reward models over the most pairs; all train for about as many steps"""
    gold: str = "build/gold"
    """directory of the gold reward models, one for each recipe and --options, trained if it does not exist"""
    output_dir: str = "runs/overoptimisation"
    """directory of models and finished parts"""
    results: str = "docs/results"
    """directory of the report"""

    @property
    def middle(self) -> int:
        """The size of the reward models with remedies and in ensembles."""
        return sorted(self.pairs)[len(self.pairs) // 2]


def reward_words(options: Options, pairs: int) -> tuple[str, ...]:
    """The options of a reward model that learns from so many pairs."""
    passes = options.epochs * math.ceil(max(options.pairs) / pairs)
    return "--reward.max-train-rows", str(pairs), "--reward.num-train-epochs", str(passes)


def reward_variants(options: Options) -> list[Variant]:
    """One for each size."""
    return [Variant(f"{pairs} pairs", reward_words(options, pairs)) for pairs in options.pairs]


def member_variants(options: Options) -> tuple[Variant, ...]:
    """The members of an ensemble beside the reward model of the middle size."""
    words = reward_words(options, options.middle)
    return tuple(Variant(f"member {k}", (*words, "--reward.seed", f"{k}000")) for k in range(1, options.members))


def proxy_variants(options: Options) -> tuple[Variant, ...]:
    """All reward models: one for each size, and the members."""
    return *reward_variants(options), *member_variants(options)


def variants(options: Options) -> dict[Variant, tuple[str, int]]:
    """The method and the pairs of each PPO: a reward model of each size, the remedies, the ensembles."""
    ppo = f"{options.ppo} --ppo.total-episodes {options.episodes}"
    methods = {
        Variant(reward.name, (*reward.words, *ppo.split())): (PPO, pairs)
        for reward, pairs in zip(reward_variants(options), options.pairs, strict=True)
    }
    middle, members = options.middle, member_variants(options)
    words = reward_words(options, middle)
    for name, remedy in REMEDIES.items():
        methods[Variant(f"{middle} pairs, {name}", (*words, *ppo.split(), *remedy.split()))] = f"{PPO}, {name}", middle
    for name, rule in ENSEMBLES.items():
        variant = Variant(f"{middle} pairs, {name}", (*words, *ppo.split(), *rule.ppo.split()), members)
        methods[variant] = f"{PPO}, {name}", middle
    return methods


def sample_file(options: Options, seed: int) -> Path:
    """The scores of a seed's responses: another file for other reward models or a changed recipe."""
    digest = options.digest(*(word for variant in proxy_variants(options) for word in variant.words))
    return Path(options.output_dir).absolute() / f"best-of-{options.best_of}-{options.prompts}-{digest}-{seed}.json"


def sample(options: Options, seed: int) -> None:
    """Responses of the SFT policy of a seed, scored by the judge and by every reward model; writes `sample_file`."""
    from rlhf import rewards
    from rlhf.config.options import PromptFileOptions
    from rlhf.evaluation.batch_generation import PromptSet, common_tokenizer, generation_setup
    from rlhf.text.dialogues import Template
    from rlhf.text.prompt_file import read_prompts

    ppo = resolve_chain(options.words).ppo
    proxies = {variant.name: variant for variant in proxy_variants(options)}
    directories = [model_directories(options, variant, seed) for variant in proxies.values()]
    policy_path = str(directories[0][0] / "model")
    prompts = [row for _, row in read_prompts(ppo.ppo_only_data_path[0])[: options.prompts]]
    rows = tuple(row for row in prompts for _ in range(options.best_of))
    tokenizer = common_tokenizer([policy_path], "auto")
    ids = Template(tokenizer).prompt_ids_many(prompts)
    repeated = tuple(each for each in ids for _ in range(options.best_of))
    settings = PromptFileOptions(
        seed=seed, response_length=ppo.response_length, temperature=ppo.temperature, dtype="fp32",
        rollout_batch_size=512,
    )  # fmt: skip
    prompt_set = PromptSet(settings, tokenizer, rows, repeated)
    setup = generation_setup(prompt_set)
    policy, backend = setup.load(policy_path), setup.backend()
    sources = [setup.source(str(ppo.judge), 128)]
    sources += [setup.source(f"learned,model={reward}", 128) for _, reward in directories]
    scores: list[list[float]] = [[] for _ in sources]
    for batch, uniforms in prompt_set.batches():
        samples = rewards.as_samples(backend(policy.lm, batch, settings, uniforms), tokenizer)
        for column, source in zip(scores, sources, strict=True):
            column += source(samples).tolist()
    result = dict(zip(["gold", *proxies], scores, strict=True))
    disk.write_json(sample_file(options, seed), result)


def proxy_scores(stored: Mapping[str, Tensor], options: Options) -> dict[tuple[str, int], Tensor]:
    """The scores that best-of-n selects by, for each method and size. stored: `sample_file`, by reward model."""
    scores = {(BEST_OF_N, pairs): stored[f"{pairs} pairs"] for pairs in options.pairs}
    names = [f"{options.middle} pairs", *(member.name for member in member_variants(options))]
    members = torch.stack([stored[name] for name in names])
    return scores | {(f"{BEST_OF_N}, {name}", options.middle): rule.score(members) for name, rule in ENSEMBLES.items()}


def best_of_n_points(options: Options, seed: int) -> tuple[list[Points], float]:
    """(points of each method and size, mean true score of the SFT policy)."""
    shape = options.prompts, options.best_of
    stored = {
        name: torch.tensor(scores, dtype=torch.float64).reshape(shape)
        for name, scores in json.loads(sample_file(options, seed).read_text(encoding="utf-8")).items()
    }
    gold = stored["gold"]
    ns = [2**power for power in range(1, int(math.log2(options.best_of)) + 1)]
    kl = np.array([best_of_n.kl(n) for n in ns])
    points = []
    for (method, pairs), proxy in proxy_scores(stored, options).items():
        means = np.array([[best_of_n.expected_score(proxy, of, n).mean().item() for of in (gold, proxy)] for n in ns])
        gains = means - [gold.mean().item(), proxy.mean().item()]
        points.append(Points(method, pairs, seed, kl, gains[:, 0], gains[:, 1], agreement(proxy, gold)))
    return points, gold.mean().item()


def agreement(proxy: Tensor, gold: Tensor) -> float:
    """Share of pairs of responses to one prompt, of different true scores, that the reward model orders as the judge.

    proxy, gold [P, K]; response j is paired with j + K / 2.
    """
    half = proxy.shape[1] // 2
    signs = [torch.sign(scores[:, :half] - scores[:, half : 2 * half]) for scores in (proxy, gold)]
    different = signs[1] != 0
    return (signs[0] == signs[1])[different].double().mean().item()


def ppo_points(cell: Cell, method: str, selected: Sequence[Points], pairs: int, start: float) -> Points:
    """Means of WINDOW iterations of a run. selected: best-of-n of its seed; start: true score of the SFT policy."""
    same_score = f"{BEST_OF_N}{method.removeprefix(PPO)}" if method.removeprefix(f"{PPO}, ") in ENSEMBLES else BEST_OF_N
    [share] = [p.agreement for p in selected if (p.method, p.pairs) == (same_score, pairs)]
    count = len(cell.kl) // WINDOW * WINDOW
    kl, gold, proxy = (
        np.array(values[:count]).reshape(-1, WINDOW).mean(1) for values in (cell.kl, cell.score, cell.reward)
    )
    return Points(method, pairs, cell.seed, kl.clip(0), gold - start, proxy - cell.reward[0], share)


def main() -> int:
    """Exit code 1 if a run failed."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.overoptimisation", "Over-optimisation.")
    gold = Path(options.gold) / options.digest()
    gold_model.prepare(options, gold)
    words = shlex.join(gold_model.judge_words(gold))
    options = options.model_copy(update={"options": f"{options.options} {words}"})
    run_models(options, [(variant, seed) for seed in range(options.seeds) for variant in proxy_variants(options)])
    logs = Path(options.output_dir).absolute() / "logs"
    jobs = [
        Job(f"best of n, seed {seed}", partial(sample, options, seed), logs / f"sample-{seed}.log")
        for seed in range(options.seeds)
        if not sample_file(options, seed).is_file()
    ]
    failed: list[Any] = run_jobs(jobs, options.processes)
    cells = run_grid(options, list(variants(options)))
    report(collect(options, cells), options.middle, Path(options.results))
    return 1 if failed or len(cells) < len(variants(options)) * options.seeds else 0


def collect(options: Options, cells: Sequence[Cell]) -> list[Points]:
    """All points of the seeds whose responses are scored."""
    by_name = {variant.name: method for variant, method in variants(options).items()}
    points: list[Points] = []
    for seed in range(options.seeds):
        if sample_file(options, seed).is_file():
            selected, start = best_of_n_points(options, seed)
            points += selected
            for cell in (cell for cell in cells if cell.seed == seed):
                method, pairs = by_name[cell.variant]
                points.append(ppo_points(cell, method, selected, pairs, start))
    return points


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))

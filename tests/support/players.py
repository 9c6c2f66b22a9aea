"""A tiny actor, critic and reference with everything step 3 puts between them, for any algorithm."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.prepare.encode import Demonstration, Prompt
from rlhf import adapters, plugins, rewards
from rlhf.distributed import collectives
from rlhf.engine.ema import EMA
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.training import Engine
from rlhf.generation import open_backend
from rlhf.maths.uniforms import uniforms
from rlhf.models.head import ScoreHead
from rlhf.models.policy import ActorCritic, Policy
from rlhf.models.scalar import HEAD, ScalarModel
from rlhf.models.trunk import PolicyRole, ScalarRole, Trunk
from rlhf.rewards import Source, Sources, WeightedSource
from rlhf.types import Credit, Metrics, Prompts, SampledRollout, Samples, ScoredRollout
from step3_ppo import algorithms, stage
from step3_ppo.algorithms import Iteration
from step3_ppo.kl import KLController, KLOptions
from step3_ppo.learner import Learner, selected_file
from step3_ppo.models import OnTrunk
from step3_ppo.ptx import Ptx
from step3_ppo.roles import ACTOR, CRITIC, REFERENCE
from step3_ppo.rollout import Reference, Scorer, ScoreScaling, generate, score
from step3_ppo.schedule import Schedule
from step3_ppo.update import CreditedRollout, Trained, gather, update
from tests.support import tiny

SMALL: dict[str, Any] = {
    "dtype": "fp32",
    "batch_size": 8,
    "num_generations": 2,
    "micro_batch_size": 3,
    "rollout_batch_size": 5,
    "response_length": 10,
    "num_ppo_epochs": 2,
    "num_mini_batches": 2,
    "learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
}
"""An iteration of 8 responses, cut up so that no micro-batch, minibatch or rollout batch is the whole."""

PROMPTS = tiny.prompts([3, 9, 8, 4])


ONE_STEP = {"num_ppo_epochs": 1, "num_mini_batches": 1}


def config_of(algorithm: str, **changes: Any) -> Any:
    own = ONE_STEP if algorithm == "a2c" else {}
    options = {**SMALL, **own, "algorithm": algorithm, **changes}
    return plugins.find("step3_ppo.algorithms", algorithm).Config(**options)


def count_of_words(samples: Samples) -> Tensor:
    """A score that differs between responses: how many words with an even number."""
    return torch.tensor([float(sum(int(word[1:]) % 2 == 0 for word in r.split())) for r in samples.responses])


def first(algorithm: Any) -> Iteration:
    """The first iteration, with the KL coefficient of the algorithm's options, for a loss on a step of 8 responses."""
    return Iteration(0, [], getattr(getattr(algorithm, "config", None), "kl_coef", 0.0), step_responses=8)


@dataclass(frozen=True)
class Players:
    config: Any
    actor: Engine
    critic: Engine | None
    algorithm: Any
    scorer: Scorer

    def sample(self, prompts: Prompts, seed: int = 1, backend: str = "loop") -> SampledRollout:
        draws = uniforms([(seed, i) for i in range(len(prompts))], self.config.response_length)
        ends = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
        drawing = open_backend(backend, **ends)
        return generate(self.actor.inference(), drawing, prompts, draws, self.config)

    def score(self, rollout: SampledRollout) -> ScoredRollout:
        return score(rollout, self.actor, self.critic, self.scorer)

    def update(self, rollout: ScoredRollout, credit: Credit | None = None) -> Metrics:
        """Of this process alone."""
        credit = self.algorithm.credit(rollout, first(self.algorithm)) if credit is None else credit
        draw = torch.Generator().manual_seed(0)
        return update(
            Trained(self.actor, self.critic, self.algorithm, first(self.algorithm)),
            CreditedRollout(rollout, credit),
            self.config,
            draw,
            range(len(rollout)),
        )

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights of both models, by name."""
        state = {}
        for name, engine in {"actor": self.actor, "critic": self.critic}.items():
            if engine is None:
                continue
            with engine.inference() as model:
                state |= {f"{name}.{n}": value.detach().clone() for n, value in model.state_dict().items()}
        return state


def language_model(dtype: torch.dtype = torch.float32) -> Any:
    """One that ends its responses after about ten tokens."""
    model = tiny.causal_lm()
    with torch.no_grad():
        model.get_output_embeddings().weight[tiny.EOS] *= 3
    return model.to(dtype)


def players(algorithm: str, **changes: Any) -> Players:
    config = config_of(algorithm, **changes)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
    roles = on_a_trunk(config) if config.share_trunk else None
    head = ScoreHead(0.1 * torch.randn(1, tiny.WIDTH, generator=torch.Generator().manual_seed(2)), dtype)
    frozen = Policy(language_model(dtype)) if roles is None else roles.reference
    reference = FrozenEngine(frozen, config.reference.follow(config), dtype)
    critic_options = config.model_copy(update={"learning_rate": config.critic_learning_rate})
    steps = 100
    built = algorithms.load(config)
    critic: Engine | None
    if config.critic_model == "shared":
        rates = {HEAD: config.critic_learning_rate}
        actor = critic = Engine(ActorCritic(language_model(dtype), head), config, steps, rates=rates)
    else:
        policy = Policy(language_model(dtype)) if roles is None else roles.actor
        actor, critic = Engine(policy, config, steps), None
        if built.value_loss is not None:
            value_model = ScalarModel(tiny.backbone().to(dtype), head) if roles is None else roles.critic
            critic = Engine(value_model, critic_options, steps)
    return Players(
        config=config,
        actor=actor,
        critic=critic,
        algorithm=built,
        scorer=Scorer(
            Reference(reference),
            Sources((WeightedSource("words", 1.0, count_of_words),)),
            tiny.tokenizer(),
            config,
            config.eval_rows,
            config.missing_eos_penalty,
            config.rescore,
        ),
    )


def on_a_trunk(config: Any) -> OnTrunk:
    """Policy, reference and critic as adapters on one language model."""
    trunk = Trunk(language_model())
    options = adapters.peft_options(config.adapter, trunk.lm.config)
    for seed, role in enumerate(part.on_trunk_as for part in (ACTOR, REFERENCE, CRITIC)):
        torch.manual_seed(max(1, seed))  # the policy starts as the reference
        trunk.create(role, options)
        for name, weight in trunk.lm.named_parameters():
            if role in name.split("."):
                torch.nn.init.normal_(weight, 0.0, 0.1)
    critic = ScalarRole(trunk, CRITIC.on_trunk_as, ScoreHead(torch.linspace(-1, 1, tiny.WIDTH)[None]), trained=True)
    actor, reference = (PolicyRole(trunk, part.on_trunk_as, part is ACTOR) for part in (ACTOR, REFERENCE))
    return OnTrunk(actor, reference, critic, {})


def on_stage(game: Players) -> Learner:
    """The same players as step 3 itself has them."""
    c = game.config
    backend = open_backend("loop", eos_token_id=tiny.EOS, pad_token_id=tiny.PAD)
    ema = None if c.ema_decay is None else EMA(game.actor, c.ema_decay)
    return Learner(
        c,
        game.actor,
        game.critic,
        game.scorer,
        game.algorithm,
        KLController(c if isinstance(c, KLOptions) else None),
        backend,
        ScoreScaling(c),
        None,
        ema,
        rewards.Context(tiny.tokenizer(), torch.device("cpu"), torch.float32, "", 1),
    )


def on_course(game: Players) -> Iterator[Metrics]:
    """The iterations of step 3 with these players."""
    prompts: Any = prompts_to_train_on()
    learner = on_stage(game)
    return stage.observe(stage.train(learner, prompts, Schedule(len(prompts), game.config)), learner)


def prompts_to_train_on() -> list[Prompt]:
    """Eight of them, numbered in the order of the list."""
    drawn = tiny.prompts([3, 9, 8, 4, 5, 6, 7, 2])
    items = zip(drawn.ids, drawn.mask, drawn.rows, strict=True)
    return [Prompt(tuple(ids[mask].tolist()), row) for ids, mask, row in items]


def scored_by(game: Players, source: Source) -> Players:
    return replace(game, scorer=replace(game.scorer, sources=Sources((WeightedSource("mine", 1.0, source),))))


def with_a_bad_score(rank: int) -> dict[str, Any]:
    """Two iterations of step 3, in the first of which one score on `rank` is NaN."""
    game = players("rloo", total_episodes=16)
    calls = iter([True, False])

    def source(samples: Samples) -> Tensor:
        scores = count_of_words(samples)
        if next(calls) and collectives.rank() == rank:
            scores[1] = torch.nan
        return scores

    steps = on_course(scored_by(game, source))
    before = game.weights()
    first = next(steps)
    unchanged = all(torch.equal(before[name], value) for name, value in game.weights().items())
    second = next(steps)
    checksum = sum(value.double().sum().item() for value in game.weights().values())
    return {"ranks": collectives.gather_objects((first, unchanged, "policy_loss" in second, checksum))}


def demonstrations(count: int) -> list[Demonstration]:
    """Rows of different lengths to go on learning beside the reward."""
    rows = tiny.sequences([5 + i % 7 for i in range(count)], [2] * count, width=12, seed=4)
    id_rows = [tuple(ids[mask].tolist()) for ids, mask in zip(rows.ids, rows.mask, strict=True)]
    return [Demonstration(ids, ((2, len(ids)),)) for ids in id_rows]


def a_step_of_everything() -> dict[str, Any]:
    """best_of_n with ptx, entropy and scaled scores on this rank's share of equal responses: what all ranks make."""
    options = {"ptx_coef": 0.5, "ptx_batch_size": 4, "num_mini_batches": 1, "entropy_coef": 0.1, "adam_epsilon": 1e-3}
    game = players("best_of_n", **options)
    mine = torch.arange(8).reshape(4, 2)[collectives.rank() :: collectives.world_size()].flatten()
    rollout = game.score(game.sample(twice_each())[mine])
    rows, credit = game.algorithm.select(rollout), game.algorithm.credit(rollout, first(game.algorithm))
    ptx = Ptx(demonstrations(8), game.config, game.config.seed, tiny.PAD)  # type: ignore[arg-type]
    scale = ScoreScaling(config_of("ppo", use_score_scaling=True, use_score_norm=True))
    scaled_scores = [score for part in collectives.gather_objects(scale(rollout.scores).tolist()) for score in part]
    trained = Trained(game.actor, None, game.algorithm, first(game.algorithm), ptx)
    scored, _ = gather(CreditedRollout(rollout, credit)[rows], rows.tolist(), 1, 1)
    metrics = update(trained, scored, game.config, torch.Generator().manual_seed(0), range(len(scored)))
    return {"metrics": metrics, "weights": game.weights(), "scaled": sorted(scaled_scores)}


def twice_each() -> Prompts:
    """Eight prompts: each of four stands twice in a row, as algorithms that compare responses want them."""
    return PROMPTS[torch.arange(4).repeat_interleave(2)]


SHARED: dict[str, Any] = {"critic_model": "shared", "vf_coef": 0.5}
PARITY: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo, 4 minibatches": ("ppo", {"num_mini_batches": 4}),
    "ppo, zero 2": ("ppo", {"zero_stage": 2}),
    "ppo, zero 3": ("ppo", {"zero_stage": 3}),
    "ppo, critic warm-up": ("ppo", {"critic_warmup_iterations": 1}),
    "grpo, groups of 4": ("grpo", {"num_generations": 4, "num_mini_batches": 4}),
    "grpo, resampled": ("grpo", {"num_generations": 2, "resample_groups": 2}),
    "best_of_n, 4 minibatches": ("best_of_n", {"num_mini_batches": 4, "batch_size": 16, "total_episodes": 32}),
    "trunk, zero 1": ("ppo", {"share_trunk": True, "adapter": "lora,r=4", "zero_stage": 1}),
    "trunk, zero 2": ("ppo", {"share_trunk": True, "adapter": "lora,r=4", "zero_stage": 2}),
    "shared": ("ppo", SHARED | {"num_mini_batches": 4}),
    "shared, zero 2": ("ppo", SHARED | {"zero_stage": 2, "entropy_coef": 0.1}),
    "shared, zero 3, warm-up": ("ppo", SHARED | {"zero_stage": 3, "critic_warmup_iterations": 1}),
}
"""Runs of step 3 that one process and several must agree on: what tests/options has not, which predicts every
algorithm on two ranks beside float64. docs/scaling.md has how far they are apart."""
QUICK = ("ppo, 4 minibatches", "grpo, groups of 4", "grpo, resampled", "shared", "trunk, zero 2")
"""Those of make test; the others are long."""


def two_iterations(name: str, folder: str) -> dict[str, Any]:
    """A run of PARITY: its metrics but for the seconds, and its last weights."""
    algorithm, options = PARITY[name]
    # A large epsilon bounds what rounding of a gradient can do to AdamW: lr * error / epsilon a step.
    game = players(algorithm, **{"total_episodes": 16, "adam_epsilon": 1e-3, "output_dir": folder, **options})
    selected_file(game.config).parent.mkdir(parents=True, exist_ok=True)
    timed = ("seconds_", "tokens_per_second")
    metrics = [{key: x for key, x in each.items() if not key.startswith(timed)} for each in on_course(game)]
    return {"metrics": metrics, "weights": game.weights()}

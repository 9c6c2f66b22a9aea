"""The declaration of step 3 and the options that all algorithms have. Those of one are in algorithm_options.py."""

import importlib
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from data.config import DataOptions
from rlhf import console, plugins
from rlhf.config import Config, Tree
from rlhf.config.declaration import Curve, Declaration, Frontier, Invariant, ModelWords, ReportParts, Result
from rlhf.config.mistakes import refused
from rlhf.config.options import (
    FrozenOptions,
    ModelPath,
    OwnEngineOptions,
    RunOptions,
    SamplingOptions,
    SharedOptimizerOptions,
    TrainingOptions,
)

POLICY_CARD = (
    "A language model after reinforcement learning from scores, with a KL penalty that keeps it near the model that it "
    "started from: the third stage of RLHF (InstructGPT, [arXiv 2203.02155](https://arxiv.org/abs/2203.02155))."
)
BEST_OF = "best_of.jsonl"
"""the file with the scores of several responses before training to a held-out prompt"""
STAGE = Declaration(
    name="step3_ppo",
    title="Reinforcement learning from scores.",
    help_groups={
        "reinforcement learning": (
            "actor-model", "reward-model", "algorithm", "reward", "judge", "response-length", "total-episodes",
            "batch-size", "kl-coef", "learning-rate", "critic-learning-rate", "eval-every",
        ),
    },
    models=("actor", "critic", "best", "ema"),
    policies=("actor", "best", "ema"),
    reference="actor_model",
    logs=("samples.jsonl", BEST_OF, "chosen.jsonl", "rollouts-*.jsonl"),
    losses=("policy_loss", "value_loss"),
    report=ReportParts(
        section="Step 3, reinforcement learning",
        curves=(
            Curve("Score", ("score", "eval_score")),
            Curve("Score for the algorithm", ("shaped_score",)),
            Curve("Perplexity of demonstrations", ("eval_perplexity",)),
            Curve("Right answers to multiple choice", ("eval_choices",)),
            Curve("Groups with equal scores", ("equal_groups",)),
            Curve("Deviation of scores within a group", ("group_score_std",)),
            Curve("Disagreement of reward models", ("score_disagreement",)),
            Curve("Judge", ("eval_judge",)),
            Curve("Worth the best of n", ("eval_score_worth_best_of", "eval_judge_worth_best_of")),
            Curve("Gain over that of best-of-n at the same KL", ("eval_score_efficiency",)),
            Curve("KL from the reference", ("kl", "eval_kl"), (0.0, "")),
            Curve("KL coefficient", ("kl_coef",)),
            Curve("Response length", ("response_length", "eval_response_length")),
            Curve("Truncated responses", ("truncated",)),
            Curve("Entropy", ("entropy",)),
            Curve("Distinct bigrams", ("distinct_2", "eval_distinct_2")),
            Curve("Repeated 4-grams", ("repeated_4_grams",)),
            Curve("Explained variance of the critic", ("explained_variance",), (0.0, ""), lowest=-1.0),
            Curve("Value loss", ("value_loss",)),
            Curve("KL from old to new policy", ("approx_kl",)),
            Curve("Clip fraction", ("clip_fraction", "value_clip_fraction")),
            Curve("Gradient norm", ("policy_grad_norm", "value_grad_norm")),
            Curve("Fine-tuning loss beside the reward", ("ptx_nll",)),
            Curve("Seconds", ("seconds_generate", "seconds_score", "seconds_update")),
            Curve("Speed", ("tokens_per_second",)),
        ),
        results=(
            Result("eval_judge", "judge", "judge", "judge", independent=True),
            Result("eval_score", "score", "score", "reward"),
            Result("eval_kl", "KL from the reference, nats"),
            Result("eval_judge_first_place", "verdicts of the judge for the first place", share=True),
            Result("eval_judge_flipped", "verdicts of the judge that change with the order", share=True),
            Result("eval_judge_unread", "responses without a score of the judge", share=True),
            Result("eval_response_length", "response length, tokens"),
            Result("eval_ended", "responses that end with EOS", share=True),
            Result("eval_distinct_2", "distinct bigrams", share=True),
            Result("eval_ref_nll", "negative log-likelihood under the reference, nats per token"),
            Result("eval_perplexity", "perplexity of demonstrations", cost=True),
            Result("eval_choices", "multiple choice, right answers", share=True, cost=True),
        ),
        frontiers=(
            Frontier("Score against KL", (("kl", "score", "training"), ("eval_kl", "eval_score", "held out"))),
            Frontier("Judge against KL", (("eval_kl", "eval_judge", "held out"),)),
        ),
        invariants=(
            Invariant("first ratio is 1: its standard deviation", "first_ratio_std", 0.0, 1e-3, 5e-2),
            Invariant("approx_kl of the first minibatch, before any update", "first_approx_kl", -1e-3, 1e-3, 5e-2),
            Invariant("policy is its reference before training: KL, nats", "eval_kl", -1e-3, 1e-3, 5e-2, kind="eval"),
            Invariant("policy has moved: changed responses", "eval_changed", 1e-3, 1.0, kind="eval", at_end=True),
        ),
        samples="samples.jsonl",
        distance="kl",
        alarms=("over_optimisation", "overfitting", "members_disagree", "judge_diverges", "policy_collapsed"),
    ),
    cards={
        "actor": ModelWords("policy after RLHF", POLICY_CARD, "text-generation", ("actor_model",), ("rlhf",)),
        "best": ModelWords(
            "best policy of a run of RLHF", f"{POLICY_CARD} These are the weights of its best evaluation.",
            "text-generation", ("actor_model",), ("rlhf",),
        ),
        "ema": ModelWords(
            "averaged policy of a run of RLHF", f"{POLICY_CARD} The weights are an average over its optimizer steps.",
            "text-generation", ("actor_model",), ("rlhf",),
        ),
        "critic": ModelWords(
            "critic of a run of RLHF",
            "The critic of reinforcement learning from scores: it predicts the return of a response, which trained the "
            "policy. It is no reward model: it has learned from responses of that policy only.",
            "text-classification", ("critic_model", "actor_model"), ("critic",),
        ),
    },
)  # fmt: skip
MAKERS = {"actor_model": "step1_sft", "reward_model": "step2_reward"}
"""Models that this stage starts from, and the stage that makes each."""
REWARD, POLICY, SHARED = "reward", "policy", "shared"
"""Words for what the critic starts from."""


class ScoreOptions(Config):
    """Scores before the algorithm: scaled, then clipped."""

    use_score_scaling: bool = False
    """divide scores by their standard deviation over the run so far"""
    use_score_norm: bool = False
    """first subtract their mean over the run so far; needs use_score_scaling"""
    score_clip: float | None = Field(None, gt=0)
    """clip scores to +- score_clip, after scaling"""


class UpdateOptions(SamplingOptions, SharedOptimizerOptions):
    """How an iteration's rollout is divided into optimizer steps, and the loss of a step."""

    num_mini_batches: int = Field(1, ge=1)
    """optimizer steps in one pass over an iteration's rollout"""
    num_ppo_epochs: int = Field(1, ge=1)
    """passes over an iteration's rollout"""
    target_kl: float | None = Field(None, gt=0)
    """approx_kl of an optimizer step above which the other steps of the iteration are skipped; needs three steps or
    more in an iteration, because the first one has an approx_kl of 0"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the policy's entropy, nats per token, which the actor also maximises"""
    vf_coef: float = Field(0.1, ge=0)
    """weight of the critic's loss beside the policy's, with critic_model shared"""
    rescore: bool = True
    """compute the policy's log-probs of a rollout again before the update; off: the KL to the reference is of the
    log-probs of sampling, and the old log-probs are those of the update's own forward pass, which saves one of four
    scoring passes. Needs one optimizer step an iteration"""


class IterationOptions(SharedOptimizerOptions):
    """The number of iterations, and their size."""

    TOTALS: ClassVar[frozenset[str]] = frozenset({"total_episodes"})

    total_episodes: int = Field(4096, ge=1)
    """responses sampled in the whole run, over all devices; rounded down to whole iterations"""
    batch_size: int = Field(64, ge=1)
    """responses in an iteration, over all devices"""
    num_generations: int = Field(1, ge=1)
    """responses sampled for each prompt; batch_size counts responses"""
    resample_groups: int = Field(0, ge=0)
    """times that an iteration draws another prompt for one to whose responses all scores are equal (dynamic sampling);
    needs num_generations of 2 or more"""


class PtxOptions(SharedOptimizerOptions):
    """The fine-tuning loss beside the policy loss."""

    ptx_coef: float = Field(0.0, ge=0)
    """weight of the fine-tuning loss in every optimizer step of the actor (PPO-ptx); 0: off"""
    ptx_data_path: tuple[str, ...] = ()
    """data of the fine-tuning loss; none: the rows of data_path for fine-tuning. Rows are skipped if their prompt is
    held out for evaluation, or is a prompt of the reward model or of PPO in this run"""
    ptx_objective: Literal["response", "text"] = "response"
    """response = learn responses to prompts; text = rows of plain text, packed as in fine-tuning: a token also attends
    to the earlier texts in its context"""
    ptx_batch_size: int = Field(16, ge=1)
    """rows of the fine-tuning loss in an optimizer step, over all devices"""


class Step3Config(DataOptions, IterationOptions, UpdateOptions, PtxOptions, ScoreOptions, TrainingOptions, RunOptions):
    """Reinforcement learning from scores: models, rewards, lengths and batches of the run."""

    FREE: ClassVar[frozenset[str]] = frozenset({"rollout_batch_size", "actor", "critic", "reference", "reward_models"})
    NOTED: ClassVar[frozenset[str]] = frozenset({"eval_every", "patience", "export_rollouts", "multiple_choice"})

    algorithm: str = "ppo"
    """a name in step3_ppo/algorithms/"""
    actor_model: ModelPath | None = None
    """policy to start from, also the reference; by default OUT/step1_sft"""
    reward_model: ModelPath | None = None
    """trained reward model; by default OUT/step2_reward"""
    critic_model: ModelPath | None = None
    """what the critic starts from, if the algorithm has one: reward = the reward model, policy = a copy of the actor's
    model with a new value head, shared = a new value head on the actor itself (one model computes both), or the path of
    a trained reward model or critic; by default reward if that is a score source or named by reward_model, and has the
    actor's tokenizer; else policy"""
    reward: tuple[str, ...] = ("learned",)
    """score sources, each with an optional weight before it: learned (the reward model), another name in rlhf/rewards/
    with its options, or file.py:function; e.g. learned "0.5*length,target=40" (quote the star)"""
    reward_combine: Literal["sum", "min", "uncertain", "normalized"] = "sum"
    """how the weighted sources are combined into one score; uncertain = the mean of an ensemble's members, less where
    they disagree; normalized = the sum, of which the algorithm gets each source's part relative to the other responses
    to the same prompt (GDPO); needs num_generations of 2 or more"""
    uncertainty_coef: float = Field(0.1, ge=0)
    """reward_combine uncertain: weight of the variance over the members, which is subtracted from their mean"""
    judge: str | None = None
    """score source for evaluation only; no stage trains on it"""
    multiple_choice: str | None = None
    """questions with choices and an answer, as MMLU, ARC and C-Eval have them: a file, a directory or OWNER/NAME on the
    hub. The policy answers them before the training and at each evaluation, which says what the training costs"""
    critic_warmup_iterations: int = Field(0, ge=0)
    """iterations at the start in which only the critic learns, from the rewards that responses of the unchanged policy
    got (value pretraining); useful with a new value head"""
    critic_pretraining_epochs: float = Field(0, ge=0)
    """passes over the pairs of the reward model, before the first iteration, in which the critic that starts from it
    learns to predict at each token of a response the score of the whole; 0.25: over a quarter of them; 0: none"""
    learning_rate: float = Field(1e-6, ge=0)
    """peak learning rate of the actor"""
    critic_learning_rate: float = Field(5e-6, ge=0)
    """peak learning rate of the critic; with critic_model shared, of the value head"""
    adam_epsilon: float = Field(1e-5, gt=0)
    """added to AdamW's denominator"""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """weight of the old average at each optimizer step of the actor; the averaged actor is saved as OUT/step3_ppo/ema.
    None: no average"""
    missing_eos_penalty: float | None = Field(None, ge=0)
    """subtracted from the score of a response that was cut before its EOS (before scaling and clipping)"""
    rollout_backend: str = "loop"
    """backend that samples responses: loop, vllm (for GPUs, installed with the extra vllm; it uses memory_share=0.4 of
    the GPU during a rollout), another name in rlhf/generation/ or a Python file, with its options"""
    rollout_batch_size: int = Field(64, ge=1)
    """responses generated (vllm: always all), or scored by the reward model, at once on one device; changes memory and
    speed, not the random numbers"""
    eval_samples: int = Field(200, ge=1)
    """held-out prompts sampled before and after; limited by max_eval_rows"""
    eval_every: int | None = Field(None, ge=0)
    """iterations between evaluations; none: a fifth of the run if they sample at most a tenth of its responses, else 0:
    only before and after"""
    export_rollouts: bool = False
    """write every response, with its scores and KL, to OUT/step3_ppo/rollouts-RANK.jsonl"""
    keep_best: Literal["eval_score", "eval_judge"] | None = None
    """keep the policy with the highest of these numbers in OUT/step3_ppo/best; needs eval_every"""
    patience: int | None = Field(None, ge=1)
    """evaluations in a row without a better keep_best after which the run ends; none: no limit"""

    actor: OwnEngineOptions = OwnEngineOptions()
    """engine options of the actor; an option that is not set here is as for all models"""
    critic: OwnEngineOptions = OwnEngineOptions()
    """engine options of the critic; an option that is not set here is as for all models"""
    reference: FrozenOptions = FrozenOptions()
    """engine options of the reference, unless it is the actor with its adapter off; an option that is not set here is
    as for the actor"""
    reward_models: FrozenOptions = FrozenOptions()
    """engine options of learned reward models and judges; an option that is not set here is as for the critic"""

    @property
    def actor_options(self) -> Self:
        """The options with which the actor is trained."""
        return self.actor.override(self)

    @property
    def critic_options(self) -> Self:
        """The options with which the critic is trained."""
        return self.critic.override(self.model_copy(update={"learning_rate": self.critic_learning_rate}))

    @property
    def reference_options(self) -> FrozenOptions:
        """The options of a reference that is a model of its own."""
        return self.reference.follow(self.actor_options)

    @property
    def reward_model_options(self) -> FrozenOptions:
        """The options of learned reward models and judges."""
        return self.reward_models.follow(self.critic_options)

    @classmethod
    def adopt(cls, values: Tree, source: object) -> Tree:
        """The values of a file that is for another algorithm, without what only that one accepts; a line names it."""
        values = super().adopt(values, source)
        other = importlib.import_module(f"{__package__}.algorithm_options").options(str(values.get("algorithm", "ppo")))
        foreign = refused(cls, values) - refused(other, values)
        if foreign:
            names = ", ".join(f"{name} {values[name]}" for name in values if name in foreign)
            console.status(f"{source}: left out, because the algorithm that was chosen refuses it: {names}")
        return {name: value for name, value in values.items() if name not in foreign}

    @field_validator("reward", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @property
    def iterations_between_evaluations(self) -> int:
        """`eval_every`, or its default: four evaluations between the first and the last, if they are cheap."""
        if self.eval_every is not None:
            return self.eval_every
        fifth = self.total_episodes // self.batch_size // 5
        return fifth if fifth > 1 and 4 * self.eval_samples * 10 <= self.total_episodes else 0

    def idle(self) -> Iterator[str]:
        if self.resample_groups and self.num_generations == 1:
            yield "--resample-groups with --num-generations 1"
        if self.reward_combine == "normalized" and self.num_generations == 1:
            yield "--reward-combine normalized with --num-generations 1"
        if self.use_score_norm and not self.use_score_scaling:
            yield "--use-score-norm without --use-score-scaling"
        if self.ptx_data_path and self.ptx_coef == 0:
            yield "--ptx-data-path with --ptx-coef 0"
        if self.target_kl is not None and self.num_ppo_epochs * self.num_mini_batches < 3:
            # The first step has an approx_kl of 0, and after the second there is nothing to skip.
            yield f"--target-kl {self.target_kl:g} with fewer than three optimizer steps in an iteration"
        if self.vf_coef != type(self).model_fields["vf_coef"].default and self.critic_model != SHARED:
            yield f"--vf-coef {self.vf_coef:g} without --critic-model shared: another critic has its own optimizer"
        if self.keep_best is not None and not self.iterations_between_evaluations:
            yield f"--keep-best {self.keep_best} without --eval-every"
        if self.patience is not None and self.keep_best is None:
            yield f"--patience {self.patience} without --keep-best"

    @model_validator(mode="after")
    def _without_rescoring_the_policy_is_the_sampler(self) -> Self:
        if self.rescore:
            return self
        if self.num_ppo_epochs * self.num_mini_batches > 1:
            raise ValueError(
                "--no-rescore: expected --num-ppo-epochs 1 and --num-mini-batches 1, as later steps have another policy"
            )
        if self.critic_model == SHARED:
            raise ValueError(f"--no-rescore: got --critic-model {SHARED}, whose values need that pass; remove one")
        if plugins.parse_spec(self.rollout_backend)[0] != "loop":
            raise ValueError(f"--no-rescore: got --rollout-backend {self.rollout_backend}, expected loop")
        return self

    @model_validator(mode="after")
    def _best_by_the_judge_needs_one(self) -> Self:
        if self.keep_best == "eval_judge" and self.judge is None:
            raise ValueError("keep_best eval_judge: expected a judge")
        return self

"""The learner of step 3: its models and the algorithm, and what an iteration does with them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from data.dataset import PromptDataset
from data.prepare.encode import Prompt
from rlhf import rewards
from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.engine.ema import EMA
from rlhf.engine.training import Engine
from rlhf.generation import Backend
from rlhf.maths.uniforms import MINI_BATCHES, torch_stream
from rlhf.text.messages import format_prompt, variable_columns
from rlhf.types import Credit, Metrics, SampledRollout, Samples, ScoredRollout
from step3_ppo.algorithms import Algorithm, Iteration
from step3_ppo.config import STAGE, Step3Config
from step3_ppo.kl import KLController
from step3_ppo.metrics import Clock, kl_and_deviation
from step3_ppo.ptx import Ptx
from step3_ppo.rollout import Scorer, ScoreScaling, generate, nonfinite, prompts_and_uniforms, score
from step3_ppo.update import CreditedRollout, Trained, gather, update


@dataclass(frozen=True, slots=True)
class Learner:
    """The trained models (critic None: the algorithm has none; it may be the actor's engine), the scorer with the
    frozen models, and the algorithm."""

    config: Step3Config
    actor: Engine
    critic: Engine | None
    scorer: Scorer
    algorithm: Algorithm
    kl: KLController
    backend: Backend
    scaling: ScoreScaling
    ptx: Ptx | None
    ema: EMA | None
    context: rewards.Context
    """with which score sources are opened"""
    clock: Clock = field(default_factory=Clock)

    def sample(self, prompts: PromptDataset[Prompt], indices: Sequence[int], number: int) -> SampledRollout:
        """The policy's response to the prompt at each of `indices`, with repetitions. number: of the rollout"""
        pad_token_id = self.scorer.tokenizer.pad_token_id
        batch, uniforms = prompts_and_uniforms(prompts, indices, self.config, pad_token_id, number)
        return generate(self.actor.inference(), self.backend, batch, uniforms, self.config)

    def generate(self, prompts: PromptDataset[Prompt], iteration: Iteration) -> SampledRollout:
        """Responses y ~ pi_old(. | x) to the prompts of an iteration."""
        self.clock.start()
        rollout = self.sample(prompts, iteration.indices, iteration.number)
        self.clock.lap("generate")
        return rollout

    def score(self, rollout: SampledRollout) -> ScoredRollout:
        """The rollout with scores, log-probs of policy and reference, and the critic's values."""
        scored = score(rollout, self.actor, self.critic, self.scorer, self.config.num_generations)
        self.clock.lap("score")
        return scored

    def nonfinite(self, rollout: ScoredRollout) -> dict[str, list[int]]:
        """What is not a finite number, with the rows [b] of this rank that have it."""
        return nonfinite(rollout, self.scores_by_source(rollout))

    def scores_by_source(self, rollout: ScoredRollout) -> dict[str, Tensor]:
        """The scores [B] of each reward source, by its name."""
        return dict(zip(self.scorer.sources.names, rollout.source_scores.unbind(1), strict=True))

    def shape(self, rollout: ScoredRollout) -> ScoredRollout:
        """The rollout with the scores that the algorithm gets: normalized, scaled, clipped, if the options say so."""
        scores, group = rollout.scores, self.config.num_generations
        if self.config.reward_combine == "normalized" and group > 1:
            scores = self.scorer.sources.normalized(rollout.source_scores, group)
        return replace(rollout, scores=self.scaling(scores))

    def steer(self, iteration: Iteration, rollout: ScoredRollout) -> Iteration:
        """The iteration with its coefficient of the KL, which follows from the KL of its own shaped rollout."""
        # The policy of a warm-up is still the reference.
        if self.kl.budget is not None and not iteration.pretrains_critic:
            kl, deviation = kl_and_deviation(rollout)
            self.kl.observe(kl, deviation, iteration.number - self.config.critic_warmup_iterations)
        return replace(iteration, kl_coef=self.kl.coef)

    def update(self, rollout: ScoredRollout, credit: Credit, iteration: Iteration) -> Metrics:
        """Optimizer steps on the responses of all ranks, or on those that the algorithm selects."""
        credited, indices, group = CreditedRollout(rollout, credit), iteration.indices, self.config.num_generations
        if self.algorithm.select is not None:
            rows = self.algorithm.select(rollout)
            credited, indices, group = credited[rows], [indices[i] for i in rows], 1
            samples = rewards.as_samples(credited.rollout, self.scorer.tokenizer)
            append_selected(selected_file(self.config), iteration.number + 1, credited.rollout, samples)
        actor = None if iteration.pretrains_critic else self.actor
        trained = Trained(actor, self.critic, self.algorithm, iteration, self.ptx, self.ema)
        shuffle = torch_stream(MINI_BATCHES, self.config.seed, iteration.number)
        credited, indices = gather(credited, indices, group, self.config.num_mini_batches)
        metrics = update(trained, credited, self.config, shuffle, indices)
        self.clock.lap("update")
        return metrics

    def state_dict(self) -> Tree:
        """State beside the weights: the KL coefficient, the statistics of the scores, and the algorithm's."""
        state = self.kl.state_dict() | {"scores": self.scaling.state_dict()}
        return state if self.algorithm.state_dict is None else state | {"algorithm": self.algorithm.state_dict()}

    def load_state_dict(self, state: Tree) -> None:
        """Resume from there."""
        self.kl.load_state_dict(state)
        self.scaling.load_state_dict(state["scores"])
        if self.algorithm.load_state_dict is not None and "algorithm" in state:
            self.algorithm.load_state_dict(state["algorithm"])


def selected_file(config: Step3Config) -> Path:
    """The file of the responses that an algorithm selects to learn from."""
    return Path(config.output_dir) / STAGE.name / "chosen.jsonl"


def append_selected(path: Path, iteration: int, selected: ScoredRollout, samples: Samples) -> None:
    """Append a row for each of the selected responses of all ranks: prompt, response, score, iteration, and what
    the chat template gets beside the prompt.

    `samples` is the text of `selected`. `--sft-only-data-path FILE` learns from it, or `--data-path FILE --data-split
    1,0,0`. A response that was cut before its EOS is skipped: as a demonstration it would teach the model to end
    there. Rank 0 writes; every rank must call.
    """
    columns = zip(selected.rows, samples.responses, selected.scores.tolist(), selected.ended.tolist(), strict=True)
    own = [
        {"prompt": format_prompt(row.prompt), "response": response, "score": score, "iteration": iteration}
        | variable_columns(row)
        for row, response, score, ended in columns
        if ended
    ]
    rows_of_ranks = collectives.gather_replicas(own)
    if collectives.is_main():
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for rows in rows_of_ranks for row in rows)

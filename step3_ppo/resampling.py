"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a prompt to whose responses all scores are equal teaches
nothing where the group's mean is the baseline, and gives its place in the iteration to another prompt."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from data.dataset import PromptDataset
from data.prepare.encode import Prompt
from rlhf.distributed import collectives
from rlhf.maths.uniforms import RESAMPLING, stream
from rlhf.types import ScoredRollout
from step3_ppo.algorithms import Iteration
from step3_ppo.learner import Learner
from step3_ppo.metrics import equal


def resample(
    learner: Learner, prompts: PromptDataset[Prompt], iteration: Iteration, rollout: ScoredRollout
) -> tuple[Iteration, ScoredRollout]:
    """The iteration and its rollout with other prompts for groups of equal scores, drawn up to `resample_groups` times.

    The other prompts are drawn from those that the iteration does not have yet, by a random stream of its own: the
    prompts of later iterations do not change, and the number of ranks changes nothing. All ranks call this together.
    """
    config, group = learner.config, learner.config.num_generations
    if group == 1 or not config.resample_groups:
        return iteration, rollout
    used = collectives.of_all_ranks(iteration.indices[::group])
    for attempt in range(config.resample_groups):
        is_equal = equal(rollout.scores.double().view(-1, group)).tolist()
        positions = [g for g, of_equal_scores in enumerate(collectives.of_all_ranks(is_equal)) if of_equal_scores]
        unused = sorted({*range(len(prompts))} - {*used})
        replacements = (
            stream(RESAMPLING, config.seed, iteration.number, attempt).permutation(unused)[: len(positions)].tolist()
        )
        if not replacements:
            break
        used += replacements
        ranks, rank = collectives.dp_size(), collectives.dp_rank()
        drawn = {g // ranks: index for g, index in zip(positions, replacements, strict=False) if g % ranks == rank}
        # A rank without one takes part with its first prompt, whose responses are those that it has already.
        drawn = drawn or {0: iteration.indices[0]}
        sampled = learner.sample(prompts, [index for index in drawn.values() for _ in range(group)], iteration.number)
        learner.clock.lap("generate")
        rollout = _replaced(rollout, learner.score(sampled), [*drawn], group)
        groups = dict(enumerate(iteration.indices[::group])) | drawn
        indices = [index for index in groups.values() for _ in range(group)]
        iteration = replace(iteration, indices=indices, resampled=iteration.resampled + len(replacements))
    return iteration, rollout


def _replaced(rollout: ScoredRollout, new: ScoredRollout, groups: Sequence[int], group: int) -> ScoredRollout:
    """`rollout` with the groups of `new` in place of those with these numbers."""
    width = [max(x.shape[1] for x in pair) for pair in ((rollout.prompt_ids, new.prompt_ids), (rollout.mask, new.mask))]
    both = type(rollout).concatenated([part.widened(*width) for part in (rollout, new)])
    rows = torch.arange(len(rollout)).view(-1, group)
    rows[list(groups)] = len(rollout) + torch.arange(len(new)).view(-1, group)
    return both[rows.flatten()].trimmed()

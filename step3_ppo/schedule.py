"""The schedule of step 3: which iterations are left, and what each of them is given."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from data.batches import Batches
from data.dataset import PromptDataset
from data.prepare.encode import Prompt
from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.engine.nonfinite import Tolerance
from rlhf.types import ScoredRollout
from step3_ppo.algorithms import Iteration
from step3_ppo.config import IterationOptions, Step3Config


def iterations(options: IterationOptions) -> int:
    """Rollout-update cycles of the whole run."""
    return options.total_episodes // options.batch_size


def computed_tokens(config: Step3Config, prompts: PromptDataset[Prompt]) -> float:
    """Tokens of all prompts and responses of the run, once for each pass of actor and critic; sampling and scoring take
    about as long as one more pass of both."""
    row = float(prompts.row_lengths.mean()) + config.response_length
    return iterations(config) * config.batch_size * row * 2 * (config.num_ppo_epochs + 1)


class Schedule:
    """The iterations that are left, with the prompts of this rank; and how many in a row were skipped."""

    def __init__(self, prompts: int, config: Step3Config) -> None:
        """prompts: their number in the data"""
        self._config = config
        size = config.batch_size // config.num_generations
        ranks = (collectives.dp_rank(), collectives.dp_size())
        self._batches = Batches(prompts, size, config.seed, ranks)
        self.done = 0
        self._tolerance = Tolerance(config.max_bad_steps)

    def __iter__(self) -> Iterator[Iteration]:
        total, copies = iterations(self._config), self._config.num_generations
        for indices in islice(self._batches.until_epoch(total), max(0, total - self.done)):
            number, self.done = self.done, self.done + 1
            pretrains_critic = number < self._config.critic_warmup_iterations
            repeated = [i for i in indices for _ in range(copies)]
            yield Iteration(number, repeated, pretrains_critic=pretrains_critic)

    def skips(self, iteration: Iteration, rollout: ScoredRollout, problems: Mapping[str, Sequence[int]]) -> bool:
        """Whether some rank has a number that is not finite, so that no rank may learn from this rollout.

        problems: those of this rank, with the rows [b] that have them
        Raises: NonFiniteError after `max_bad_steps` such iterations in a row.
        """
        if not any(collectives.gather_objects(bool(problems))):
            self._tolerance.reset()
            return False
        rows = sorted({iteration.indices[row] for rows in problems.values() for row in rows})
        self._tolerance.skip(f"iteration {iteration.number + 1}", list(problems), rows)
        return True

    def state_dict(self) -> Tree:
        """The iterations done, and the position in the prompts."""
        return {"done": self.done, "prompts": self._batches.state_dict(), "bad_in_a_row": self._tolerance.in_a_row}

    def load_state_dict(self, state: Tree) -> None:
        self.done, self._tolerance.in_a_row = state["done"], state["bad_in_a_row"]
        self._batches.load_state_dict(state["prompts"])

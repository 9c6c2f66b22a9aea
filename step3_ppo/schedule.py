"""The schedule of step 3: which iterations are left, and the prompts of each."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from data.batches import Batches
from data.build.encode import Prompt
from data.dataset import PromptDataset
from rlhf.distributed import collectives
from rlhf.engine.nonfinite import Tolerance
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
    """The iterations that are left, each with the prompts of this rank; and how many in a row were skipped."""

    def __init__(self, prompts: int, options: IterationOptions, seed: int) -> None:
        """prompts: their number in the data. seed: of their order."""
        self._total, self._copies = iterations(options), options.num_generations
        size = options.batch_size // options.num_generations
        self._batches = Batches(prompts, size, seed, (collectives.data_rank(), collectives.data_world_size()))
        self.done = 0
        self.tolerance = Tolerance(options.max_bad_steps)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Each iteration's number, from 0, and the indices of its prompts, each `num_generations` times in a row."""
        for indices in islice(self._batches.until_epoch(self._total), max(0, self._total - self.done)):
            self.done += 1
            yield self.done - 1, [i for i in indices for _ in range(self._copies)]

    def state_dict(self) -> dict[str, Any]:
        """The iterations done, and the position in the prompts."""
        return {"done": self.done, "prompts": self._batches.state_dict(), "bad_in_a_row": self.tolerance.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.tolerance.in_a_row = state["done"], state["bad_in_a_row"]
        self._batches.load_state_dict(state["prompts"])

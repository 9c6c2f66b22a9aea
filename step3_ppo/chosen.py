"""The responses that an algorithm chose to learn from, as a file of demonstrations."""

import json
from pathlib import Path
from typing import Any

from rlhf.distributed import collectives
from rlhf.text.prompt_file import format_prompt
from rlhf.types import Rollout, Samples


def append_chosen(path: Path, iteration: int, chosen: Rollout, samples: Samples) -> None:
    """Append a row for each of the chosen responses of all ranks: prompt, response, score, iteration.

    `samples` is the text of `chosen`. `--sft-only-data-path FILE` learns from it, or `--data-path FILE --data-split
    1,0,0`. A response that was cut before its EOS is left out: a demonstration ends, so the row would teach to end
    there. Rank 0 writes; every rank must call.
    """
    mine = [row for row, ended in zip(_rows(iteration, chosen, samples), chosen.ended.tolist(), strict=True) if ended]
    parts = collectives.gather_shares(mine)
    if collectives.is_main():
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for part in parts for row in part)


def _rows(iteration: int, chosen: Rollout, samples: Samples) -> list[dict[str, Any]]:
    assert chosen.scores is not None
    return [
        {"prompt": format_prompt(row.prompt), "response": response, "score": score, "iteration": iteration}
        for row, response, score in zip(chosen.rows, samples.responses, chosen.scores.tolist(), strict=True)
    ]

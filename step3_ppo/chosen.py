"""A file of demonstrations: the responses that an algorithm selected to learn from."""

import json
from pathlib import Path
from typing import Any

from rlhf.distributed import collectives
from rlhf.text.prompt_file import format_prompt
from rlhf.types import Samples, ScoredRollout


def append_chosen(path: Path, iteration: int, chosen: ScoredRollout, samples: Samples) -> None:
    """Append a row for each of the chosen responses of all ranks: prompt, response, score, iteration.

    `samples` is the text of `chosen`. `--sft-only-data-path FILE` learns from it, or `--data-path FILE --data-split
    1,0,0`. A response that was cut before its EOS is skipped: as a demonstration it would teach the model to end
    there. Rank 0 writes; every rank must call.
    """
    own = [row for row, ended in zip(_rows(iteration, chosen, samples), chosen.ended.tolist(), strict=True) if ended]
    shares = collectives.gather_shares(own)
    if collectives.is_main():
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for share in shares for row in share)


def _rows(iteration: int, chosen: ScoredRollout, samples: Samples) -> list[dict[str, Any]]:
    return [
        {"prompt": format_prompt(row.prompt), "response": response, "score": score, "iteration": iteration}
        for row, response, score in zip(chosen.rows, samples.responses, chosen.scores.tolist(), strict=True)
    ]

"""UltraFeedback (arXiv 2310.01377) in pairs: HuggingFaceH4/ultrafeedback_binarized.

chosen and rejected are dialogues that repeat the prompt; the higher score is preferred, and is the demonstration; equal
scores are a tie. Each phase has its own split: train_sft, train_prefs, train_gen; `split` takes one for all phases
(test_sft, test_prefs, test_gen too).
"""

from data.read.columns import before_response, kept, messages, number, opening
from data.read.places import TableConfig, open_place
from data.read.records import Phase, Record, Unusable
from data.read.table import Ranked, Table

HUB_IDS = ("HuggingFaceH4/ultrafeedback_binarized",)
SPLITS: dict[Phase, str] = {"sft": "train_sft", "reward": "train_prefs", "ppo": "train_gen"}


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse, splits=SPLITS)


def parse(record: Record, where: str) -> Ranked:
    """Raises: UserError, Unusable."""
    chosen, rejected = (messages(record, column, where) for column in ("chosen", "rejected"))
    scores = [number(record, column, where) for column in ("score_chosen", "score_rejected")]
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise Unusable("dialogue does not end in the assistant's turn")
    if chosen[:-1] != rejected[:-1]:
        raise Unusable("chosen and rejected part before the last turn")
    prompt = before_response(chosen[:-1])
    responses = tuple(zip((chosen[-1].content, rejected[-1].content), scores, strict=True))
    return Ranked(prompt, responses, opening(prompt), kept(record, "prompt_id"))

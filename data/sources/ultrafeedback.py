"""UltraFeedback (arXiv 2310.01377) in pairs: HuggingFaceH4/ultrafeedback_binarized.

chosen and rejected are dialogues that repeat the prompt; the higher score is preferred, and is the demonstration; equal
scores are a tie. Each phase has its own split: train_sft, train_prefs, train_gen; `split` chooses one for all phases
(test_sft, test_prefs, test_gen too).
"""

from data.read.columns import as_prompt, first_user_text, read_messages, read_number, select_columns
from data.read.paths import TableConfig, open_path
from data.read.records import Phase, Record, Unusable
from data.read.table import Ranked, Table

HUB_IDS = ("HuggingFaceH4/ultrafeedback_binarized",)
SPLITS: dict[Phase, str] = {"sft": "train_sft", "reward": "train_prefs", "ppo": "train_gen"}


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse, splits=SPLITS)


def parse(record: Record, location: str) -> Ranked:
    """Raises: UserError, Unusable."""
    chosen, rejected = (read_messages(record, column, location) for column in ("chosen", "rejected"))
    scores = [read_number(record, column, location) for column in ("score_chosen", "score_rejected")]
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise Unusable("dialogue does not end in the assistant's turn")
    if chosen[:-1] != rejected[:-1]:
        raise Unusable("chosen and rejected differ before the last turn")
    prompt = as_prompt(chosen[:-1])
    responses = tuple(zip((chosen[-1].content, rejected[-1].content), scores, strict=True))
    return Ranked(prompt, responses, first_user_text(prompt), select_columns(record, "prompt_id"))

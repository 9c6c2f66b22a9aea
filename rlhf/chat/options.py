"""Options of `rlhf chat`. Torch-free."""

import importlib.util
from typing import ClassVar, Literal

from pydantic import Field

from rlhf.config import Config
from rlhf.config.options import MAX_SEED
from rlhf.errors import UserError

NONE = "none"


class ChatOptions(Config):
    """The models of a run, how they respond, and where votes are written."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("run",)

    run: str = ""
    """output directory of a chain, directory of a stage or of a model, hub id or short name"""
    temperature: float = Field(1.0, ge=0)
    """logits are divided by this; 1 is what the policy was trained with, 0 is greedy"""
    response_length: int = Field(256, ge=1)
    """maximum number of tokens of a response, EOS included"""
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """seed of the sampling; by default another one for each dialogue or page"""
    chat_template: str = "auto"
    """auto (the policies' own template), a name such as chatml, or a Jinja file"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype of the models; auto = bf16 on devices that compute it fast, else fp32"""
    policy: str | None = None
    """which policy of the run answers: base, sft, ppo, ppo/best or ppo/ema; by default the last that was trained"""
    compare: tuple[str, ...] = ()
    """two policies that answer side by side, in random order; their names and scores are shown after the vote. Names as
    of --policy, or paths as of RUN"""
    reward: str | None = None
    """score source of the answers, as in `rlhf evaluate`; by default the reward model of the run; none: no scores"""
    system: str | None = None
    """text of a system message before the dialogue"""
    votes: str = "votes.jsonl"
    """file to which votes are appended, for `--data-path` of the next reward model"""
    web: bool = False
    """a page for a browser instead of the terminal; needs the extra `chat`"""
    port: int = Field(7860, ge=0, le=65535)
    """port of the page, on 127.0.0.1; 0: any free port"""


def check_chat(options: ChatOptions) -> None:
    """Raises: UserError for options that contradict each other, or none where one is needed."""
    if not options.run:
        raise UserError("rlhf chat: no run is named; expected the --output-dir of a run, or a model's directory")
    if options.compare and len(options.compare) != 2:
        raise UserError(
            f"--compare {' '.join(options.compare)}: got {len(options.compare)} policies, expected two; write RUN first"
        )
    if options.web and importlib.util.find_spec("gradio") is None:
        raise UserError('--web: needs Gradio; install it with: pip install "rlhf-pipeline[chat]"')

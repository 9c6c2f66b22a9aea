"""Options of `rlhf evaluate` and `rlhf pairs`. Torch-free."""

from pydantic import Field

from rlhf.config.options import MAX_SEED, PromptFileOptions


class EvaluateConfig(PromptFileOptions):
    """The policies to compare, the prompts, and the score source."""

    policies: tuple[str, ...] = ()
    """two or more: stage directories, model directories, hub ids or short names; the first is the baseline"""
    reference: str | None = None
    """policy to which KL is measured; by default the baseline"""
    samples: int = Field(2, ge=2)
    """responses of each policy to each prompt; at least 2, as the win rate compares independent samples"""
    select_by: str | None = None
    """another score source, such as learned,model=DIR: how high --reward is for the response that it selects among n;
    gives a curve over n up to --samples"""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """seed of the sampling; every policy uses the same random numbers"""
    micro_batch_size: int = Field(8, ge=1)
    """responses in one forward pass for log-probs; changes memory and speed, and results by rounding alone"""
    sample_rows: int = Field(4, ge=0)
    """number of prompts printed with a response of each policy"""
    output: str | None = None
    """directory for results.json, results.md and samples.jsonl; by default results are only printed"""


class PairsConfig(PromptFileOptions):
    """The policies that respond, the prompts, and the score source that labels the pairs."""

    policies: tuple[str, ...] = ()
    """one policy, of which two responses to each prompt are compared, or two policies: stage directories, model
    directories, hub ids or short names"""
    reward: str | None = None
    """score source that labels: file.py:function, learned,model=DIR, or another name in rlhf/rewards/; none: the pairs
    are written unlabelled, for a person to fill in"""
    tie: float = Field(0.0, ge=0)
    """scores that differ by no more than this are a tie, which is dropped"""
    margin: bool = False
    """write the difference of the scores as the column margin, which the loss of the reward model then requires"""
    output: str | None = None
    """.jsonl file to write"""

"""Options that every stage has, each declared once. Torch-free, like rlhf.config."""

from typing import Literal

from pydantic import Field

from rlhf.config import Config


class RunOptions(Config):
    """Where a run writes and what it draws its randomness from."""

    output_dir: str = "runs/demo"
    """directory of the whole run; each stage writes its own folder inside"""
    seed: int = Field(0, ge=0)
    """of initial heads, data order, sampling"""
    report_to: tuple[Literal["tensorboard"], ...] = ()
    """trackers beside metrics.jsonl"""
    sample_rows: int = Field(4, ge=0)
    """prompts shown before and after"""
    overwrite: bool = False
    """run again even if it is finished"""
    convert_template: bool = False
    """start from a stage made with another chat template, and train it to this one"""


class EngineOptions(Config):
    """How a trained model is held."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """compute dtype; auto = bf16 where the device multiplies it fast (AVX512-BF16, AMX, Ampere GPUs), else fp32.
    Master weights are always fp32"""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """what ZeRO shards over the ranks: 0 nothing (in bf16 and fp16 as 1), 1 optimizer state, 2 and gradients, 3 and
    weights"""
    offload_optimizer: bool = False
    """keep optimizer state in CPU memory"""
    offload_param: bool = False
    """keep weights in CPU memory between uses (ZeRO 3)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    adapter: str | None = None
    """parameter-efficient method with its options, e.g. lora or lora,r=8,lora_alpha=16; none = train all weights"""


class OptimizerOptions(Config):
    """AdamW, its schedule, and how a batch is cut up for one device."""

    micro_batch_size: int = Field(8, ge=1)
    """rows in one forward and backward pass on one device; changes memory and speed, never results"""
    learning_rate: float = Field(1e-5, ge=0)
    """peak learning rate of AdamW"""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """learning rate after warm-up"""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """share of the optimizer steps over which the learning rate rises from 0"""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """decay of AdamW's first moment"""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """decay of AdamW's second moment"""
    adam_epsilon: float = Field(1e-8, gt=0)
    """added to AdamW's denominator"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, per step and unit of learning rate"""
    max_grad_norm: float = Field(1.0, ge=0)
    """gradients are scaled down to this global norm; 0 = never"""
    max_bad_steps: int = Field(5, ge=1)
    """optimizer steps in a row, left out because a loss or gradient is not finite, after which the run ends (exit code
    3, the last batch saved)"""


class SamplingOptions(Config):
    """How responses are drawn from the policy. No top-k, top-p or penalties: they would make the KL meaningless."""

    temperature: float = Field(1.0, gt=0)
    """logits are divided by this, in sampling and in every log-prob; above 0"""
    response_length: int = Field(64, ge=1)
    """most tokens of a response, EOS included"""


class PromptFileOptions(SamplingOptions):
    """Policies that respond to the prompts of a file, outside of any run."""

    policies: tuple[str, ...] = ()
    """stage directories, model directories, hub ids or short names"""
    prompts: str | None = None
    """.jsonl with a column prompt (text, or a list of messages), or .txt with one prompt a line"""
    reward: str | None = None
    """score source: file.py:function, learned,model=DIR, or another name in rlhf/rewards/"""
    seed: int = Field(0, ge=0)
    """of the sampling"""
    chat_template: str = "auto"
    """auto (the one of each policy), a name such as chatml, or a Jinja file; it must be one for all"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """of the models; auto = bf16 where the device multiplies it fast, else fp32"""
    rollout_batch_size: int = Field(64, ge=1)
    """responses generated and scored at once; changes memory and speed, and which responses are drawn"""
    sample_rows: int = Field(4, ge=0)
    """prompts shown with their responses"""
    output: str | None = None
    """where to write"""
    overwrite: bool = False
    """replace what an earlier call has written there"""

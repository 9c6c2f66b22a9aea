"""Options that every stage has, each declared once. Torch-free, like rlhf.config.parser."""

import importlib.util
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, TypeVar

import tyro
from pydantic import Field

from rlhf.config import Config
from rlhf.errors import UserError


class RunOptions(Config):
    """Where a run writes and what it draws its randomness from."""

    FREE: ClassVar[frozenset[str]] = frozenset(
        {
            "output_dir",
            "report_to",
            "sample_rows",
            "overwrite",
            "convert_template",
            "save_every",
            "save_minutes",
            "keep",
            "keep_last_checkpoint",
            "export_every",
            "allow_config_change",
            "timeout_s",
        }
    )

    output_dir: str = "runs/demo"
    """directory of the whole run; each stage writes its own folder inside"""
    seed: int = Field(0, ge=0)
    """of initial heads, data order, sampling"""
    report_to: tuple[Literal["tensorboard"], ...] = ()
    """trackers beside metrics.jsonl"""
    sample_rows: int = Field(4, ge=0)
    """prompts shown before and after"""
    overwrite: bool = False
    """run again even if it is finished, and from the beginning if it was interrupted"""
    save_every: int | None = Field(None, ge=1)
    """optimizer steps (in step 3 iterations) between checkpoints; none = by --save-minutes alone"""
    save_minutes: float = Field(20.0, gt=0)
    """minutes after which a checkpoint is due; the end of the step in which they pass decides"""
    keep: int = Field(2, ge=2)
    """checkpoints kept, the newest; at least 2, so that one is whole whatever happens"""
    keep_last_checkpoint: bool = False
    """a finished stage keeps its last checkpoint, from which a run of more epochs or episodes goes on"""
    export_every: int | None = Field(None, ge=1)
    """optimizer steps (in step 3 iterations) between exports of the model that is trained (in step 3 the actor), which
    transformers and `rlhf evaluate` load: OUT/STAGE/exports/step-00000020. All are kept"""
    allow_config_change: bool = False
    """go on from a checkpoint with options that change the result; else they are refused"""
    timeout_s: float = Field(1800.0, gt=0)
    """seconds that a process waits for the others before it takes them for lost"""
    convert_template: bool = False
    """start from a stage made with another chat template, and train it to this one"""


class EngineOptions(Config):
    """How a trained model is held."""

    FREE: ClassVar[frozenset[str]] = frozenset(
        {
            "zero_stage",
            "offload_optimizer",
            "offload_param",
            "offload_nvme",
            "gather_whole",
            "gradient_checkpointing",
            "tensor_parallel_size",
            "sequence_parallel_size",
            "torch_compile",
        }
    )

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """compute dtype; auto = bf16 where the device multiplies it fast (AVX512-BF16, AMX, Ampere GPUs), else fp32.
    Master weights, sums of gradients and heads of scores are always fp32"""
    zero_stage: Literal[0, 1, 2, 3, "auto"] = 1
    """what ZeRO shards over the ranks: 0 nothing (below fp32 as 1), 1 optimizer state, 2 and gradients, 3 and weights;
    auto = the fastest that fits, with offload and recomputation if it must be (--plan shows it)"""
    offload_optimizer: bool = False
    """keep optimizer state in CPU memory"""
    offload_param: bool = False
    """keep weights in CPU memory between uses (ZeRO 3)"""
    offload_nvme: str | None = None
    """folder on an NVMe drive that takes what is offloaded, in the place of CPU memory (ZeRO 3)"""
    gather_whole: bool = True
    """ZeRO 3, between training steps: all weights on every device, gathered once a rollout; off: one layer at a time,
    for a model that does not fit, many times slower to generate"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    torch_compile: bool = False
    """compile (torch.compile, C++): training and rollouts 1.4 times as fast on CPUs, after 10 to 120 s; ZeRO 0 to 2"""
    adapter: str | None = None
    """parameter-efficient method with its options, e.g. lora or lora,r=8,lora_alpha=16; none = train all weights"""
    tensor_parallel_size: int = Field(1, ge=1)
    """devices that share the matrices of each layer of a trained model (DeepSpeed AutoTP), and work on the same rows"""
    sequence_parallel_size: int = Field(1, ge=1)
    """devices that share the tokens of each row, for long ones (Ulysses); in steps 1 and 2"""


def effective_stage(options: EngineOptions, b: int, ranks: int) -> int:
    """The ZeRO stage that is used where numbers have `b` bytes in the compute dtype: one rank has nothing to share, and
    several, fp16 and offload want DeepSpeed's own optimizer below fp32."""
    assert options.zero_stage != "auto", "zero_stage auto is chosen before"
    if ranks == 1 and options.zero_stage < 3 and options.dtype != "fp16" and not options.offload_optimizer:
        return 0
    return options.zero_stage if b == 4 and not options.offload_optimizer else max(1, options.zero_stage)


Flag = Annotated[bool | None, tyro.conf.DisallowNone]
"""On the command line --name and --no-name, or neither."""
E = TypeVar("E", bound=EngineOptions)


class OwnEngineOptions(Config):
    """How one of several trained models is held; what is not set is as for all."""

    zero_stage: Literal[0, 1, 2, 3] | None = None
    """its own --zero-stage"""
    offload_optimizer: Flag = None
    """its own --offload-optimizer"""
    offload_param: Flag = None
    """its own --offload-param"""
    gather_whole: Flag = None
    """its own --gather-whole"""
    gradient_checkpointing: Flag = None
    """its own --gradient-checkpointing"""

    def over(self, shared: E) -> E:
        """The options of this model."""
        return shared.model_copy(update=self.model_dump(exclude_none=True))


class FrozenOptions(Config):
    """How a model is held that is only asked."""

    zero_stage: Literal[0, 3] | None = None
    """0 = whole on every device, 3 = in parts on the ranks; by default 3 where the trained model beside it has 3
    (and is not split by --tensor-parallel-size)"""
    offload: bool = False
    """keep its weights in CPU memory between uses"""
    gather_whole: Flag = None
    """its own --gather-whole"""
    torch_compile: Flag = None
    """its own --torch-compile"""

    def beside(self, trained: EngineOptions) -> "FrozenOptions":
        """These options, what is not set as for a trained model."""
        stage: Literal[0, 3] = 3 if trained.zero_stage == 3 and trained.tensor_parallel_size == 1 else 0
        given = self.model_dump(exclude_none=True)
        shared = {"gather_whole": trained.gather_whole, "torch_compile": trained.torch_compile}
        return self.model_copy(update={"zero_stage": stage, **shared, **given})


class SharedOptimizerOptions(Config):
    """What all stages of a chain have in common of AdamW, its schedule, and how a batch is cut up for one device."""

    FREE: ClassVar[frozenset[str]] = frozenset({"micro_batch_size", "max_bad_steps"})

    micro_batch_size: int = Field(8, ge=1)
    """rows in one forward and backward pass on one device; changes memory and speed, never results"""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """learning rate after warm-up"""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """share of the optimizer steps over which the learning rate rises from 0"""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """decay of AdamW's first moment"""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """decay of AdamW's second moment"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, per step and unit of learning rate; of matrices, not of norms and biases"""
    max_grad_norm: float = Field(1.0, ge=0)
    """gradients are scaled down to this global norm; 0 = never"""
    max_bad_steps: int = Field(5, ge=1)
    """optimizer steps in a row, left out because a loss or gradient is not finite, after which the run ends (exit code
    3, the last batch saved)"""


class OptimizerOptions(SharedOptimizerOptions):
    """All of it; a chain has no option of these for all stages, because their defaults differ."""

    learning_rate: float = Field(1e-5, ge=0)
    """peak learning rate of AdamW"""
    adam_epsilon: float = Field(1e-8, gt=0)
    """added to AdamW's denominator"""


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
    """responses generated and scored at once; changes memory and speed, not the draws"""
    sample_rows: int = Field(4, ge=0)
    """prompts shown with their responses"""
    output: str | None = None
    """where to write"""
    overwrite: bool = False
    """replace what an earlier call has written there"""


def require_trackers(names: Sequence[str]) -> None:
    """Raises: UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--report-to {name}: the package is not installed; pip install {name}, or leave the option out"
            )

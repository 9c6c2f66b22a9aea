"""Options that every stage has, each declared once. Torch-free, like rlhf.config.parser."""

import os
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field

from rlhf.config import Config

MAX_SEED = 2**32 - 1
"""numpy takes no larger seed, and streams of torch are numbered by multiples of it"""


def _on_a_file_system(path: str) -> str:
    """With the home directory in place of `~`, which a shell leaves in --output-dir=~/runs, as YAML does."""
    if not path:
        raise ValueError("expected a directory")
    if "://" in path:
        raise ValueError(
            "expected a directory on a disk or a mounted file system (a run locks, renames and extends files, which "
            "object stores cannot; copy what is finished)"
        )
    return os.path.expanduser(path)


def _wanted(trackers: tuple[str, ...]) -> tuple[str, ...]:
    """No tracker for `none`, and no wandb with WANDB_DISABLED, as in transformers."""
    if os.environ.get("WANDB_DISABLED", "").upper() in ("1", "ON", "YES", "TRUE"):
        trackers = tuple(spec for spec in trackers if spec.partition(",")[0] != "wandb")
    return () if trackers == ("none",) else trackers


OutputDir = Annotated[str, AfterValidator(_on_a_file_system)]
ModelPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A directory, hub id or short name of a model; `~` is the home directory, as in a shell."""
Quantize = Literal["none", "nf4", "fp4"]
Optim = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "muon"]


class RunOptions(Config):
    """Output, random seed and checkpoints of a run."""

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
            "deterministic",
        }
    )

    output_dir: OutputDir = "runs/demo"
    """directory of the whole run; each stage writes its own folder inside"""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """seed of initial heads, data order and sampling"""
    deterministic: bool = False
    """GPUs use torch's deterministic algorithms, so that a run, also a resumed one, repeats to the byte on the same
    machine; slower. A CPU does so without it"""
    report_to: Annotated[tuple[str, ...], AfterValidator(_wanted)] = ()
    """trackers in addition to metrics.jsonl: none, tensorboard, wandb, trackio, mlflow, swanlab, comet_ml, clearml,
    aim (wandb,project=NAME with its options), or a Python file of yours"""
    sample_rows: int = Field(4, ge=0)
    """number of held-out prompts whose responses are printed at the end, and sent to the trackers"""
    overwrite: bool = False
    """rerun a finished stage, and restart an interrupted one from the beginning"""
    save_every: int | None = Field(None, ge=1)
    """optimizer steps (in step 3 iterations) between checkpoints; none = only --save-minutes counts"""
    save_minutes: float = Field(20.0, gt=0)
    """minutes between checkpoints; a checkpoint is written at the end of the current step"""
    keep: int = Field(2, ge=2)
    """number of newest checkpoints that are kept; at least 2, so that one is always complete"""
    keep_last_checkpoint: bool = False
    """a finished stage keeps its last checkpoint, from which a run of more epochs or episodes continues"""
    export_every: int | None = Field(None, ge=1)
    """optimizer steps (in step 3 iterations) between exports of the trained model (in step 3 the actor), which
    transformers and `rlhf evaluate` can load: OUT/STAGE/exports/step-00000020. All exports are kept"""
    allow_config_change: bool = False
    """resume from a checkpoint with changed options that affect the result; otherwise they are refused"""
    timeout_s: float = Field(1800.0, gt=0)
    """seconds that a process waits for the other processes before the run ends with an error"""
    convert_template: bool = False
    """start from a model that was trained with another chat template, and continue with this one"""

    def idle(self) -> Iterator[str]:
        """The options that have no effect, each with the one that it needs; the run says them."""
        yield from ()


Flag = bool | None
"""An optional flag: --name, --no-name, or neither."""


class EngineOptions(Config):
    """Precision, sharding and memory of a trained model."""

    STEP_ROWS: ClassVar[str | None] = None
    """the option with the rows of one optimizer step; None = they follow from several options"""
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
            "deepspeed_config",
        }
    )

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """compute dtype; auto = bf16 on devices that compute it fast (AVX512-BF16, AMX, Ampere GPUs), fp16 on Volta and
    Turing GPUs (V100, T4), else fp32. Master weights, sums of gradients and score heads are always fp32"""
    zero_stage: Literal[0, 1, 2, 3, "auto"] = 1
    """what ZeRO shards over the ranks: 0 nothing (in bf16 and fp16 as 1), 1 optimizer state, 2 also gradients, 3 also
    weights; auto = the first setting that fits, with offloading, gradient checkpointing and fewer rows at once if
    needed (--plan shows it)"""
    optim: Optim = "adamw"
    """optimizer, named as in transformers: adamw; adamw_8bit (bitsandbytes, extra quantize) and muon have less state,
    and need whole weights: one process, or several with ZeRO 0 in fp32; paged_adamw_8bit: as adamw_8bit on a CUDA GPU,
    whose full memory sends the state to CPU memory (docs/scaling.md)"""
    offload_optimizer: bool = False
    """keep optimizer state in CPU memory"""
    offload_param: bool = False
    """keep weights in CPU memory between uses (ZeRO 3)"""
    offload_nvme: str | None = None
    """folder on an NVMe drive to offload to, instead of CPU memory (ZeRO 3)"""
    gather_whole: bool = True
    """ZeRO 3, between training steps: gather all weights on every device, once per rollout; off: one layer at a time,
    for a model that does not fit otherwise; generation is then many times slower"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    torch_compile: Flag = None
    """compile (torch.compile, C++): training and rollouts 1.4 times as fast on CPUs, after 10 to 120 s; ZeRO 0 to 2. By
    default, on in runs on CPUs that are long enough to repay that; on GPUs rollouts alone are compiled"""
    adapter: str | None = None
    """parameter-efficient method with its options, e.g. lora or lora,r=8,lora_alpha=16 (docs/adapters.md); it brings
    its own default learning rates. none = train all weights"""
    share_trunk: bool = False
    """keep one frozen base model for all roles: steps 1 and 2 train and save adapters on it (--adapter), and in step 3
    policy, reference, critic and reward model are adapters on one copy of it; ZeRO 0 to 2"""
    quantize: Quantize = "none"
    """bits of the frozen weights under an adapter, by bitsandbytes (extra quantize): nf4 = 4 bits as in QLoRA, or fp4;
    ZeRO 0 to 2; merging dequantises"""
    tensor_parallel_size: int = Field(1, ge=1)
    """number of devices that split the matrices of a trained model's layers (DeepSpeed AutoTP) and share their rows"""
    sequence_parallel_size: int = Field(1, ge=1)
    """number of devices that split the tokens of each row, for long rows (Ulysses); in steps 1 and 2"""
    deepspeed_config: str | None = None
    """DeepSpeed JSON of yours (--deepspeed FILE is the same): it sets the options here that mean the same, and bucket
    sizes, overlap and logs are passed on; "auto" leaves a value to these options"""


def effective_stage(options: EngineOptions, b: int, ranks: int) -> int:
    """The ZeRO stage that is used; `b`: bytes of a number in the compute dtype.

    A single rank has nothing to share. Below fp32, several ranks, fp16 and offload need the optimizer of stage 1.
    """
    assert options.zero_stage != "auto", "zero_stage auto must be resolved first"
    if ranks == 1 and options.zero_stage < 3 and options.dtype != "fp16" and not options.offload_optimizer:
        return 0
    return options.zero_stage if b == 4 and not options.offload_optimizer else max(1, options.zero_stage)


E = TypeVar("E", bound=EngineOptions)


class OwnEngineOptions(Config):
    """Engine options of one of several trained models; those that are not set follow the shared ones."""

    zero_stage: Literal[0, 1, 2, 3] | None = None
    """--zero-stage for this model"""
    offload_optimizer: Flag = None
    """--offload-optimizer for this model"""
    offload_param: Flag = None
    """--offload-param for this model"""
    gather_whole: Flag = None
    """--gather-whole for this model"""
    gradient_checkpointing: Flag = None
    """--gradient-checkpointing for this model"""
    quantize: Quantize | None = None
    """--quantize for this model"""

    def override(self, shared: E) -> E:
        """The shared options, replaced by those that this model sets."""
        return shared.model_copy(update=self.model_dump(exclude_none=True))


class FrozenOptions(Config):
    """Sharding and memory of a model that is used for inference only."""

    zero_stage: Literal[0, 3] | None = None
    """0 = whole on every device, 3 = sharded over the ranks; by default 3 if the trained model has 3 (and is not split
    by --tensor-parallel-size)"""
    offload: bool = False
    """keep its weights in CPU memory between uses"""
    gather_whole: Flag = None
    """--gather-whole for this model"""
    torch_compile: Flag = None
    """--torch-compile for this model"""
    quantize: Quantize | None = None
    """--quantize for this model; by default that of the trained model"""

    def follow(self, trained: EngineOptions) -> "FrozenOptions":
        """These options; those that are not set follow the options of a trained model."""
        stage: Literal[0, 3] = 3 if trained.zero_stage == 3 and trained.tensor_parallel_size == 1 else 0
        own_options = self.model_dump(exclude_none=True)
        names = ("gather_whole", "torch_compile", "quantize")
        shared = {name: getattr(trained, name) for name in names}
        return self.model_copy(update={"zero_stage": stage, **shared, **own_options})


LearningRateShape = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
]


class SharedOptimizerOptions(Config):
    """Options of AdamW, its schedule and micro-batches that have the same defaults in all stages."""

    FREE: ClassVar[frozenset[str]] = frozenset({"micro_batch_size", "eval_batch_size", "max_bad_steps"})

    micro_batch_size: int = Field(8, ge=1)
    """rows in one forward and backward pass on one device; changes memory and speed, and results by rounding alone"""
    eval_batch_size: int | None = Field(None, ge=1)
    """rows in one pass without gradients on one device: held-out evaluation, and log-probs and values of a rollout;
    none = --micro-batch-size; more may be faster on a GPU with free memory"""
    lr_scheduler_type: LearningRateShape = "linear"
    """learning rate after warm-up, as in transformers; constant has no warm-up"""
    lr_num_cycles: int = Field(1, ge=1)
    """cosine_with_restarts: number of falls from the peak to 0"""
    lr_power: float = Field(1.0, gt=0)
    """polynomial: exponent of the share of steps that is left"""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """share of the optimizer steps over which the learning rate rises from 0"""
    warmup_steps: int | None = Field(None, ge=0)
    """optimizer steps over which the learning rate rises from 0; none: --warmup-ratio of all steps"""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """decay of AdamW's first moment"""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """decay of AdamW's second moment"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, per step and unit of learning rate; for matrices, not for norms and biases"""
    max_grad_norm: float = Field(1.0, ge=0)
    """maximum global norm of the gradients; larger ones are scaled down; 0 = no limit"""
    max_bad_steps: int = Field(5, ge=1)
    """number of consecutive optimizer steps skipped for a non-finite loss or gradient, after which the run ends (exit
    code 3, the last batch is saved)"""

    @property
    def eval_rows(self) -> int:
        """Rows in one pass without gradients."""
        return self.eval_batch_size or self.micro_batch_size


class OptimizerOptions(SharedOptimizerOptions):
    """All options of the optimizer. The two below have other defaults in each stage: a chain has no common option."""

    learning_rate: float = Field(1e-5, ge=0)
    """peak learning rate of AdamW"""
    adam_epsilon: float = Field(1e-8, gt=0)
    """epsilon in AdamW's denominator"""


class TrainingOptions(EngineOptions, OptimizerOptions):
    """All options of a model that is trained."""


class SamplingOptions(Config):
    """How responses are sampled from the policy. No top-k, top-p or penalties: they would make the KL meaningless."""

    temperature: float = Field(1.0, gt=0)
    """logits are divided by this, in sampling and in every log-prob; above 0"""
    response_length: int = Field(64, ge=1)
    """maximum number of tokens of a response, EOS included"""


class PromptFileOptions(SamplingOptions):
    """Policies that respond to the prompts of a file, outside a run."""

    policies: tuple[str, ...] = ()
    """stage directories, model directories, hub ids or short names"""
    prompts: str | None = None
    """a file as of --data-path with a column prompt (text, or a list of messages), .txt with one prompt per line, or
    another data path, such as files,prompt=question:FILE"""
    reward: str | None = None
    """score source: file.py:function, learned,model=DIR, or another name in rlhf/rewards/"""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """seed of the sampling"""
    chat_template: str = "auto"
    """auto (each policy's own template), a name such as chatml, or a Jinja file; all policies must have the same"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype of the models; auto = bf16 on devices that compute it fast, else fp32"""
    rollout_batch_size: int = Field(64, ge=1)
    """responses generated and scored at once; changes memory and speed, not the random numbers. The sum of a product
    may be rounded otherwise, so in bf16 a few responses can differ"""
    deployment_type: Literal["single_gpu", "single_node"] = "single_gpu"
    """single_gpu: one process, on the CPU where there is no GPU; single_node: one process per visible GPU. Processes
    share the batches, and the results are those of one process"""
    num_processes: int | None = Field(None, ge=1)
    """processes of single_node; by default the number of visible GPUs"""
    sample_rows: int = Field(4, ge=0)
    """number of prompts printed with their responses"""
    output: str | None = None
    """path of the results"""
    overwrite: bool = False
    """replace the results of an earlier call"""

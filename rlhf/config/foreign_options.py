"""Options of DeepSpeed-Chat, TRL, transformers, OpenRLHF and LLaMA-Factory, and their names in this project.

Torch-free."""

import re
from collections.abc import Sequence

_GLOBAL = "batch sizes are global, so --batch-size is per_device x accumulation x processes"
_ADAPTER = "for example lora,r=16,lora_alpha=32,target_modules=all-linear"
_TOKENS = "in tokens"
_ACTOR = "the reward model starts from it too, unless --reward-model names another"
_NO_DROPOUT = "remove it: step 3 has no dropout, so that log-probs of one policy are equal in every pass"
_SPLIT = "one split: files,split=NAME:PATH; a file has no splits"
_WEIGHT = "PATH=0.7 gives a path its weight"
_FSDP = "DeepSpeed's ZeRO shards the models: 3 for FULL_SHARD, 2 for SHARD_GRAD_OP"
_EVALUATIONS = "in steps 1 and 2 optimizer steps (100) or epochs (0.5epochs), in step 3 iterations"

FOREIGN: dict[str, tuple[str, str]] = {
    # TRL and transformers
    "model-name-or-path": ("actor-model model", _ACTOR),
    "dataset-name": ("data-path", ""),
    "dataset-config": ("data-path", "files,subset=NAME:OWNER/NAME"),
    "dataset-train-split": ("data-path", _SPLIT),
    "dataset-test-split": ("eval-data-path", _SPLIT),
    "dataset-num-proc": ("data-workers", ""),
    "per-device-train-batch-size": ("micro-batch-size", _GLOBAL),
    "per-device-eval-batch-size": ("eval-batch-size", ""),
    "gradient-accumulation-steps": ("batch-size", "it is global: micro-batch size x accumulation x processes"),
    "local-rollout-forward-batch-size": ("rollout-batch-size", ""),
    "mini-batch-size": ("num-mini-batches", "--ppo.batch-size is divided by it"),
    "ppo-epochs": ("num-ppo-epochs", ""),
    "init-kl-coef": ("kl-coef", "--kl-target makes it adaptive"),
    "horizon": ("kl-target", "how fast kl_coef moves follows from the length of the run"),
    "beta": ("kl-coef", "there is no DPO here"),
    "epsilon": ("cliprange", ""),
    "epsilon-high": ("cliprange-high", ""),
    "loss-type": ("loss-aggregation", "token (dapo, bnpo), sequence (grpo) or constant (dr_grpo)"),
    "vllm-importance-sampling-cap": ("tis-cap", ""),
    "max-new-tokens": ("response-length", _TOKENS),
    "max-completion-length": ("response-length", _TOKENS),
    "max-seq-length": ("max-length", "prompt and response, in tokens"),
    "reward-model-path": ("ppo.reward-model reward-model", "a trained reward model, with --steps 3"),
    "sft-model-path": ("ppo.actor-model actor-model model", "a fine-tuned policy, with --steps 3"),
    "center-rewards-coefficient": ("centering", ""),
    "lr-scheduler-kwargs": ("lr-num-cycles", "and --lr-power; other schedules have no options"),
    "bf16": ("dtype", "--dtype bf16"),
    "fp16": ("dtype", "--dtype fp16"),
    "torch-dtype": ("dtype", "auto, fp32, bf16 or fp16"),
    "use-peft": ("adapter", _ADAPTER),
    "lora-r": ("adapter", _ADAPTER),
    "lora-alpha": ("adapter", _ADAPTER),
    "lora-target-modules": ("adapter", _ADAPTER),
    "use-vllm": ("rollout-backend", "--ppo.rollout-backend vllm"),
    "max-steps": (
        "num-train-epochs total-episodes",
        "a run has as many steps as its rows fill: --max-train-rows limits them, in step 3 --ppo.total-episodes",
    ),
    "logging-dir": ("output-dir", "numbers are in OUT/step*/metrics.jsonl; --report-to tensorboard adds its files"),
    "log-with": ("report-to", "for example --report-to wandb"),
    "run-name": ("report-to", "--report-to wandb,name=NAME"),
    "project": ("report-to", "--report-to wandb,project=NAME"),
    "logging-steps": ("report-to", "metrics.jsonl has every step"),
    "save-steps": ("save-every", "optimizer steps, in step 3 iterations; --export-every leaves loadable models"),
    "save-total-limit": ("keep", "checkpoints, at least 2"),
    "eval-steps": ("eval-every", _EVALUATIONS),
    "eval-strategy": ("eval-every", _EVALUATIONS),
    "load-best-model-at-end": ("keep-best", "with --eval-every; --patience ends the run early"),
    "metric-for-best-model": ("keep-best", "with --eval-every; --patience ends the run early"),
    "early-stopping-patience": ("patience", "evaluations, with --keep-best"),
    "attention-dropout": ("dropout", "everywhere in the model; steps 1 and 2"),
    "lora-dropout": ("dropout", "of the frozen model; adapters have none"),
    "resume-from-checkpoint": ("output-dir", "the same command resumes from the newest complete checkpoint there"),
    "overwrite-output-dir": ("overwrite", ""),
    "num-sample-generations": ("eval-every", "iterations between evaluations, which print responses"),
    "total-batch-size": ("batch-size", "it is global"),
    "batch-size-per-device": ("micro-batch-size", _GLOBAL),
    "whiten-rewards": ("use-score-scaling", "scores are scaled before the KL penalty is added"),
    "stop-token": ("chat-template", "a response ends with the template's end of a turn"),
    "stop-token-id": ("chat-template", "a response ends with the template's end of a turn"),
    "response-template": ("loss-on", "--sft.loss-on says which turns count"),
    "completion-only-loss": ("loss-on", "the loss counts responses only by default"),
    "assistant-only-loss": ("loss-on", "--sft.loss-on every"),
    "packing": ("", "remove it: padding is not computed in any case"),
    "load-in-4bit": ("quantize", "--quantize nf4, with an adapter"),
    "load-in-8bit": ("quantize", "--quantize nf4, with an adapter"),
    "adam-beta-1": ("adam-beta1", ""),
    "adam-eps": ("adam-epsilon", ""),
    "fsdp": ("zero-stage", _FSDP),
    "fsdp-config": ("zero-stage", _FSDP),
    "use-fsdp": ("zero-stage", _FSDP),
    "pipeline-parallel-size": (
        "tensor-parallel-size",
        "there is no pipeline parallelism here; use it, --sequence-parallel-size or --zero-stage 3",
    ),
    "hub-model-id": ("push-to-hub", "OWNER/NAME; `rlhf push DIR OWNER/NAME` uploads a model later"),
    "hub-private-repo": ("private", ""),
    "hub-token": ("", "set HF_TOKEN, or log in with `hf auth login`: options are written to files"),
    # DeepSpeed-Chat: train.py, e2e_rlhf.py and main.py of each step
    "step": ("steps", "1 fine-tuning, 2 the reward model, 3 reinforcement learning"),
    "actor-zero-stage": ("ppo.actor.zero-stage actor.zero-stage zero-stage", "--zero-stage holds for every model"),
    "critic-zero-stage": ("ppo.critic.zero-stage critic.zero-stage zero-stage", "--zero-stage holds for every model"),
    "reward-zero-stage": ("reward.zero-stage zero-stage", "--zero-stage holds for every model"),
    "data-output-path": ("data-cache", "the cache of tokenised rows"),
    "max-seq-len": ("max-length", "prompt and response, in tokens"),
    "max-prompt-seq-len": ("max-prompt-length", _TOKENS),
    "max-answer-seq-len": ("response-length", _TOKENS),
    "num-warmup-steps": ("warmup-steps", ""),
    "actor-dropout": ("", _NO_DROPOUT),
    "critic-dropout": ("", _NO_DROPOUT),
    "offload": ("offload-optimizer", "--offload-param for the weights, --ppo.reference.offload for frozen models"),
    "offload-reference-model": ("reference.offload", ""),
    "offload-reward-model": ("reward-models.offload", ""),
    "actor-gradient-checkpointing": ("actor.gradient-checkpointing", ""),
    "critic-gradient-checkpointing": ("critic.gradient-checkpointing", ""),
    "lora-dim": ("adapter", _ADAPTER),
    "lora-module-name": ("adapter", _ADAPTER),
    "lora-learning-rate": ("learning-rate", "one rate for all trained weights"),
    "only-optimize-lora": ("adapter", "with an adapter, only its weights are trained"),
    "actor-lora-dim": ("adapter", _ADAPTER),
    "actor-lora-module-name": ("adapter", _ADAPTER),
    "actor-lora-learning-rate": ("ppo.learning-rate learning-rate", "one rate for all trained weights of the actor"),
    "critic-lora-dim": ("adapter", _ADAPTER),
    "critic-lora-module-name": ("adapter", _ADAPTER),
    "critic-lora-learning-rate": ("critic-learning-rate", "one rate for all trained weights of the critic"),
    "enable-mixed-precision-lora": ("adapter", _ADAPTER),
    "compute-fp32-loss": ("", "remove it: losses are always computed in fp32"),
    "enable-tensorboard": ("report-to", "--report-to tensorboard"),
    "tensorboard-path": ("output-dir", "TensorBoard's files are in OUT/STAGE/tensorboard"),
    "add-eot-token": ("chat-template", "the template names the end of a turn"),
    "eot-token": ("chat-template", "the template names the end of a turn"),
    "print-loss": ("report-to", "metrics.jsonl has every step"),
    "num-padding-at-beginning": ("", "remove it: the mask of a row says where its tokens begin"),
    "eval-interval": ("eval-every", _EVALUATIONS),
    "eval-iters": ("max-eval-rows", "rows, not batches"),
    "unsupervised-dataset-name": ("ptx-data-path", "with --ppo.ptx-coef"),
    "unsupervised-dataset-config-name": ("ptx-data-path", "with --ppo.ptx-coef; the config is part of the name"),
    "unsup-coef": ("ptx-coef", "weight of the fine-tuning loss; that of PPO is 1"),
    "actor-model-name-or-path": ("ppo.actor-model actor-model model", "a fine-tuned policy, with --steps 3"),
    "critic-model-name-or-path": ("ppo.reward-model reward-model", "a trained reward model, with --steps 3"),
    "per-device-generation-batch-size": ("rollout-batch-size", "--ppo.batch-size counts the responses of an iteration"),
    "per-device-training-batch-size": (
        "micro-batch-size",
        "--ppo.num-mini-batches divides --ppo.batch-size into steps",
    ),
    "generation-batches": ("ppo.batch-size batch-size", "responses of an iteration, over all devices"),
    "actor-weight-decay": ("weight-decay", "one value for actor and critic"),
    "critic-weight-decay": ("weight-decay", "one value for actor and critic"),
    "preprocessing-num-workers": ("data-workers", ""),
    "enable-hybrid-engine": ("", "remove it: a rollout gathers the weights once, without the hybrid engine"),
    "unpin-actor-parameters": ("", "remove it: the hybrid engine is not used here"),
    "release-inference-cache": ("", "remove it: the hybrid engine is not used here"),
    "inference-tp-size": ("tensor-parallel-size", "generation splits the layers as training does"),
    "tp-gather-partition-size": ("", "remove it: the hybrid engine is not used here"),
    "align-overflow": ("", "remove it: actor and critic skip a step that overflows, each by itself"),
    "print-answers": ("sample-rows", "held-out prompts whose responses are printed at the end"),
    "print-answers-interval": ("eval-every", "iterations; OUT/step3_ppo/samples.jsonl has the responses"),
    "enable-test-mode": ("total-episodes", "a short run: --max-train-rows, --ppo.total-episodes"),
    "test-stop-step": ("total-episodes", "a short run: --max-train-rows, --ppo.total-episodes"),
    # OpenRLHF
    "pretrain": ("actor-model model", ""),
    "reward-pretrain": ("ppo.reward-model reward-model", "a trained reward model, with --steps 3"),
    "critic-pretrain": ("critic-model", "by default the reward model"),
    "critic": ("critic-model", "reward, policy, shared, or the path of a trained reward model or critic"),
    "value-pretrain": ("critic-warmup-iterations", "iterations of step 3"),
    "prompt-data": ("data-path", ""),
    "input-key": ("data-path", "files,prompt=COLUMN:PATH; of dialogues files,messages=COLUMN:PATH"),
    "prompt-key": ("data-path", "files,prompt=COLUMN:PATH"),
    "output-key": ("data-path", "files,response=COLUMN:PATH"),
    "chosen-key": ("data-path", "files,chosen=COLUMN:PATH"),
    "rejected-key": ("data-path", "files,rejected=COLUMN:PATH"),
    "label-key": (
        "data-path",
        "reward functions get it by its own name; if it says good or bad, files,label=COLUMN:PATH",
    ),
    "input-template": ("chat-template", "a name, or a Jinja file"),
    "tokenizer-chat-template": ("chat-template", "a name, or a Jinja file"),
    "prompt-data-probs": ("data-path", _WEIGHT),
    "dataset-probs": ("data-path", _WEIGHT),
    "prompt-split": ("data-path", _SPLIT),
    "train-split": ("data-path", _SPLIT),
    "eval-dataset": ("eval-data-path", ""),
    "eval-split": ("eval-data-path", _SPLIT),
    "multiturn": ("loss-on", "--sft.loss-on every"),
    "pretrain-data": ("ptx-data-path", "with --ppo.ptx-coef"),
    "train-batch-size": (
        "batch-size",
        "global; in step 3 a step has --ppo.batch-size / --ppo.num-mini-batches",
    ),
    "micro-train-batch-size": ("micro-batch-size", _GLOBAL),
    "micro-rollout-batch-size": ("rollout-batch-size", "responses generated or scored at once on one device"),
    "rollout-batch-size": (
        "ppo.batch-size",
        "responses of an iteration; here --rollout-batch-size is how many are generated at once",
    ),
    "n-samples-per-prompt": ("num-generations", "--ppo.batch-size counts responses, not prompts"),
    "num-episodes": ("total-episodes", "responses in the whole run, not passes over the prompts"),
    "max-epochs": ("num-train-epochs num-ppo-epochs", "in step 3 --ppo.num-ppo-epochs"),
    "generate-max-len": ("response-length", _TOKENS),
    "prompt-max-len": ("max-prompt-length", _TOKENS),
    "max-len": ("max-length", "prompt and response, in tokens"),
    "use-wandb": ("report-to", "--report-to wandb; the key is in WANDB_API_KEY or `wandb login`"),
    "use-tensorboard": ("report-to", "--report-to tensorboard"),
    "wandb-project": ("report-to", "--report-to wandb,project=NAME"),
    "wandb-run-name": ("report-to", "--report-to wandb,name=NAME"),
    "actor-learning-rate": ("ppo.learning-rate learning-rate", ""),
    "lr-scheduler": ("lr-scheduler-type", ""),
    "lr-warmup-ratio": ("warmup-ratio", ""),
    "max-norm": ("max-grad-norm", ""),
    "adam-offload": ("offload-optimizer", ""),
    "eps-clip": ("cliprange", ""),
    "eps-clip-low-high": ("cliprange-high", "and --cliprange"),
    "value-clip": ("cliprange-value", ""),
    "lambd": ("lam", ""),
    "advantage-estimator": ("algorithm", "ppo, a2c, reinforce, rloo, grpo, best_of_n or a file of yours"),
    "freezing-actor-steps": ("critic-warmup-iterations", ""),
    "ema-beta": ("ema-decay", ""),
    "enable-ema": ("ema-decay", ""),
    "lora-rank": ("adapter", _ADAPTER),
    "apply-chat-template": ("chat-template", "a template is always applied"),
    # LLaMA-Factory
    "stage": ("steps", "1 fine-tuning, 2 the reward model, 3 reinforcement learning"),
    "dataset": ("data-path", "dataset_info.json:NAME is read as it is"),
    "dataset-dir": ("data-path", "DIR/dataset_info.json:NAME"),
    "interleave-probs": ("data-path", _WEIGHT),
    "template": ("chat-template", ""),
    "finetuning-type": ("adapter", f"without one all weights are trained; {_ADAPTER}"),
    "lora-target": ("adapter", _ADAPTER),
    "cutoff-len": ("max-length", "prompt and response, in tokens"),
    "max-samples": ("max-train-rows", ""),
    "val-size": ("eval-fraction", ""),
    "pref-beta": ("kl-coef", "there is no DPO here"),
    # Other common names
    "nproc-per-node": ("num-processes num-gpus", "or start with torchrun: it comes before the name of the program"),
    "node-rank": ("hostfile", "or start with torchrun on every host: it comes before the name of the program"),
    "attn-implementation": ("", "remove it: sdpa or eager is chosen for each model, by what its architecture allows"),
    "model": ("actor-model", _ACTOR),
    "data": ("data-path", ""),
    "lr": ("learning-rate", ""),
    "kl": ("kl-coef", ""),
    "out": ("output-dir", ""),
}
"""By the name of an option in another project: its names in this project, of which the first that a program has
applies (none for what needs no option here), and a note on the difference."""

METHODS = {
    "qlora": "--adapter lora --quantize nf4: QLoRA is LoRA on weights of 4 bits",
    "dora": "--adapter lora,use_dora=true",
    "rslora": "--adapter lora,use_rslora=true",
    "pissa": "--adapter lora,init_lora_weights=pissa",
    "p_tuning_v2": "--adapter prefix_tuning: P-Tuning v2 is prefix tuning",
}
"""By the name of a method elsewhere, as `plain` writes it: what it is here."""


def plain(name: str) -> str:
    """A name without differences of spelling.

    >>> plain("P-Tuning-v2")
    'p_tuning_v2'
    """
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def answer(name: str, available: Sequence[str]) -> str:
    """`: here --micro-batch-size; batch sizes are global ...` for an option name of another project, else an empty
    string. For an option with a section, `sft.lr`, an option of that section is preferred."""
    section, _, last = name.rpartition(".")
    if last not in FOREIGN:
        return ""
    names, note = FOREIGN[last]
    if not names:
        return f": {note}"
    in_section = [
        option for candidate in names.split() if section and (option := f"{section}.{candidate}") in available
    ]
    options = in_section or next(filter(None, (_same_name(candidate, available) for candidate in names.split())), [])
    first = names.split()[0]
    other_program = f"--{first} of `train`" if "." in first else f"--{first} of another stage"
    suggestion = " or ".join(f"--{option}" for option in options) or other_program
    return f": here {suggestion}" + (f"; {note}" if note else "")


def _same_name(candidate: str, available: Sequence[str]) -> list[str]:
    """The known option of this name; else the options of this name in sections."""
    last = candidate.rpartition(".")[2]
    same_name = [option for option in available if option.rpartition(".")[2] == last]
    return next(([name] for name in (candidate, last) if name in same_name), same_name)

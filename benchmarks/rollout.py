"""`python -m benchmarks.rollout`: sampling here and with transformers' `generate`, new tokens per second.

A turn is 48 new tokens for each of the first 16 prompts of at most 128 tokens in one batch, then for 64 prompts. No
response ends earlier, so the work is the same. Both sample from the whole distribution at temperature 1, from
the same weights in bf16 and the same left-padded ids.

A turn also generates a single token, which is the pass over the prompts. The remaining time over the remaining tokens
is the time of a decode step. Its lower bound is the time in which the machine, measured in the same turn, reads every
weight and the cache of real tokens once.

Differences: ours also returns the log-prob of every sampled token, and has a separate random stream for each response.

vLLM is a third contender where `make test-vllm` has made its environment. It compiles its layers, has no cache of
earlier prompts, and returns log-probs as ours does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks import harness, inputs, limits, outcome
from benchmarks.comparison import Comparison
from benchmarks.goals import goal
from benchmarks.harness import MACHINE, OURS, WARM_UP, Program, WorkerPipe
from rlhf import errors

PEER, ENGINE = "HF generate", "vLLM"
ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process that waits for others would take their time
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Options(harness.Options):
    """What to measure."""

    prompts: tuple[int, ...] = (16, 64)
    """numbers of responses in a batch"""
    response_length: int = Field(48, ge=2)
    """new tokens of each response"""
    max_prompt_length: int = Field(128, ge=1)
    """maximal tokens of a prompt"""


def prepare(options: Options, folder: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """(the settings of the contenders, the prompts)."""
    more = {"max_prompt_length": options.max_prompt_length}
    _, data = inputs.first_rows(options, "ppo", max(options.prompts), folder, **more)
    prompts = [list(item.ids) for item in data.train]
    names = ("model", "response_length", "dtype", "torch_compile")
    return {"prompts": prompts, "sizes": options.prompts, **{name: getattr(options, name) for name in names}}, prompts


def ours(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """The rollout backend on a model as step 3 loads it."""

    from rlhf import kernels
    from rlhf.config.options import SamplingOptions
    from rlhf.distributed.collectives import local_device
    from rlhf.generation import loop
    from rlhf.maths.uniforms import uniforms
    from rlhf.models.load import load_causal_lm
    from rlhf.types import Prompts, Row

    pipe.mark_baseline()
    tokenizer = inputs.tokenizer(settings["model"])
    lm = load_causal_lm(settings["model"], inputs.weights_dtype(settings), len(tokenizer)).to(local_device())
    if settings["torch_compile"]:
        kernels.compile_layers(lm)
        kernels.round_like_eager()
    kernels.keep_freed_memory()  # as after the first training step
    backend = loop.build(loop.Config(eos_token_id=inputs.NO_TOKEN, pad_token_id=tokenizer.pad_token_id))

    def generate(rows: list[list[int]], length: int) -> int:
        prompts = Prompts(*inputs.padded(rows, tokenizer.pad_token_id), (Row(()),) * len(rows))
        draws = uniforms([(0, i) for i in range(len(rows))], length)
        rollout = backend(lm, prompts, SamplingOptions(response_length=length), draws)
        return int(rollout.mask.sum())

    answer_requests(generate, settings, pipe)


def hf(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """`generate` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlhf.distributed.collectives import local_device

    pipe.mark_baseline()
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=inputs.weights_dtype(settings))
    model.eval().to(local_device())
    pad = AutoTokenizer.from_pretrained(settings["model"]).pad_token_id
    model.generation_config.eos_token_id = None

    @torch.no_grad()
    def generate(rows: list[list[int]], length: int) -> int:
        ids, mask = (part.to(model.device) for part in inputs.padded(rows, pad))
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        rollout = model.generate(ids, attention_mask=mask.long(), max_new_tokens=length, pad_token_id=pad, **sampled)
        return int(rollout.shape[0] * (rollout.shape[1] - ids.shape[1]))

    answer_requests(generate, settings, pipe)


def engine(settings: dict[str, Any], pipe: WorkerPipe) -> None:
    """vLLM's own sampling, with log-probs, as a trainer needs them."""
    import vllm

    pipe.mark_baseline()
    model = vllm.LLM(
        settings["model"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype={"bf16": "bfloat16", "fp32": "float32"}[settings["dtype"]],
        max_model_len=max(map(len, settings["prompts"])) + settings["response_length"],
        enable_prefix_caching=False,  # every turn has the same prompts
        logprobs_mode="processed_logprobs",
    )

    def generate(rows: list[list[int]], length: int) -> int:
        sampling = vllm.SamplingParams(ignore_eos=True, max_tokens=length, logprobs=0, detokenize=False)
        outputs = model.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    answer_requests(generate, settings, pipe)


def answer_requests(
    generate: Callable[[list[list[int]], int], int], settings: dict[str, Any], pipe: WorkerPipe
) -> None:
    """Answer requests. `generate(prompts, length)` returns the number of new tokens."""
    length, sizes = settings["response_length"], settings["sizes"]
    pipe.ready()
    while work := pipe.next_request():
        sizes_to_do = list(sizes) if work == WARM_UP else [int(work.split()[0])]
        tokens, first, seconds = 0, 0.0, 0.0
        for size in sizes_to_do:
            rows = settings["prompts"][:size]
            start = harness.clock()
            generate(rows, 1)
            first_end = harness.clock()
            tokens += generate(rows, length)
            first, seconds = first + first_end - start, seconds + harness.clock() - first_end
        assert tokens == sum(sizes_to_do) * length, f"{tokens} tokens, expected {sum(sizes_to_do) * length}"
        pipe.reply(seconds=seconds, tokens=tokens, first_s=first, step_ms=1e3 * (seconds - first) / (length - 1))


def work_name(size: int) -> str:
    """The name of a piece of work."""
    return f"{size} prompts"


def step_bytes(options: Options, prompts: list[list[int]]) -> float:
    """Bytes read in a decode step, on average: the step for token t + 1 attends to the prompts and t tokens of each."""
    cached = sum(map(len, prompts)) + len(prompts) * options.response_length / 2
    return limits.model_work(options.model).decoding_bytes(cached, 2 if options.dtype == "bf16" else 4)


def shares(rows: harness.Rows, options: Options, prompts: list[list[int]]) -> dict[str, Any]:
    """Shares of the memory bound, measured in the same turn."""
    shares_by_name = {}
    for name in (name for name in rows if name != MACHINE):
        for size in options.prompts:
            read = step_bytes(options, prompts[:size])
            pairs = zip(rows[name][work_name(size)], rows[MACHINE][work_name(size)], strict=True)
            values = [read / (machine["read_gb_per_s"] * 1e9) / (row["step_ms"] / 1e3) for row, machine in pairs]
            known = name == OURS and size in (16, 64)
            least, aim = goal(f"decoding {size}, share of the memory bound") if known else (None, None)
            shares_by_name[f"decoding, share of the memory bound, {name}, {work_name(size)}"] = outcome.share(
                values, least, aim
            )
    return shares_by_name


def report(options: Options, rows: harness.Rows, prompts: list[list[int]]) -> dict[str, Any]:
    """Milliseconds of a decode step, the size of the work, and shares of the memory bound."""
    works = {work_name(size): prompts[:size] for size in options.prompts}
    steps = {
        who: {work: outcome.spread([row["step_ms"] for row in rows[who][work]]) for work in works}
        for who in rows
        if who != MACHINE
    }
    for who, of_works in steps.items():
        print(f"{who}: " + ", ".join(f"{s['median']:.1f} ms a decode step ({work})" for work, s in of_works.items()))
    size = {
        "prompt_tokens": {work: sum(map(len, each)) for work, each in works.items()},
        "mb_a_step": {work: step_bytes(options, each) / 1e6 for work, each in works.items()},
    }
    return {"ms_a_decode_step": steps, "set": size, "shares": shares(rows, options, prompts)}


COMPARISON = Comparison(
    "rollout", "Sampling here and in transformers.", Options, "tokens", "transformers' generate",
    programs={
        OURS: Program(ours), PEER: Program(hf),
        ENGINE: Program(engine, python=harness.ROOT / ".venv-vllm/bin/python", variables=ENGINE_VARIABLES),
        MACHINE: Program(limits.contender),
    },
    goals={PEER: "rollout", ENGINE: "rollout beside vLLM"}, prepare=prepare, report=report,
    works=lambda options: [work_name(size) for size in options.prompts],
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(COMPARISON.main))

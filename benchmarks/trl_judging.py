"""The parts of step 3 that benchmarks/ppo_quality.py uses for TRL: order of prompts, judge, held-out prompts."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from data.batches import Batches, prompt_batch
from data.dataset import PromptDataset
from rlhf import rewards
from rlhf.console import quiet_libraries
from rlhf.distributed import collectives
from rlhf.engine.adamw import schedule
from rlhf.storage import disk
from rlhf.types import SampledRollout, Samples
from step3_ppo.inputs import check
from step3_ppo.models import reward_context
from step3_ppo.resolved import resolve_models
from step3_ppo.schedule import iterations

SCORES_AGREE = 0.01
"""largest difference by rounding of TRL's and our reward model, both in fp32; scores are at most about 4"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompts and the learning rate of every iteration."""

    tokenizer: Any
    prompts: PromptDataset
    indices: list[list[int]]
    learning_rate_factors: list[float]
    """factor of the peak learning rate, mean over the optimizer steps of each iteration"""

    @property
    def ids(self) -> list[list[list[int]]]:
        return [[list(self.prompts[i].ids) for i in part] for part in self.indices]  # type: ignore[union-attr]


def plan(ppo: Any) -> Plan:
    """The prompts of each iteration that step 3 uses with these options on one device."""
    quiet_libraries()
    tokenizer, data = check(ppo)
    batches = Batches(len(data.train), ppo.batch_size, ppo.seed)
    count, steps = iterations(ppo), ppo.num_ppo_epochs * ppo.num_mini_batches
    factor = schedule(ppo, count * steps)
    factors = [sum(factor(i * steps + step) for step in range(steps)) / steps for i in range(count)]
    return Plan(tokenizer, data.train, list(islice(batches.until_epoch(epochs=count), count)), factors)


def write_heldout(ppo: Any, path: Path) -> None:
    """Write the held-out prompts in the format that `rlhf evaluate` reads."""
    quiet_libraries()
    _, data = check(ppo)
    with path.open("w", encoding="utf-8") as file:
        for item in data.evaluation:
            messages = [{"role": message.role, "content": message.content} for message in item.row.prompt]  # type: ignore[union-attr]
            file.write(json.dumps({**item.row.columns, "prompt": messages}, ensure_ascii=False) + "\n")  # type: ignore[union-attr]


def judge(ppo: Any, plan: Plan, folder: Path) -> None:
    """Turn responses.jsonl of TRL's half into rollouts.jsonl, with the text and the true score of each response.

    Our reward model also scores the first iteration, and must agree with TRL's.
    """
    with (folder / "responses.jsonl").open(encoding="utf-8") as file:  # splitlines would split a text at U+2028
        rows = [json.loads(line) for line in file]
    context = reward_context(resolve_models(ppo.model_copy(update={"dtype": "fp32"})).config, plan.tokenizer)
    judge = rewards.open_source(ppo.judge, context)
    judged = []
    for number, indices in enumerate(plan.indices, 1):
        iteration_rows = [row for row in rows if row["iteration"] == number]
        samples = _samples(iteration_rows, indices, plan)
        if number == 1:
            _require_same_scores(rewards.open_source("learned", context)(samples).tolist(), iteration_rows)
        scored = zip(iteration_rows, samples.prompts, samples.responses, judge(samples).tolist(), strict=True)
        ended = samples.rollout.ended.tolist()
        for i, (row, prompt, response, score) in enumerate(scored):
            judged.append(
                {"iteration": number, "prompt": prompt, "response": response, "kl": row["kl"], "kl_k3": row["kl_k3"]}
                | {"tokens": len(row["response_ids"]), "ended": ended[i], "learned": row["learned"], "true": score}
            )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in judged)
    disk.write_text(folder / "rollouts.jsonl", text)


def _samples(rows: list[dict[str, Any]], indices: list[int], plan: Plan) -> Samples:
    """TRL's responses of one iteration, in the form that step 3 has them."""
    prompts = prompt_batch([plan.prompts[i] for i in indices], plan.tokenizer.pad_token_id)  # type: ignore[misc]
    responses = [row["response_ids"] for row in rows]
    width = max(map(len, responses))
    mask = torch.tensor([[t < len(ids) for t in range(width)] for ids in responses])
    ids = torch.tensor([ids + [plan.tokenizer.pad_token_id] * (width - len(ids)) for ids in responses])
    ended = torch.tensor([bool(ids) and ids[-1] == plan.tokenizer.eos_token_id for ids in responses])
    rollout = SampledRollout(
        prompt_ids=prompts.ids,
        prompt_mask=prompts.mask,
        response_ids=ids,
        mask=mask,
        sampled_logprobs=torch.zeros(mask.shape),
        ended=ended,
        rows=prompts.rows,
    )
    return rewards.as_samples(rollout.to(collectives.local_device()), plan.tokenizer)


def _require_same_scores(ours: list[float], rows: list[dict[str, Any]]) -> None:
    gaps = [abs(score - row["learned"]) for score, row in zip(ours, rows, strict=True)]
    assert max(gaps) < SCORES_AGREE, f"the reward models differ by up to {max(gaps):.3g}: {ours[:4]}, {rows[:4]}"
    print(f"trl: our reward model gives its first responses the same scores, within {max(gaps):.2g}")

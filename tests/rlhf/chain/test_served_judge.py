"""A chain whose judge is a model behind `transformers serve`."""

import json
import random
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from data.sources.demo import ADJECTIVES, ANIMALS, COLOURS, LOCATIONS, SLOTS, WORTH, Subject
from rlhf.rewards import cost
from tests.docs.test_chat_page import running
from tests.support import tiny

ROOT = Path(__file__).parents[3]
QUESTION = "rate 1 to 10: {response}"
FIXED = ("rate", "to", "10:", "the", "is", "and", ".")
"""words of the question and of every response"""


def rating(response: str) -> str:
    """5 for plain words, up to 9 for kind ones."""
    return str(5 + sum(WORTH.get(word, 0) for word in response.split()) * 4 // SLOTS)


def write_judge(folder: Path) -> None:
    """A tiny model that has learned the ratings of the demo's responses."""
    words = {*FIXED, *map(str, range(1, 11)), *COLOURS, *ANIMALS, *LOCATIONS, *WORTH}
    tokenizer, draw = tiny.tokenizer(sorted(words)), random.Random(0)
    model = tiny.causal_lm(std=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    adjectives = [word for some in ADJECTIVES.values() for word in some]
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 300)
        rows = []
        for _ in range(64):
            subject = Subject(*(draw.choice(some) for some in (COLOURS, ANIMALS, LOCATIONS)))
            response = subject.respond(draw.choices(adjectives, k=SLOTS))
            message = [{"role": "user", "content": QUESTION.format(response=response)}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            rows.append([*tokenizer(text)["input_ids"], *tokenizer(rating(response))["input_ids"], tiny.EOS])
        ids = torch.tensor(rows)
        logprobs = model(input_ids=ids).logits.log_softmax(-1)[:, -3:-1].gather(2, ids[:, -2:, None])
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(url: str, response: str) -> str:
    body = {"model": "judge", "messages": [{"role": "user", "content": QUESTION.format(response=response)}]}
    data = json.dumps({**body, "stream": False, "temperature": 0.0, "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


@pytest.mark.long
def test_a_served_model_judges_a_chain(tmp_path: Path) -> None:
    """The judge's numbers are what the same server says of the same response; it sees that the policy gets kinder."""
    pytest.importorskip("uvicorn", reason="transformers[serving] is not installed")
    write_judge(tmp_path / "judge")
    (tmp_path / "question.txt").write_text(QUESTION)
    with running("transformers serve judge --host 127.0.0.1", tmp_path) as url:
        judge = f"openai,base_url={url}/v1,model=judge,prompt={tmp_path}/question.txt,max_tokens=8,concurrency=2"
        short = ["--ppo.total-episodes", "2560", "--ppo.eval-samples", "40", "--output-dir", f"{tmp_path}/run"]
        command = [sys.executable, "train.py", "--config", "configs/demo.yaml", "--ppo.judge", judge, *short]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
        stage = tmp_path / "run/step3_ppo"
        samples = [json.loads(line) for line in (stage / "samples.jsonl").read_text().splitlines()]
        for sample in samples:
            for number, side in (("judge_before", "before"), ("judge", "after")):
                text = ask(url, sample[side])
                assert sample[number] == (float(text) if text.isdecimal() and 1 <= int(text) <= 10 else None), text
    numbers = json.loads((stage / "manifest.json").read_text())["metrics"]
    assert numbers["eval_judge"] > numbers["eval_judge_before"] + 1
    requests, tokens = cost(stage / "answers")
    assert (
        requests == len({sample[side] for sample in samples for side in ("before", "after")}) and tokens > 9 * requests
    )
    assert f"{requests:,} requests, {tokens:,} tokens" in (tmp_path / "run/report.html").read_text()

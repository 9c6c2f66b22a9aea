"""`rlhf export --at`: a policy on the straight line between its reference and the tuned one.

tests/contracts/test_trunk.py has the merged adapters.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from data.prepare.encode import Demonstration
from rlhf.chain import export, line
from rlhf.errors import UserError
from rlhf.maths.intervals import student_t
from tests.support import chat_runs, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_runs.write(tmp_path_factory.mktemp("run"))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [0.0, 0.25, 1.0, 1.5])
def test_every_weight_is_so_far_on_the_way(run: Path, tmp_path: Path, at: float) -> None:
    """Also beyond the tuned policy; the sum is in float64, of numpy."""
    assert export.main([str(run), "--merge", str(tmp_path / "out"), "--at", str(at)]) == 0
    reference, policy = weights(run / "step1_sft/model"), weights(run / "step3_ppo/actor")
    exported = weights(tmp_path / "out")
    assert {*exported} == {*policy} and any(not torch.equal(reference[name], policy[name]) for name in policy)
    for name, weight in exported.items():
        first, last = reference[name].double().numpy(), policy[name].double().numpy()
        expected = torch.from_numpy(first + at * (last - first))
        torch.testing.assert_close(weight.double(), expected, rtol=2**-22, atol=1e-7)
        if at in (0.0, 1.0):
            assert torch.equal(weight, (reference if at == 0 else policy)[name])
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()


def test_tied_weights_go_the_way_once(tmp_path: Path) -> None:
    for seed, name in enumerate(("reference", "policy")):
        torch.manual_seed(seed)
        config = tiny.config_of("llama")
        config.tie_word_embeddings = True
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tiny.tokenizer().save_pretrained(tmp_path / name)
    line.between(str(tmp_path / "reference"), str(tmp_path / "policy"), 0.25, tmp_path / "out")
    first, last, exported = (weights(tmp_path / name) for name in ("reference", "policy", "out"))
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    for name, weight in exported.items():
        torch.testing.assert_close(weight, 0.75 * first[name] + 0.25 * last[name], rtol=1e-6, atol=1e-7)


def test_what_has_no_line_is_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--merge", str(out), "--at", "0.5"]
    with pytest.raises(UserError, match="does not say what its policy was trained from; expected a run"):
        export.main([str(run / "base"), *words])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).touch()
    with pytest.raises(UserError, match=r"--at 0\.5: .*adapter is an adapter, expected whole models"):
        line.between(str(adapter), str(run / "base"), 0.5, out)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("")
    with pytest.raises(UserError, match="it exists, expected a new directory"):
        export.main([str(run), *words])
    assert [path.name for path in out.iterdir()] == ["mine"]


def demonstrations() -> list[Demonstration]:
    """30 rows of three to nine tokens, of which all but the first two are learned."""
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(4, 20, (3 + i % 7,), generator=draw).tolist() for i in range(30)]
    return [Demonstration(tuple(ids), ((2, len(ids)),)) for ids in rows]


def questions() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(4)
    rows = torch.randint(4, 20, (60, 4), generator=draw).tolist()
    return [
        {
            "question": f"w{a} w{b}",
            "choices": {"text": [f"w{c}", f"w{d}"], "label": ["A", "B"]},
            "answerKey": "AB"[a % 2],
        }
        for a, b, c, d in rows
    ]


def logprob(model: PreTrainedModel, ids: Sequence[int], start: int) -> Tensor:
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs[range(start - 1, len(ids) - 1), ids[start:]].sum()


def choice_logprobs(model: PreTrainedModel) -> Tensor:
    """Of the two choices of each question, [60, 2]. A choice is one token."""
    texts = [(f"Question: {row['question']}\nAnswer:", row["choices"]["text"]) for row in questions()]
    rows = torch.tensor([tiny.tokenizer()(f"{text} {choice}").input_ids for text, both in texts for choice in both])
    before_choice = model(rows).logits[:, -2].log_softmax(-1)
    return before_choice.gather(1, rows[:, -1:]).view(-1, 2)


def right_choices() -> list[int]:
    return ["AB".index(row["answerKey"]) for row in questions()]


def write_run(folder: Path, on_demonstrations: float, on_questions: float) -> None:
    """A reference, and a policy that is one step of gradient away from it: up, or down, both costs."""
    model = tiny.causal_lm().double()
    gains = torch.stack([logprob(model, row.ids, 2) for row in demonstrations()]).mean()
    both = choice_logprobs(model)
    answers = (both[range(60), right_choices()] - both.mean(1)).mean()
    (on_demonstrations * gains + on_questions * answers).backward()
    for name in ("reference", "policy"):
        model.float().save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
        for weight in model.parameters():
            weight.data += 0 if weight.grad is None else weight.grad


def losses_at(folder: Path) -> dict[float, str]:
    """The costs with a loss at each tenth of the way, from its end, by transformers in float64, one row at a time, and
    the variance of a ratio."""
    first, model = (AutoModelForCausalLM.from_pretrained(folder / name).double() for name in ("reference", "policy"))
    with torch.no_grad():
        before = [float(logprob(first, row.ids, 2)) for row in demonstrations()]
        right_before = choice_logprobs(first).argmax(1) == torch.tensor(right_choices())
        steps = [weight - start for weight, start in zip(model.parameters(), first.parameters(), strict=True)]
        n = [len(row.ids) - 2 for row in demonstrations()]
        losses = {}
        for tenth in range(10, 0, -1):
            for weight, start, step in zip(model.parameters(), first.parameters(), steps, strict=True):
                weight.copy_(start + tenth / 10 * step)
            after = [float(logprob(model, row.ids, 2)) for row in demonstrations()]
            d = [x - y for x, y in zip(after, before, strict=True)]
            ratio = sum(d) / sum(n)
            variance = sum((x - ratio * count) ** 2 for x, count in zip(d, n, strict=True)) / 29 * 30 / sum(n) ** 2
            right = choice_logprobs(model).argmax(1) == torch.tensor(right_choices())
            changes = [*(right.double() - right_before.double()).tolist(), 1.0, -1.0]
            mean = sum(changes) / 62
            half = student_t(61) * math.sqrt(sum((x - mean) ** 2 for x in changes) / 61 / 62)
            lost = {
                "demonstrations": ratio + student_t(29) * math.sqrt(variance) < 0,
                "questions": sum(changes) / 60 + half < 0,
            }
            losses[tenth / 10] = " and ".join(name for name, is_lost in lost.items() if is_lost) or "no"
    return losses


@pytest.mark.parametrize(
    ("step", "farthest"),
    [((1.0, 0.0), 1.0), ((15.0, 0.0), None), ((3.0, -60.0), None), ((-5.0, 0.0), 0.0)],
    ids=["it gains", "a step too far", "answers are lost", "every point loses"],
)
def test_the_farthest_point_without_a_loss_is_written(
    step: tuple[float, float],
    farthest: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path, *step)
    keep, out = tmp_path / "keep.jsonl", tmp_path / "out"
    keep.write_text("".join(json.dumps(row) + "\n" for row in questions()))
    monkeypatch.setattr(line, "held_out", lambda *_: demonstrations())
    monkeypatch.setattr(line.manifests, "stage_of", lambda path: Path(path))
    expected = losses_at(tmp_path)
    best = max((at for at, lost in expected.items() if lost == "no"), default=0.0)
    assert best == farthest if farthest is not None else 0 < best < 1, expected
    ends = str(tmp_path / "reference"), str(tmp_path / "policy")
    if best:
        assert line.best(*ends, str(keep), out) == best
        line.between(*ends, best, tmp_path / "between")
        written, at_best = weights(out), weights(tmp_path / "between")
        assert all(torch.equal(written[name], weight) for name, weight in at_best.items())
    else:
        with pytest.raises(UserError, match=r"--at best: expected a point .*, got one at each, down to 0\.1; nothing"):
            line.best(*ends, str(keep), out)
        assert not out.exists()
    _, reference, *rows = capsys.readouterr().out.splitlines()
    assert reference.split()[0] == "0" and reference.endswith("  no")
    shown = {float(row.split()[0]): row.rsplit("  ", 1)[1] for row in rows if row.split()[0][0].isdigit()}
    assert shown == {at: lost for at, lost in expected.items() if at >= best}


@pytest.mark.parametrize("count", [0, 1])
def test_without_rows_there_is_no_best_point(
    count: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One demonstration has no interval."""
    monkeypatch.setattr(line, "held_out", lambda *_: demonstrations()[:count])
    with pytest.raises(
        UserError, match=r"--at best: got fewer than 2 held-out demonstrations of .*, and no questions; name some"
    ):
        export.main([str(run), "--merge", str(tmp_path / "out"), "--at", "best"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"--keep q\.jsonl: expected --at best beside it"):
        export.main([str(run), "--merge", str(tmp_path / "out"), "--at", "0.5", "--keep", "q.jsonl"])

"""What finished stages claim, computed again by plain transformers, and by peft for adapters.

Nothing of this project's forward code is used: no packed rows, no kernels, no engine, no score head of its own. The
rows and their ids are those that the data preparation gives for the saved tokenizer. Each row goes through the saved
model alone, in fp32 and without padding.

The bounds are derived (rlhf/chain/claims.py).
"""

import gc
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig, PreTrainedModel

from data.config import recorded_options
from data.dataset import PhaseData, open_datasets
from data.prepare.encode import Recipe
from rlhf import plugins
from rlhf.chain.claims import (
    EPS,
    PRODUCTS,
    ROUNDINGS,
    Claim,
    P,
    farthest,
    largest_error,
    log_prob_spread,
    mean_error,
    merging_error,
    same,
)
from rlhf.chain.diff import recorded_stages
from rlhf.chat.run_models import input_path
from rlhf.distributed import collectives
from rlhf.engine.precision import BY_NAME
from rlhf.errors import UserError
from rlhf.evaluation.results_table import distinct
from rlhf.hub.short_names import resolve
from rlhf.hub.untrusted import is_adapter
from rlhf.maths.bag_of_words import preference_gaps
from rlhf.maths.intervals import mean_interval
from rlhf.maths.preferences import CALIBRATION_BINS, calibration_error, in_order
from rlhf.models.load import explain_load_errors, load_config, refuse_mismatch
from rlhf.models.reading import KEY
from rlhf.models.traits import attention_options
from rlhf.report.records import StageRecord
from rlhf.storage import manifests
from rlhf.text.dialogues import Template
from rlhf.text.tokenizer import describe_template, load_tokenizer, prepare_tokenizer, same_ids
from step2_reward.stage import MEASURED
from step3_ppo.config import BEST_OF
from step3_ppo.worth import read_scores, worth_of

PROMPTS = 16
"""to which a policy responds, until one response ends"""


def finished_stages(run: Path) -> list[tuple[int, StageRecord]]:
    """The finished stages of a run, or the one that it is, with their steps. Raises: UserError without any."""
    finished = [(step, stage) for step, stage in recorded_stages(run).items() if stage.manifest is not None]
    if not finished:
        raise UserError(f"{run}: got no finished stage, expected the --output-dir of a run, or one of its stages")
    return finished


def sealed_files(stage: StageRecord) -> list[Path]:
    """The files of a stage that its numbers depend on."""
    report, models = stage.declaration.report, (stage.manifest or {})["files"]
    names = [manifests.MANIFEST, manifests.METRICS, report.samples, report.pair_scores, BEST_OF, *models]
    return [stage.directory / name for name in names if name and (stage.directory / name).is_file()]


def recount(step: int, stage: StageRecord) -> Iterator[Claim]:
    """All claims of a stage. What cannot be computed again because of damage, for example, does not hold; at the end
    stand the numbers of the manifest that nothing here computes again."""
    try:
        manifests.read_manifest(stage.directory)
        yield same("manifest and files of the models", True)
        run = Recount(stage)
        yield from {1: _fine_tuning, 2: _reward_model, 3: _reinforcement}[step](run)
        yield from (Claim(name, run.metrics[name], None) for name in run.left)
    except (UserError, LookupError, TypeError, ValueError) as error:  # the latter of a file with other columns
        yield Claim("can be computed again", "yes", f"no: {error}")


def load_plainly(auto: Any, path: str, **options: object) -> PreTrainedModel:
    """The saved model as transformers loads it, or as peft does if it is an adapter. auto: a class of transformers.
    Raises: UserError."""
    with explain_load_errors(path):
        if is_adapter(Path(path)):
            import peft  # it takes more than a second

            auto = getattr(peft, auto.__name__.replace("Auto", "AutoPeft"))
            return auto.from_pretrained(path, trust_remote_code=False, **options)
        model, info = auto.from_pretrained(path, trust_remote_code=False, output_loading_info=True, **options)
    refuse_mismatch(path, info)
    return model


class Recount:
    """A finished stage: its files, its data, and its models as plain transformers loads them."""

    def __init__(self, stage: StageRecord) -> None:
        self.stage, self.manifest = stage, stage.manifest or {}
        self.config = self.manifest["config"]
        self.metrics = {name: math.nan if x is None else x for name, x in self.manifest["metrics"].items()}
        self.left = dict.fromkeys(self.metrics)  # those that no claim was made of
        self.device = collectives.local_device()
        self.merging = 0.0  # s / scale of what merging its adapter has changed in the model that was loaded last
        if self.config.get("quantize", "none") != "none":
            raise UserError("it ran on quantised weights, which plain transformers does not have")

    def path(self, folder: str) -> str:
        return str(self.stage.directory / folder)

    def input(self, name: str) -> str:
        """The path, or hub id, of a model that the stage started from."""
        return resolve(str(input_path(self.manifest, name, self.stage.directory.parent)))

    def model(self, path: str, classifier: bool = False) -> tuple[PreTrainedModel, float]:
        """A language model, or a classifier with one label, in fp32; and s / scale in the dtype of the run."""
        gc.collect()  # the model before this one
        saved: Any = load_config(path)  # in the dtype that the run chose
        options = attention_options(saved) | ({"num_labels": 1} if classifier else {})
        auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
        model = load_plainly(auto, path, dtype=torch.float32, **options)
        if classifier:  # it is read at the last id, also where a policy has sampled the id of padding
            model.config.pad_token_id = model.config.get_text_config().pad_token_id = None
        dtype = BY_NAME.get(self.config["dtype"]) or saved.dtype or torch.float32
        text, eps = saved.get_text_config(), torch.finfo(dtype).eps
        sums = PRODUCTS * text.hidden_size if eps == EPS else 0
        roundings = text.num_hidden_layers * (ROUNDINGS + sums)
        merged = self.config.get("adapter") is not None and not is_adapter(Path(path))
        self.merging = merged * eps * math.sqrt(text.num_hidden_layers * PRODUCTS / 12)
        return model.eval().to(self.device), eps * math.sqrt(roundings / 12)

    def data(self, folder: str, recipe: Recipe) -> tuple[PhaseData[Any], Template]:
        """The rows as the saved tokenizer gives them, and its template."""
        tokenizer = prepare_tokenizer(load_tokenizer(self.path(folder)), "auto")
        return open_datasets(recorded_options(self.config), recipe, tokenizer), Template(tokenizer)

    def files(self, data: PhaseData[Any], template: Template) -> Iterator[Claim]:
        """Claims of every stage: its numbers in both files, its rows, its template."""
        [last] = self.stage.of_kind("eval")[-1:] or [{}]
        numbers = {name: x for name, x in self.metrics.items() if math.isfinite(x)}
        agree = sum(last.get(name) == float(f"{x:.6g}") for name, x in numbers.items())
        yield Claim("numbers of the manifest that metrics.jsonl has", len(numbers), agree)
        recorded = self.manifest["data"]
        sources = ((source["data_path"], source["fingerprint"]) for source in data.report["sources"])
        yield same("rows of the data", all(recorded.get(path) == fingerprint for path, fingerprint in sources))
        yield same("chat template, end token", describe_template(template.tokenizer) == self.manifest["template"])

    def claim(self, metric: str, value: float, bound: float = 0.0, what: str = "") -> Claim:
        """The claim of the manifest on a metric; NaN if it has none."""
        self.left.pop(metric, None)
        return Claim(f"{metric}{what}", self.metrics.get(metric, math.nan), value, bound)

    def mean(self, metric: str, values: Tensor, what: str = "") -> Claim:
        """The mean of N numbers of fp32, which fp32 adds up with N roundings."""
        return self.claim(metric, values.double().mean().item(), len(values) * EPS * values.abs().mean().item(), what)

    def column(self, name: str) -> Tensor:
        """A number of each sample, float64 [N]."""
        return torch.tensor([math.nan if x[name] is None else x[name] for x in self.stage.samples]).double()


@torch.no_grad()
def outputs(model: Any, ids: Sequence[int]) -> Tensor:
    """What a model computes of a row: the logits of each id, or a score. Raises: UserError for unknown ids."""
    if max(ids) >= model.get_input_embeddings().num_embeddings:
        raise UserError("the saved tokenizer gives ids that the model does not have")
    logits: Tensor = model(input_ids=torch.tensor([ids], device=model.device)).logits[0]
    return logits


def log_probs(model: Any, ids: Sequence[int], start: int = 1, temperature: float = 1.0) -> tuple[Tensor, float]:
    """The log-probs of the ids from `start` on, float64 [T], and the mean square of a logit."""
    logits = outputs(model, ids)[-len(ids) :].float() / temperature  # virtual tokens stand before the ids
    logits = logits[start - 1 : -1]
    index = torch.tensor(ids[start:], device=logits.device)[:, None]
    return logits.log_softmax(-1).gather(1, index)[:, 0].double().cpu(), logits.square().mean().item()


def scores(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """The score of each row by a classifier, float64 [N]."""
    return torch.tensor([float(outputs(model, row)[0]) for row in rows], dtype=torch.float64)


def _fine_tuning(run: Recount) -> Iterator[Claim]:
    data, template = run.data("model", Recipe("sft", run.config["loss_on"], run.config["objective"]))
    yield from run.files(data, template)
    model, rounding = run.model(run.path("model"))
    rows = [(row, *log_probs(model, row.ids)) for row in data.evaluation]
    learned = torch.cat([values[start - 1 : end - 1] for row, values, _ in rows for start, end in row.spans])
    scale = math.sqrt(sum(square for _, _, square in rows) / len(rows))
    bound = mean_error(rounding * scale, len(learned)) + merging_error(run.merging * scale)
    bound += EPS * (scale + learned.abs().mean().item())
    perplexity = math.exp(-learned.mean().item())
    yield run.claim("eval_perplexity", perplexity, perplexity * math.expm1(bound))
    prompts = [row.ids[: row.spans[-1][0]] for row in data.evaluation[:PROMPTS]]
    yield _ends(model, prompts, template, run.config["max_length"])


def _reward_model(run: Recount) -> Iterator[Claim]:
    data, template = run.data("model", Recipe("reward"))
    yield from run.files(data, template)
    model, rounding = run.model(run.path("model"), classifier=True)
    pairs = data.evaluation
    both = torch.stack([scores(model, [getattr(x, side) for x in pairs]) for side in ("chosen", "rejected")])
    gap, bound = both[0] - both[1], largest_error(rounding * both.square().mean().sqrt().item(), both.numel())
    weight = torch.from_numpy(pairs.weights / pairs.weights.sum()).double()
    yield _share_in_order(run, "eval_accuracy", gap, weight, 2 * bound)
    yield run.claim("eval_loss", float((weight * softplus(-gap)).sum()), 2 * bound)
    yield run.claim("eval_margin", float((weight * gap).sum()), 2 * bound)
    yield run.claim("eval_score_mean", both.mean().item(), bound)
    yield run.claim("eval_score_std", both.std(correction=0).item(), bound)
    yield _calibration_error(run, gap, 2 * bound)
    yield from _simple_rules(run, data, gap, weight, 2 * bound)
    file = run.stage.pair_scores or {"chosen": (), "rejected": (), "weight": ()}
    saved = torch.tensor([file["chosen"], file["rejected"]], dtype=torch.float64)
    for name, claims, values in (
        ("scores of the chosen sides", saved[0], both[0]),
        ("scores of the rejected sides", saved[1], both[1]),
        ("half of their differences", (saved[0] - saved[1]) / 2, gap / 2),
    ):  # The file has the pairs in the order of their lengths. Sorting brings two lists no further apart.
        yield farthest(name, claims.sort().values.tolist(), values.sort().values, bound)
    yield same("weights of the pairs", sorted(file["weight"]) == sorted(pairs.weights.tolist()))


def _share_in_order(run: Recount, metric: str, gap: Tensor, weight: Tensor, bound: float) -> Claim:
    """The claim on the weight of the pairs in the right order. Rounding can change that of pairs below the bound."""
    weight = weight / weight.sum()
    near = float(weight[gap.abs() <= bound].sum())
    return run.claim(metric, float((weight * in_order(gap)).sum()), near + len(gap) * EPS)


def _calibration_error(run: Recount, gap: Tensor, bound: float) -> Claim:
    """The claim on the calibration. A prediction sigmoid(|gap|) is off by a quarter of the gap's error. A pair whose
    order, or bin, rounding can change moves the sum of one bin, or two, by 1."""
    bins = 2 * CALIBRATION_BINS
    low, high = (((torch.sigmoid((gap.abs() + x).clamp(min=0)) - 0.5) * bins).long() for x in (-bound, bound))
    moved = float(((gap.abs() <= bound).long() + 2 * (low != high)).double().mean())
    return run.claim("eval_ece", calibration_error(gap), bound / 4 + moved + EPS)


def _simple_rules(run: Recount, data: PhaseData[Any], gap: Tensor, weight: Tensor, bound: float) -> Iterator[Claim]:
    """Claims on the rule that prefers the longer response, on the pairs where it errs or not, and on a bag of words."""
    longer = torch.tensor([len(x.chosen) - len(x.rejected) for x in data.evaluation])
    yield _share_in_order(run, "eval_length_rule", longer, weight, -1.0)
    for name, part in {"longer": longer > 0, "shorter": longer < 0}.items():
        if part.any():
            yield _share_in_order(run, f"eval_accuracy_if_{name}", gap[part], weight[part], bound)
    train, held_out = (
        [(x.chosen[x.prompt_length :], x.rejected[x.prompt_length :]) for x in pairs]
        for pairs in (data.train[:MEASURED], data.evaluation)
    )
    by_words = preference_gaps(train, held_out)
    alike = by_words.abs() < 1e-6 * by_words.abs().max()  # sums of equal weights in another order
    yield _share_in_order(run, "eval_words_rule", by_words * ~alike, weight, -1.0)


def _reinforcement(run: Recount) -> Iterator[Claim]:
    data, template = run.data("actor", Recipe("ppo"))
    yield from run.files(data, template)
    samples = run.stage.samples
    if not samples:
        raise UserError("it has no samples of held-out responses")
    rows = data.evaluation[: len(samples)]
    texts = [template.prompt_text(row.row.prompt, row.row.variables) for row in rows]
    yield same("prompts of the samples", texts == [sample["prompt"] for sample in samples])
    yield from _of_samples(run)
    for folder in run.manifest["models"]:
        if folder == "critic":
            yield same("critic can be loaded", bool(run.model(run.path(folder), classifier=True)))
        else:
            policy, _ = run.model(run.path(folder))
            prompts = [row.ids for row in rows[:PROMPTS]]
            yield _ends(policy, prompts, template, run.config["response_length"], f" of {folder}")
    yield from _responses(run, [row.ids for row in rows], template)


def _of_samples(run: Recount) -> Iterator[Claim]:
    """Claims that the numbers of the samples decide: means, intervals, and what a response is worth in best-of-n."""
    names = [name for name in ("score", "judge", "kl") if name in run.stage.samples[0]]
    after = {name: run.column(name) for name in names}
    before = {name: run.column(f"{name}_before") for name in names if name != "kl"}
    if "judge" in names:  # of the prompts on which it has both numbers
        both = after["judge"].isfinite() & before["judge"].isfinite()
        after["judge"], before["judge"] = after["judge"][both], before["judge"][both]
    for name, values in [*after.items(), *((f"{name}_before", values) for name, values in before.items())]:
        yield run.mean(f"eval_{name}", values, ", of the samples")
    spreads = {f"{name}_ci95": values for name, values in after.items()}
    if "judge" in names:
        spreads["judge_gain_ci95"] = after["judge"] - before["judge"]
    for name, values in spreads.items():
        if len(values) > 1:
            half = mean_interval(values).half_width
            yield run.claim(f"eval_{name}", half, EPS * (half + values.abs().max().item()))
    changed = [x["before"] != x["after"] for x in run.stage.samples]
    yield run.claim("eval_changed", sum(changed) / len(changed), EPS)
    claimed = [name for name in run.left if name == "eval_best_of" or "_worth_" in name or "_efficiency" in name]
    if claimed:
        columns = 1 + ("eval_judge_worth_best_of" in run.metrics)
        start = read_scores(run.stage.directory / BEST_OF, columns)
        pairs = [(name, before[name], after[name]) for name in before]
        numbers = {} if start is None else worth_of(start, pairs, after["kl"])
        for name in {**dict.fromkeys(claimed), **numbers}:
            value = numbers.get(name, math.nan)
            yield run.claim(name, value, EPS * abs(value))


def _responses(run: Recount, prompts: Sequence[Sequence[int]], template: Template) -> Iterator[Claim]:
    """Claims on the saved responses: texts, lengths, ends, KL and scores."""
    samples, temperature = run.stage.samples, run.config["temperature"]
    (actor, rounding), responses = run.model(run.path("actor")), [sample["tokens"] for sample in samples]
    merging = run.merging
    ended = [ids[-1] in _end_ids(actor, template) for ids in responses]
    triples = list(zip(prompts, responses, ended, strict=True))
    texts = [template.response_text(ids[:-1] if end else ids) for _, ids, end in triples]
    yield same("texts of the samples", texts == [sample["after"] for sample in samples])
    lengths = torch.tensor([float(len(ids)) for ids in responses])
    yield run.mean("eval_response_length", lengths)
    yield run.mean("eval_ended", torch.tensor(ended).float())
    yield run.claim("eval_distinct_2", distinct(responses, 2), EPS)

    after = [log_probs(actor, (*prompt, *ids), len(prompt), temperature) for prompt, ids, _ in triples]
    del actor
    reference, _ = run.model(run.input("actor_model"))
    before = [log_probs(reference, (*prompt, *ids), len(prompt), temperature) for prompt, ids, _ in triples]
    del reference
    scale = math.sqrt(sum(square for _, square in after + before) / (2 * len(triples)))
    nlls = -torch.cat([values for values, _ in before])
    spread, merged = log_prob_spread(rounding * scale, nlls), merging_error(merging * scale)
    kl = torch.stack([(a - b).sum() for (a, _), (b, _) in zip(after, before, strict=True)])
    bound = 2 * largest_error(spread, 1) * lengths.sum().sqrt().item() / len(kl) + len(kl) * EPS * kl.abs().mean()
    yield run.claim("eval_kl", kl.mean().item(), float(bound + merged * lengths.mean()))
    bound = 2 * largest_error(spread, len(kl)) * lengths.max().sqrt() + merged * lengths.max()
    yield farthest("KL of the samples", [sample["kl"] for sample in samples], kl, float(bound))
    nll = nlls.mean().item()
    yield run.claim("eval_ref_nll", nll, mean_error(spread, len(nlls)) + len(nlls) * EPS * nll)
    yield _scores(run, template, triples)


def _scores(run: Recount, template: Template, responses: Sequence[tuple[Sequence[int], Sequence[int], bool]]) -> Claim:
    """The claim on the scores, if they are those of one reward model with the policy's tokenizer. responses: ids of the
    prompt and of the response, and whether it has ended"""
    (weight, spec), *more = [plugins.split_weight(spec) for spec in run.config["reward"]]
    source, options = plugins.parse_spec(spec)
    if more or source != "learned" or set(options) - {"model"}:
        return Claim(f"score of the samples, by {' '.join(run.config['reward'])}", len(responses), None)
    path = manifests.resolve_model_path(options.get("model") or run.input("reward_model"), "model", "critic")
    if not same_ids(prepare_tokenizer(load_tokenizer(path), "auto"), template.tokenizer):
        return Claim("score of the samples, by another tokenizer", len(responses), None)
    model, rounding = run.model(path, classifier=True)
    ending = getattr(model.config, KEY, None) or [template.tokenizer.eos_token_id]
    plain = scores(model, [(*prompt, *ids[:-1], *ending) if end else (*prompt, *ids) for prompt, ids, end in responses])
    penalty = (run.config["missing_eos_penalty"] or 0.0) * torch.tensor([not end for _, _, end in responses])
    bound = abs(weight) * largest_error(rounding * plain.square().mean().sqrt().item(), len(plain))
    return farthest("score of the samples", [x["score"] for x in run.stage.samples], weight * plain - penalty, bound)


def _end_ids(model: PreTrainedModel, template: Template) -> list[int]:
    """The ids at which a response of the saved model ends."""
    ids = model.generation_config.eos_token_id
    return [template.tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [])]


def _ends(model: Any, prompts: Sequence[Sequence[int]], template: Template, limit: int, name: str = "") -> Claim:
    """Whether `generate` of the saved model ends a response. The model itself says how probable it is that it writes
    none of the ends."""
    ends, name = _end_ids(model, template), f"a response of `generate`{name} ends"
    options = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=limit, pad_token_id=template.tokenizer.pad_token_id,
        eos_token_id=model.generation_config.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    log_none = 0.0
    for prompt in prompts:
        start = torch.tensor([prompt], device=model.device)
        row = model.generate(input_ids=start, generation_config=options)[0].tolist()
        if row[-1] in ends:
            return Claim(name, "yes", "yes")
        end = outputs(model, row)[-len(row) :][len(prompt) - 1 : -1].softmax(-1)[:, ends].sum(1)
        log_none += torch.log1p(-end.double()).sum().item()
    must = log_none < math.log(P)
    return Claim(name, "yes" if must else "need not", "no" if must else "need not")

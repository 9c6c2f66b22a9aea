"""Finished stages with something in them that was changed, and with digests that do not show it."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlhf.storage import manifests


def change_a_weight(stage: Path) -> None:
    file = stage / "model/model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][5] += 0.5
    save_file(weights, file, {"format": "pt"})


def change_a_number(stage: Path) -> None:
    manifest = json.loads((stage / "manifest.json").read_text())
    manifest["metrics"]["eval_perplexity"] *= 1.0001
    (stage / "manifest.json").write_text(json.dumps(manifest))


def swap_two_tokens(stage: Path) -> None:
    file = stage / "model/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["kind"], words["the"] = words["the"], words["kind"]
    file.write_text(json.dumps(tokenizer))


CHANGES = (change_a_weight, change_a_number, swap_two_tokens)


LEFT = {
    "step1_sft": {"eval_perplexity_before"},
    "step2_reward": set[str](),
    "step3_ppo": {
        "eval_kl_floor", "eval_ref_nll_before", "eval_distinct_2_before", "eval_perplexity", "eval_perplexity_before",
    },
}  # fmt: skip
"""numbers of manifests that `rlhf verify` does not compute again: the ids of responses before training, and the rows of
step 1 in step 3, are not kept"""


def change_all_numbers(stage: Path) -> set[str]:
    """Of the manifest and of the last row of metrics.jsonl. Returns their names."""
    manifest = json.loads((stage / "manifest.json").read_text())
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "eval"][-1]
    for name, value in manifest["metrics"].items():
        manifest["metrics"][name] = value + 0.01 * max(1.0, abs(value))
        last[name] = float(f"{manifest['metrics'][name]:.6g}")
    (stage / "manifest.json").write_text(json.dumps(manifest))
    (stage / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    reseal(stage)
    return {*manifest["metrics"]}


def change_pairs(stage: Path) -> set[str]:
    """Two chosen sides change places, and one weight is another. Returns the claims that this makes false."""
    file = stage / "heldout_scores.json"
    pairs = json.loads(file.read_text())
    order = pairs["chosen"]
    order[0], order[1], pairs["weight"][0] = order[1], order[0], 2.0
    file.write_text(json.dumps(pairs))
    return {"half of their differences", "weights of the pairs"}


def change_samples(stage: Path) -> set[str]:
    """Another text, score, KL, judge's score and response before, and one response fewer in best-of-n."""
    samples = [json.loads(line) for line in (stage / "samples.jsonl").read_text().splitlines()]
    samples[0]["after"] += " kind"
    samples[1]["score"] += 0.5
    samples[2]["kl"] += 0.5
    samples[3]["judge"] -= 0.5
    samples[4]["before"] = samples[4]["after"]
    (stage / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in samples))
    before = [json.loads(line) for line in (stage / "best_of.jsonl").read_text().splitlines()]
    shorter = [{name: scores[:-1] for name, scores in row.items()} for row in before]
    (stage / "best_of.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in shorter))
    means = {f"eval_{name}{end}" for name in ("score", "kl", "judge") for end in ("", "_ci95")}
    worth = {"eval_changed", "eval_judge_gain_ci95", "eval_best_of"}
    return means | worth | {"texts of the samples", "score of the samples", "KL of the samples"}


def reseal(stage: Path) -> None:
    """Write the manifest again, with the digests of the files as they are now."""
    manifest = json.loads((stage / "manifest.json").read_text())
    del manifest["sha256"]
    files = manifests.file_digests(stage, manifest["models"])
    manifests.write_manifest(stage / "manifest.json", {**manifest, "files": files})

"""The model card of a saved model: README.md with the metadata of the hub, and a picture of its training.

It has no samples, no paths of this machine and no secrets, because a card is written to be published.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCardData
from markupsafe import Markup

from rlhf.config import Tree
from rlhf.config.declaration import ModelWords
from rlhf.config.secrets import masked
from rlhf.hub.cards import LOCAL_BASE, TAG, BaseModel, base_model
from rlhf.pages.page import picture, render_part, visible
from rlhf.report.figures import curves
from rlhf.report.groups import groups
from rlhf.report.records import Row, StageRecord
from rlhf.report.verdict import Change, changes
from rlhf.storage import disk
from rlhf.storage.manifests import CARD

FOLDER = Path(__file__).parent
FAILURES = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, jinja2.TemplateError,
    yaml.YAMLError,
)  # fmt: skip
"""what a card may raise on values that nobody has thought of; a finished model is saved without a card then"""
PRIVATE = ("output_dir", "data_cache", "report_to")
"""options that say nothing to readers elsewhere"""
MARKDOWN = re.compile(r"([\\`*_\[\]{}|~$#!:@])")


def write_card(model: Path, stage: StageRecord, folder: str, inputs: Mapping[str, str], options: Tree) -> None:
    """Write the card of the model `folder` of a stage into the directory `model`, where the model is being saved.

    stage: its files so far. inputs: paths of the models that it started from, by option. options: those that can change
    results and differ from their defaults
    Raises: OSError, FAILURES.
    """
    declaration = stage.declaration
    words = declaration.cards.get(folder, declaration.cards[declaration.models[0]])
    figures = curves([(0, "", stage)], declaration, "iteration" if declaration.report.samples else "step")
    if figures:
        disk.write_text(model / CARD[1], picture(figures[0].chart))
    base = base_model(inputs[next(filter(inputs.__contains__, words.bases), words.bases[-1])])
    results = changes(stage) if folder == declaration.models[0] else []
    results = [change for change in results if change.after is not None]
    sources: list[Row] = (stage.data or {}).get("sources", [])
    earlier = {dataset for path in inputs.values() for dataset in base_model(path).datasets}
    metadata = _metadata(words, base, sources, earlier, results)
    runs, more = words.more
    text = render_part(
        FOLDER / "card.md.jinja",
        plain=plain,
        data_name=data_name,
        words=words,
        about=Markup(words.about + (more if runs.include(stage.config) else "")),
        base=base,
        sources=[
            (data_name(str(s.get("data_path"))), s.get("rows", 0), s.get("licence") or "not known") for s in sources
        ],
        rows=((stage.data or {}).get("train") or {}).get("rows"),
        steps=stage.steps,
        results=results,
        by_group=groups(stage) if results else None,
        picture=CARD[1] if figures else None,
        curve=figures[0].chart.title if figures else "",
        options=[Markup(f"{name}: {visible(json.dumps(value))}") for name, value in published(options).items()],
    )
    disk.write_text(model / CARD[0], f"---\n{metadata.to_yaml()}\n---\n{text}")


def _metadata(
    words: ModelWords, base: BaseModel, sources: list[Row], earlier: set[str], results: list[Change]
) -> ModelCardData:
    """earlier: datasets of the models that it started from"""
    datasets = sorted({str(source["hub_id"]) for source in sources if source.get("hub_id")})
    data = ", ".join(data_name(str(source.get("data_path"))) for source in sources) or "held-out rows"
    evaluations = [
        EvalResult(
            task_type=words.task,
            dataset_type=datasets[0] if len(datasets) == 1 else "custom",
            dataset_name=f"held-out rows of {data}",
            metric_type=change.result.metric.removeprefix("eval_"),
            metric_name=change.result.label,
            metric_value=change.after,
        )
        for change in results
    ]
    local_base: Tree = {LOCAL_BASE: base.name} if base.hub_id is None else {}
    return ModelCardData(
        base_model=base.hub_id,
        datasets=sorted({*datasets, *earlier}) or None,
        license=base.licence,
        library_name="transformers",
        pipeline_tag=words.task,
        tags=[TAG, *words.tags],
        model_name=words.title,
        eval_results=evaluations or None,
        **local_base,
    )


def plain(text: object) -> Markup:
    """A text in one line of Markdown that shows it as it is: no markup, no HTML, no cell of a table ends in it."""
    line = " ".join(visible(str(text)).split())
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        line = line.replace(character, entity)
    return Markup(MARKDOWN.sub(r"\\\1", line))


def data_name(data_path: str) -> str:
    """A data path, or a score source, without directories of this machine and addresses of judges."""
    data_path = re.sub(r"(?<=base_url=)[^,'\"\s]+", "...", data_path)
    return re.sub(r"(?:(?<=^)|(?<=[:=,*'\"\s]))(?:~|\.{1,2})?/(?:(?:[^/:,]|,(?![^/=,]*=|/))*/)*", "", data_path)


def published(options: Tree) -> Tree:
    """Options for readers elsewhere: without secrets, and without directories of this machine."""
    shown = {name: value for name, value in masked(options).items() if name not in PRIVATE}
    return dict(disk.with_leaves(lambda value: data_name(value) if isinstance(value, str) else value, shown))

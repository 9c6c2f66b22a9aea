"""One scalar per token: the reward model reads it at the last token, the critic at every state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.maths import ops
from rlhf.models import packing
from rlhf.models.adapter_files import HEAD_IN_FILE
from rlhf.models.head import ScoreHead
from rlhf.models.load import WHOLE, Loading, explain_load_errors, load_backbone, load_config
from rlhf.models.traits import has_argument, reach
from rlhf.text.tokenizer import require_hub
from rlhf.types import JoinedPairs, Pairs, Sequences, length_groups, to_device

HEAD = "score.weight"


@dataclass(frozen=True, slots=True)
class ScoreStatistics:
    """Mean and standard deviation of a reward model's scores on held-out responses."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class PairOutput:
    """What a pass over B pairs gives."""

    scores: Tensor
    """[B, 2], of the chosen and the rejected sides"""
    rows: Sequence[Sequences | JoinedPairs]
    """what the model computed"""
    scalars: Tensor | None = None
    """[2 B, S], of `score_every_token`: the score at each token of `rows`, the chosen sides first"""


class ScalarModel(nn.Module):
    """A backbone and a linear head in fp32, for the reward model and the critic.

    Its saved form is that of `AutoModelForSequenceClassification` with one label.
    """

    joins = True
    """whether it supports pairs in one row, if its architecture does"""

    def __init__(self, backbone: PreTrainedModel, head: ScoreHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.score = head

    def forward(self, rows: Sequences | JoinedPairs) -> Tensor:
        """The scalar at every token, fp32 [B, S], 0 off the mask; of pairs, at the ends of both sides, [B, 2]."""
        if isinstance(rows, JoinedPairs):
            return self._read(packing.pair_inputs(self.backbone, rows))
        scalars = self._read(packing.model_inputs(self.backbone, rows.ids, rows.mask))
        return ops.zero_off_mask(scalars, to_device(rows.mask, scalars.device))

    def _read(self, inputs: packing.ModelInputs) -> Tensor:
        hidden = self.backbone(**inputs.inputs, use_cache=False).last_hidden_state
        scalars = self.score(hidden).flatten()  # of all computed tokens
        return scalars.gather(0, to_device(inputs.states.flatten(), scalars.device)).view(inputs.states.shape)


def scores(scalars: Tensor, mask: Tensor) -> Tensor:
    """The score of each sequence, [B]: the scalar at the last token that is not padding."""
    return scalars.gather(1, to_device(ops.last_index(mask)[:, None], scalars.device)).squeeze(1)


def score_separately(model: Callable[[Sequences | JoinedPairs], Tensor], pairs: Pairs) -> PairOutput:
    """Both sides of each pair, a row each.

    The longer half of all sides is computed first. The sides of a pair differ in length: on HH 10 % of the tokens are
    padding this way, and 12 % in one pass over all sides.
    """
    sides = pairs.stacked()
    halves = length_groups(sides.lengths, len(pairs))
    batches = [sides[rows].trimmed() for rows in halves]
    side_scores = torch.cat([scores(model(batch), batch.mask) for batch in batches])
    order = to_device(torch.cat(halves).argsort(), side_scores.device)
    return PairOutput(side_scores[order].view(2, -1).T, batches)


def score_joined(model: Callable[[Sequences | JoinedPairs], Tensor], pairs: Pairs) -> PairOutput:
    """The same, with both sides of a pair in one row; only if `can_join` has shown that the scores are the same."""
    rows = pairs.joined()
    return PairOutput(model(rows), [rows])


def score_every_token(model: Callable[[Sequences | JoinedPairs], Tensor], pairs: Pairs) -> PairOutput:
    """The same, with all sides in one batch of rows, and the score at each of their tokens."""
    sides = pairs.stacked().trimmed()
    scalars = model(sides)
    return PairOutput(scores(scalars, sides.mask).view(2, -1).T, [sides], scalars)


@torch.no_grad()
def can_join(model: ScalarModel, pairs: Pairs, tokens: int) -> bool:
    """Whether pairs in one row have the same scores as in separate rows. They do if attention supports any mask and the
    model takes positions; not with a window that is shorter than a side, a recurrent state, or positions that are
    derived from the mask.

    The rounding of bf16 has no bound that holds for every model. So the difference is compared with that of two
    mistakes: the second side sees the first, and the positions are reversed, which a model without positions would
    ignore. A window that only few tokens exceed makes a smaller difference; most configs declare their window.
    pairs: the longest pairs, because a window has an effect in long rows only. tokens: the most that any side has
    """
    backbone = model.backbone
    if not (model.joins and has_argument(backbone, "position_ids") and tokens <= reach(backbone.config)):
        return False
    rows, expected = pairs.joined(), score_separately(model, pairs).scores
    mistakes = [replace(rows, branch=torch.zeros_like(rows.branch)), replace(rows, positions=rows.positions.flip(1))]
    try:
        joined, *mistaken_scores = (model(row) for row in (rows, *mistakes))
    except (ValueError, RuntimeError, IndexError, TypeError):  # a model that supports only masks of two dimensions
        return False
    smallest = min(_distance(scored[:, 1], expected[:, 1]) for scored in mistaken_scores)
    share = 1e-2 if model.score.weight.dtype == torch.float32 else 0.5
    return _distance(joined, expected) < share * smallest


def _distance(x: Tensor, y: Tensor) -> float:
    """The root of the mean squared difference."""
    return (x - y).square().mean().sqrt().item()


def state_values(scalars: Tensor, prompt_length: int) -> Tensor:
    """A critic's values of the states in which the response tokens were chosen, [B, T] from [B, P + T].

    The state of token t is everything before it, so its value is read one position earlier.
    """
    return scalars[:, prompt_length - 1 : -1]


def new_scalar_model(path: str, dtype: torch.dtype, tokenizer_size: int, loading: Loading = WHOLE) -> ScalarModel:
    """A language model's backbone with a new head, N(0, 1/sqrt(d + 1)) (Stiennon et al. 2020), of the same seed."""
    backbone = load_backbone(path, dtype, tokenizer_size, loading)
    return ScalarModel(backbone, new_head(backbone, dtype, loading.seed)).eval()


def new_head(backbone: PreTrainedModel, dtype: torch.dtype, seed: int) -> ScoreHead:
    """A head drawn by `seed`, N(0, 1/sqrt(d + 1)), for the hidden states of a model."""
    width = hidden_width(backbone)
    return ScoreHead(torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * (width + 1) ** -0.5, dtype)


def hidden_width(backbone: PreTrainedModel) -> int:
    """Elements of the last hidden state; some OPT models project it to the width of their embeddings."""
    config = backbone.config.get_text_config()
    return getattr(config, "word_embed_proj_dim", None) or config.hidden_size


def load_scalar_model(path: str, dtype: torch.dtype, tokenizer_size: int, loading: Loading = WHOLE) -> ScalarModel:
    """A trained reward model or critic: ours, or any one-label sequence classifier with a `score` head.

    Raises: UserError if the head is absent (a language model, say) or does not give one number.
    """
    weight = read_head(resolve(path))
    backbone = load_backbone(path, dtype, tokenizer_size, loading)
    width = hidden_width(backbone)
    if weight.shape[1] != width:
        raise UserError(f"reward model '{path}': {HEAD} has {weight.shape[1]} columns, expected the backbone's {width}")
    if not torch.isfinite(weight.to(dtype)).all():
        raise UserError(f"reward model '{path}': weight {HEAD} has values that are not finite")
    return ScalarModel(backbone, ScoreHead(weight, dtype)).eval()


def read_head(path: str) -> Tensor:
    """The [1, d] head of a saved scalar model, in a directory or on the hub.

    Raises: UserError if it is absent, or gives more than one number.
    """
    with explain_load_errors(path):
        weight = next((w for w in map(_head_in, _weight_files(path)) if w is not None), None)
    if weight is None:
        raise UserError(
            f"reward model '{path}': no trained head, expected a tensor '{HEAD}' in its *.safetensors; "
            "train one (rlhf reward), or name a one-label sequence classifier"
        )
    if weight.shape[0] != 1:
        raise UserError(
            f"reward model '{path}': {HEAD} gives {weight.shape[0]} labels, expected 1; as a score source, "
            f"classifier,model={path},label=NAME,with_prompt=true is the log-odds of one of them"
        )
    return weight


def _weight_files(path: str) -> list[Path]:
    folder = Path(path)
    if not folder.exists():
        require_hub(f"reward model '{path}'")
        # Offline no hub client is created: it reads proxies and certificates, and fails if they are invalid.
        offline = constants.HF_HUB_OFFLINE
        folder = Path(snapshot_download(path, allow_patterns="*.safetensors", local_files_only=offline))
    return sorted(folder.glob("*.safetensors"))


def _head_in(file: Path) -> Tensor | None:
    with safe_open(file, framework="pt") as tensors:
        name = next((name for name in (HEAD, HEAD_IN_FILE) if name in tensors.keys()), None)  # noqa: SIM118  (no mapping)
        return None if name is None else tensors.get_tensor(name)


def score_statistics(path: str) -> ScoreStatistics:
    """The statistics that the reward model's stage measured and wrote to its config.

    Raises: UserError if it has none, or its scores do not vary.
    """
    config = load_config(path)
    mean, std = (getattr(config, name, None) for name in ("score_mean", "score_std"))
    if mean is None or not std:
        raise UserError(
            f"reward model '{path}': got score_mean {mean} and score_std {std} in its config.json, expected two "
            "numbers to normalise by; train it (rlhf reward), write them there, or remove the option norm"
        )
    return ScoreStatistics(float(mean), float(std))

"""What `rlhf evaluate` and `rlhf pairs` share: the prompts of a file as batches, and policies that respond to them."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.prepare.mixture import open_origin
from data.prepare.owners import unusable_reason
from data.read.columns import user_prompt
from data.read.records import Skipped
from rlhf import plugins, rewards
from rlhf.config.options import EngineOptions, PromptFileOptions
from rlhf.distributed import collectives
from rlhf.engine.precision import compute_dtype
from rlhf.errors import UserError
from rlhf.generation import Backend, open_backend
from rlhf.hub.short_names import resolve
from rlhf.maths.uniforms import EVALUATION, uniforms
from rlhf.models.load import Loading, context_length, load_causal_lm, load_config
from rlhf.models.policy import Policy
from rlhf.storage.manifests import resolve_model_path
from rlhf.text.dialogues import Template
from rlhf.text.encoder import id_count
from rlhf.text.messages import unread
from rlhf.text.rendered import prompt_of
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer, same_ids
from rlhf.types import Prompts, Row

RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """N prompts in the ids of one tokenizer. A prompt is repeated for each response that a policy samples to it."""

    options: PromptFileOptions
    tokenizer: PreTrainedTokenizerBase
    rows: tuple[Row, ...]
    """[N]"""
    ids: tuple[list[int], ...]
    """[N] ids of the rendered prompts"""

    def batches(self, stream: int = 0) -> Iterator[tuple[Prompts, Tensor]]:
        """This rank's batches of (left-padded prompts, uniform random numbers [B, T] to sample the responses with).

        The ranks take the batches in turn; `collectives.of_all_ranks` restores their order. Policies with the same
        `stream` sample with the same random numbers.
        """
        o = self.options
        ranks = collectives.world_size()
        for start in range(0, len(self.rows), o.rollout_batch_size)[collectives.rank() :: ranks]:
            batch = slice(start, start + o.rollout_batch_size)
            keys = [(o.seed, stream, i) for i in range(len(self.rows))[batch]]
            prompts = Prompts.left_padded(self.ids[batch], self.rows[batch], self.tokenizer.pad_token_id)
            yield prompts, uniforms(keys, o.response_length, EVALUATION)

    def load(self, model_path: str) -> Policy:
        """The policy, frozen, on the device. Raises: UserError if there is no such model."""
        device = collectives.local_device()
        loading = Loading(self.options.seed, virtual_tokens=True)
        model = load_causal_lm(model_path, self._dtype(device), id_count(self.tokenizer), loading)
        return Policy(model).to(device).requires_grad_(False)

    def backend(self) -> Backend:
        """The generation backend of transformers' models."""
        t = self.tokenizer
        return open_backend("loop", eos_token_id=t.eos_token_id, pad_token_id=t.pad_token_id)

    def source(self, spec: str, micro_batch_size: int, answers: Path | None) -> rewards.Opened:
        """A score source or a judge of pairs, outside a run. answers: the folder for what a judge answers"""
        device = collectives.local_device()
        dtype = self._dtype(device)
        context = rewards.Context(self.tokenizer, device, dtype, "", micro_batch_size, answers=answers)
        return rewards.open_judge(spec, context)

    def _dtype(self, device: torch.device) -> torch.dtype:
        return compute_dtype(EngineOptions(dtype=self.options.dtype), device)


def policy_path(model_path: str) -> str:
    """The path of a policy's model; for a stage's directory, of the model that the stage trained.

    Raises: UserError for an unfinished stage.
    """
    return resolve(resolve_model_path(model_path, "actor", "model"))


def check_reward_spec(spec: str, rows: Sequence[Row] = ()) -> None:
    """Raises: UserError for `learned` without a model: outside a run there is no default reward model; or for a row
    that the source cannot score."""
    name, _, _ = spec.partition(",")
    if name == "learned" and plugins.parse_spec(spec)[1].get("model") is None:
        raise UserError("--reward learned: no reward model is named; write --reward learned,model=DIR")
    if rows:
        rewards.check_rows(spec, rows)


def require_output(folder: str | None, overwrite: bool) -> None:
    """Create the directory of --output, if there is one. Raises: UserError if it has results already, or is not
    writable."""
    if folder is None:
        return
    require_writable(Path(folder), f"--output {folder}")
    if (Path(folder) / RESULTS).exists() and not overwrite:
        raise UserError(f"--output {folder}: has a {RESULTS} already; name another directory, or add --overwrite")


def require_writable(directory: Path, option: str) -> None:
    """Create the directory. Raises: UserError if it is not writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"{option}: cannot write there ({error.strerror}); name another directory") from None


def read_prompts(path: str) -> list[tuple[str, Row]]:
    """(file:line, row) of each prompt of a file with a column `prompt`, of each line of a .txt file, or of any other
    data path. Raises: UserError for a row that is no prompt."""
    reader = "files,lines=true" if path.lower().endswith(".txt") else "files,shape=prompt"
    rows = []
    for row in open_origin(path if ":" in path else f"{reader}:{path}").rows("ppo"):
        if isinstance(row, Skipped):
            raise UserError(row.reason if row.bad else f"{row.location}: {row.reason}")
        row = row if row.prompt else replace(row, prompt=user_prompt(row.response or ""), response=None)
        if reason := unusable_reason(row, "ppo"):
            raise UserError(f"{row.location}: {reason}")
        rows.append((row.location, row))
    return rows


def encode_prompts(
    prompts: Sequence[tuple[str, Row]], model_paths: Sequence[str], options: PromptFileOptions, samples: int
) -> PromptSet:
    """The prompts of `read_prompts`, (file:line, row), for all policies; each prompt is repeated `samples` times.

    Raises: UserError if the policies' tokenizers differ, or a prompt and its response do not fit a model's context.
    """
    compute_dtype(EngineOptions(dtype=options.dtype), collectives.local_device())
    tokenizer = common_tokenizer(model_paths, options.chat_template)
    template = Template(tokenizer)
    encoded = [_encode(location, row, template) for location, row in prompts]
    ids = [ids for _, ids in encoded]
    for model_path in model_paths:
        _check_context(prompts, ids, model_path, options.response_length)
    rows, all_ids = zip(*(each for each in encoded for _ in range(samples)), strict=True)
    return PromptSet(options, tokenizer, rows, all_ids)


def common_tokenizer(model_paths: Sequence[str], chat_template: str) -> PreTrainedTokenizerBase:
    """The tokenizer of all policies. Raises: UserError if two differ: a KL between such policies has no meaning."""
    first, *other_paths = dict.fromkeys(model_paths)
    tokenizer = prepare_tokenizer(load_tokenizer(first), chat_template)
    for model_path in other_paths:
        if not same_ids(tokenizer, prepare_tokenizer(load_tokenizer(model_path), chat_template)):
            raise UserError(
                f"policy '{model_path}': its tokenizer or chat template gives other ids than that of '{first}', "
                "expected the same ids; if only the template differs, choose one for all with --chat-template"
            )
    return tokenizer


def _encode(location: str, row: Row, template: Template) -> tuple[Row, list[int]]:
    """The row with its turns, and its ids."""
    try:
        row = prompt_of(template.tokenizer, row)
        if refusal := unread(row, template.tokenizer):
            raise UserError(refusal)
        return row, template.prompt_ids(row.prompt, row.variables)
    except UserError as error:
        raise UserError(f"{location}: {error}") from None


def _check_context(
    prompts: Sequence[tuple[str, Row]], ids: list[list[int]], model_path: str, response_length: int
) -> None:
    """Raises: UserError if a prompt and its response do not fit the model's context. Prompts are never cut here."""
    limit = context_length(load_config(model_path))
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    if len(ids[longest]) + response_length > limit:
        raise UserError(
            f"{prompts[longest][0]}: the prompt has {len(ids[longest])} tokens; with --response-length "
            f"{response_length} that is more than the context of '{model_path}', {limit} tokens; remove the prompt, or "
            "lower --response-length"
        )

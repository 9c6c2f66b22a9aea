"""The methods of peft that need no file of their own, one row each: peft's options, learning rate, options here.

A rate is that of supervised fine-tuning, and its source stands above it: "accuracy" is that of peft's method_comparison
(Llama-3.2-3B on MetaMathQA), where LoRA has 0.48 at 1e-4. A method starts as the model itself unless its row says more.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import peft
from peft import PeftConfig
from pydantic import ConfigDict, Field, NonNegativeInt, create_model

from rlhf.adapters._peft import PeftAdapter, TrainableTokens
from rlhf.adapters._virtual import VirtualTokens
from rlhf.config import Config
from rlhf.errors import UserError

Adapter = PeftAdapter | VirtualTokens


class Options(Config):
    """Base of the options here. Their fields have descriptions: pydantic finds no docstrings of a class in a table."""

    model_config = ConfigDict(use_attribute_docstrings=False)


class Option:
    """An option by the name that peft gives it. kind: its type, if that is not the default's; limits: as pydantic's"""

    def __init__(self, default: object, meaning: str, kind: object = None, **limits: Any) -> None:
        self.field = (kind or type(default), Field(default, description=meaning, **limits))


class Method:
    """A plug-in: a method of peft, with its learning rate and options.

    fixed: options of peft that are none here
    """

    def __init__(
        self,
        peft_options: type[PeftConfig],
        learning_rate: float,
        options: Mapping[str, Option],
        fixed: Mapping[str, Any] = MappingProxyType({}),
        adapter: Callable[[Any, float], Adapter] = PeftAdapter,
    ) -> None:
        self._peft_options, self._learning_rate = peft_options, learning_rate
        self._fixed, self._adapter = fixed, adapter
        fields: Any = {name: option.field for name, option in options.items()}
        self.Config: type[Options] = create_model("Config", __base__=Options, **fields)

    def build(self, config: Options) -> Adapter:
        """Raises: UserError for options that peft refuses."""
        try:
            return self._adapter(self._peft_options(**config.model_dump(), **self._fixed), self._learning_rate)
        except ValueError as error:
            name = self._peft_options.__name__.removesuffix("Config").lower()
            raise UserError(f"adapter {name}: {error}") from None


Names = list[str] | None
LAYERS: Mapping[str, Option] = {
    "target_modules": Option(
        "all-linear", "layers that the method changes, as peft names them: all-linear, a list or a regular expression",
        str | list[str],
    )
}  # fmt: skip
TOKENS: Mapping[str, Option] = {"num_virtual_tokens": Option(20, "number of embeddings before every row", ge=1)}
LANGUAGE_MODEL = {"task_type": "CAUSAL_LM"}

ROWS: Mapping[str, Method] = MappingProxyType({
    # (IA)^3: learned scales of keys, values and the inputs of feed-forward layers (arXiv 2205.05638). Accuracy 0.31 at
    # 1e-4, 0.40 at 1e-3, 0.46 at 5e-3; the paper has 3e-3. All scales start at 1.
    "ia3": Method(peft.IA3Config, 5e-3, {
        "target_modules": Option(None, "layers whose outputs are scaled; none = keys, values and the last feed-forward "
                                 "layer, as peft knows the model", Names),
        "feedforward_modules": Option(None, "those whose inputs are scaled instead", Names),
    }),
    # P-tuning: embeddings before every row, computed by a learned MLP (arXiv 2103.10385). Accuracy 0.35. They start at
    # random, so the model does not compute what it did before.
    "p_tuning": Method(peft.PromptEncoderConfig, 1e-4, {
        **TOKENS,
        "encoder_hidden_size": Option(None, "width of the MLP; none = the model's", int | None, ge=1),
    }, LANGUAGE_MODEL, VirtualTokens),
    # Prompt tuning: learned embeddings before every row (arXiv 2104.08691). Accuracy 0.06 at 1e-4, 0.34 at 1e-3. They
    # start as those of random tokens, so the model does not compute what it did before.
    "prompt_tuning": Method(peft.PromptTuningConfig, 1e-3, TOKENS, {
        **LANGUAGE_MODEL,
        "prompt_tuning_init": "SAMPLE_VOCAB",
    }, VirtualTokens),
    # Some rows of the embeddings, and of a head that is tied to them; for new tokens, say. The rate is that of peft's
    # prompt tuning, which also trains rows of embeddings.
    "trainable_tokens": Method(peft.TrainableTokensConfig, 1e-3, {
        "token_indices": Option(..., "ids of the tokens", list[NonNegativeInt], min_length=1),
    }, adapter=TrainableTokens),
    # VeRA: two learned vectors scale a random low-rank update that all layers share (arXiv 2310.11454). Accuracy 0.35.
    "vera": Method(peft.VeraConfig, 1e-3, {
        **LAYERS,
        "r": Option(256, "rank of the shared update", ge=1),
        "projection_prng_key": Option(0, "seed of the random matrices"),
    }),
})  # fmt: skip

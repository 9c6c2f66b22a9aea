"""FourierFT: a few learned frequencies of each update's Fourier transform (arXiv 2405.03003), by peft."""

from peft import FourierFTConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 1e-2
"""at 1e-4 peft's method_comparison (Llama-3.2-3B) has accuracy 0.00 with 1,000 frequencies and 0.10 with 5,000; the
paper trains with rates of 1e-3 to 1e-1"""


class Config(Targets):
    n_frequency: int = Field(1000, ge=1)
    """learned frequencies of each layer, at most inputs * outputs"""
    scaling: float = Field(300.0, gt=0)
    """factor of the update; 300 for Llama in the paper"""
    random_loc_seed: int = 777
    """seed of the choice of frequencies, which is not saved"""


def build(config: Config) -> PeftAdapter:
    """The update starts at 0; peft's default is random, and the model would compute something else."""
    options = FourierFTConfig(
        n_frequency=config.n_frequency,
        scaling=config.scaling,
        random_loc_seed=config.random_loc_seed,
        target_modules=config.target_modules,
        init_weights=True,
    )
    return PeftAdapter(options, LEARNING_RATE)

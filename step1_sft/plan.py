"""The workload of supervised fine-tuning, for a plan."""

from rlhf.plan.forecast import ModelSpec, Workload
from rlhf.supervised.workload import supervised_workload
from step1_sft.config import STAGE, SFTConfig


def workload(config: SFTConfig, device: str, model_paths: dict[str, str]) -> Workload:
    """Rows of `max_length` tokens. Every token but the first may count in the loss.

    model_paths: paths of the models of earlier stages; this stage has no earlier stage
    """
    model = ModelSpec("policy", model_paths.get("model", config.model), "lm", config, config.adapter)
    return supervised_workload(STAGE.name, config, device, model, sides=1, predicted=config.max_length - 1)

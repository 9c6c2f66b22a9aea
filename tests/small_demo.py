"""The demo world, as small as all three stages still run on it."""

from typing import Any

SMALL: dict[str, Any] = {
    "data_path": ["demo,rows=400"],
    "chat_template": "human_assistant",
    "dtype": "fp32",
    "batch_size": 32,
    "micro_batch_size": 32,
    "max_prompt_length": 24,
    "max_length": 48,
    "max_eval_rows": 8,
    "sample_rows": 0,
}

"""Stages that learn from a data set: options and runner that fine-tuning and the reward model share."""

"""Options and runner of the stages that learn from a data set: fine-tuning and the reward model."""

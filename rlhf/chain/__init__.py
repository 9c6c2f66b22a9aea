"""The chain of the three stages: its options, and which steps a command runs. `train.py` is its program."""

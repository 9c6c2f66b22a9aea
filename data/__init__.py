"""Data: sources of rows, the datasets of the three stages, and batches with their masks."""

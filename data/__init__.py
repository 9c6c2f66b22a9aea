"""Data: sources of rows, one dataset for three stages, and batches with their masks."""

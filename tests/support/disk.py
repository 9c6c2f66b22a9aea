"""Tests do not wait for the disk: they end long before a power cut."""

import os


def skip_fsync() -> None:
    """fsync takes several milliseconds, 2,300 of them in tests of checkpoints alone. That it is called, and when, is
    tested by tests/support/power.py, which puts its own in this one's place."""
    os.fsync = lambda descriptor: None

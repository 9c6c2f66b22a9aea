"""`python -m rlhf VERB ...`, as the console script `rlhf`."""

from rlhf.cli import run

if __name__ == "__main__":
    run()

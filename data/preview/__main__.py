"""`python -m data.preview`."""

from data.preview.command import main
from rlhf.errors import run_as_user

if __name__ == "__main__":
    raise SystemExit(run_as_user(main))

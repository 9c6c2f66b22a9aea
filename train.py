"""`python train.py`: fine-tuning, reward model and PPO in one command. The program is rlhf/chain/command.py."""

from rlhf.chain.command import main
from rlhf.errors import run_as_user

if __name__ == "__main__":
    raise SystemExit(run_as_user(main))

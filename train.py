"""`python train.py`: fine-tuning, reward model and PPO in one command. The program is rlhf/chain/command.py."""

from rlhf.chain.command import main
from rlhf.errors import run_program

if __name__ == "__main__":
    run_program(main)

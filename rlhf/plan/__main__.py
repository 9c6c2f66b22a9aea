"""`python -m rlhf.plan`: the tables of docs/scaling.md."""

from rlhf.plan.scaling_table import tables

if __name__ == "__main__":
    print(tables())

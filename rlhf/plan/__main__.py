"""`python -m rlhf.plan`: the tables of docs/scaling.md."""

from rlhf.plan.table import tables

if __name__ == "__main__":
    print(tables())

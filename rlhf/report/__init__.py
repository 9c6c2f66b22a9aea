"""The report of runs: one page with the verdict, the curves, the samples, and how they came about.

It knows no stage: `rlhf.chain.report` passes the declarations of the stages, and their files have the numbers.
"""

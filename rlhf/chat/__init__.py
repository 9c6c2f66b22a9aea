"""Talk to the policies of a run, in a terminal or in a browser, and vote on their answers.

`session` and `votes` are the logic; `terminal` and `web` are thin front ends.
"""

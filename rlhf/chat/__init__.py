"""Talk to the policies of a run: in a terminal, in a browser, or through an HTTP interface that clients of OpenAI know.

`session` and `votes` are the logic; `terminal`, `web` and `server` are thin front ends.
"""

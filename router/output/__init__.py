"""From the workers' tokens to what clients read.

In come tokens in any order; out come text, tokens, finish reasons, usage and the latency account, cut into messages.
Read `processor.py` first.
"""

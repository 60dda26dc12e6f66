"""The workers as the router meets them: found, watched, called, and judged by their failures.

In come addresses, statuses and the requests of attempts; out go a fleet for placement, reservations, and the events of
each attempt. Read `pool.py` first, then `calls.py`.
"""

"""Workers of a router: found, watched and called; their failures and the retries that follow.

Addresses, statuses and the requests of attempts enter; a fleet for placement, reservations and the events of each
attempt leave. Read `pool.py` first, then `calls.py`.
"""

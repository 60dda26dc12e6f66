"""The next request and its workers: no sockets, no tasks, and time only as an argument or by a clock that is passed.

Waiting requests, views of workers and their cached prefixes enter; the request whose turn it is leaves, with the
prefill and decode workers that it should use. Read `scheduler.py` first, then `policy.py`.
"""

"""The next request and its workers: no sockets, no tasks, and time only as an argument or by a clock that is passed.

In come waiting requests and what is known of workers and of their cached prefixes; out come the request whose turn it
is, and the prefill and decode workers that it should use. Read `scheduler.py` first, then `policy.py`.
"""

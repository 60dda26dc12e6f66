"""Who is next, and on which workers. Pure: no sockets, no tasks, and time only as an argument.

In come waiting requests and what is known of workers and of their cached prefixes; out come the request whose turn it
is, and the prefill and decode workers that it should use. Read `queue.py` first, then `policy.py`.
"""

"""Workers of a router: discovery, watches and calls; failures, and the retries after them.

The inputs are addresses, statuses of workers and requests of attempts. The outputs are the view of the fleet for
placement, reservations, and the events of each attempt. Read `pool.py` first, then `decode_session.py` and
`prefill_call.py`.
"""

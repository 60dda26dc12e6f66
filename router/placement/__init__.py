"""Selection of the next request and of its workers. Pure: time is an argument or a clock that the caller passes.

The inputs are waiting requests, views of workers, and the prefixes that workers have cached. The output is the next
request with a prefill worker and decode workers to ask. Read `scheduler.py` first, then `refusals.py` and `policy.py`.
"""

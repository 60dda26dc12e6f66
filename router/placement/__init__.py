"""Order of requests and selection of their workers. Pure: time is an argument or a clock that the caller passes.

The inputs are waiting requests, views of workers, and the prefixes that workers have cached. The output is the next
request that may ask for pages, and pairs of a prefill worker and a decode worker. Read `queue.py` first, then
`policy.py`.
"""

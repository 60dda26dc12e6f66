"""The front of the router: who calls, what they ask, and how answers reach them.

In come gRPC calls; out go checked `Request`s to the pipeline, and the pipeline's output to clients. Read `servicer.py`
first, then `validator.py`.
"""

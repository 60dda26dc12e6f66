"""The front of the router: callers, their requests, and the answers to them.

Calls enter, by gRPC today; checked `Request`s leave to the request runner, and its updates to clients. Read
`front_door.py` first: it knows no transport, and `servicer.py` only translates for it.
"""

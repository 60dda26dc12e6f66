"""The front of the router: who calls, what they ask, and how answers reach them.

In come calls, by gRPC today; out go checked `Request`s to the request runner, and its updates to clients. Read
`front_door.py` first: it knows no transport, and `servicer.py` only translates for it.
"""

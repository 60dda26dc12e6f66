"""The front of the router: callers, checks of their requests, and streams of answers.

It turns calls into checked `Request`s for the request runner, and sends the runner's updates to clients. Read
`front_door.py` first: it knows no transport. `servicer.py` translates between it and gRPC, `http.py` between it and
HTTP.
"""

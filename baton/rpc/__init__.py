"""gRPC: listeners, channels, TLS, errors, and the conversion between messages and dataclasses.

Read `server` and `channel` first. `errors` maps between `baton.errors` and statuses, in this one place. `calls` has
the parts of the Python client's calls.
"""

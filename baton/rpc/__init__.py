"""gRPC: listeners, channels, TLS, errors, and the conversion between messages and dataclasses.

Read `server` and `channel` first. `errors` maps between `baton.errors` and statuses, in this one place. `calls` is
what the Python client makes its calls of.
"""

"""The `baton` command: starts services as processes, imports none of them."""

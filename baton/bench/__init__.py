"""Measurements that ship: what `baton bench` runs."""

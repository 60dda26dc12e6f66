"""Metrics, logs, and the HTTP listener that serves health and metrics."""

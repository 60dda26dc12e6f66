"""The router: takes requests, places them on prefill and decode workers, and streams the answers."""

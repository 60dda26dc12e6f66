"""These tests build images and start containers: `make test-compose` runs them, `make test` does not."""

import os

collect_ignore_glob = [] if os.environ.get("BATON_TEST_COMPOSE") else ["test_*.py"]

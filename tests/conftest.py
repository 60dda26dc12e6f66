"""What holds for all tests."""

from __future__ import annotations

import os

# As the services have it (baton.process): tests import gRPC before them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

"""What holds for all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

from tests.effort import PROFILE

# As the services have it (baton.process): tests import gRPC before them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# A shell that is not interactive starts its background jobs with SIGINT ignored, and children inherit that. Tests that
# press Ctrl-C would then wait for processes that rightly do not listen.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.load_profile(PROFILE)

"""Fixtures and settings for all tests."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.effort import PROFILE

# As the services have it (baton.process.service): tests import gRPC before them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# A shell that is not interactive starts its background jobs with SIGINT ignored, and children inherit that. Tests that
# press Ctrl-C would then wait for processes that rightly do not listen.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.load_profile(PROFILE)


@pytest.fixture(scope="session", autouse=True)
def temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """pytest deletes its own folders of earlier runs, so also those that a killed process has left there."""
    folder = str(tmp_path_factory.mktemp("t", numbered=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    from tests.checkpoints import make_checkpoint  # Most tests need no torch.

    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))

"""An engine, and its exports, for each test."""

from collections.abc import AsyncIterator

import pytest

from baton.telemetry.metrics import EXPORTS_OPEN
from baton.transfer.export import ExportRegistry
from tests.metrics import count
from tests.unit.transfer.support import INCARNATION, LAYERS, Engine


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def exports(engine: Engine) -> AsyncIterator[ExportRegistry]:
    """Frames have 4 tokens of a layer. All exports have ended after the test."""
    exports = ExportRegistry(engine, INCARNATION, frame_bytes=4 * engine.spec.kv_format.token_bytes // LAYERS)
    yield exports
    exports.close()
    await exports.wait_closed()
    assert count(EXPORTS_OPEN) == 0
    assert engine.copies == 0

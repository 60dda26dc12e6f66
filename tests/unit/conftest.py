"""Fixtures of unit tests."""

import pytest

from tests.fake_router import Router


@pytest.fixture
async def router() -> Router:
    return Router()

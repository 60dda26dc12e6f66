"""Work that must not be left behind."""

import asyncio
import gc
from typing import Any

from baton.process.executors import wait_to_end


async def test_an_error_that_no_caller_asks_for_is_not_logged() -> None:
    logged = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    async def fail() -> None:
        raise ZeroDivisionError

    await wait_to_end(asyncio.gather(fail()))
    gc.collect()
    assert logged == []

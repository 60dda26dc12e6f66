"""The Python in README.md, docs/python.md and docs/http.md runs, and prints what these pages show."""

import asyncio
import contextlib
import io
import re
import shutil
from pathlib import Path

import pytest

from baton import bundled
from tests.certificates import fleet, tls
from tests.fake_router import Router, served
from tests.fleet import Fleet

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/python.md", "docs/http.md")
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


async def test_all_examples_run_and_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    # gRPC delivers events of a second event loop through the first one, also after the second is closed.
    monkeypatch.setattr(asyncio, "run", lambda main: asyncio.run_coroutine_threadsafe(main, loop).result())
    monkeypatch.chdir(tmp_path)
    shutil.copy(fleet() / "ca.crt", tmp_path)
    (tmp_path / "api.key").write_text("k-1\n")
    examples = [(page, *match) for page in PAGES for match in BLOCK.findall((ROOT / page).read_text())]
    assert {page for page, *_ in examples} == set(PAGES)
    assert len(examples) == sum((ROOT / page).read_text().count("```python\n") for page in PAGES)
    secure = Router()
    async with Fleet(bundled.path(), dtype="float32") as running, served(secure, tls=tls("router")) as other:
        app = await running.start_router([await running.prefill()], [await running.decode()], http="127.0.0.1:0")
        for page, code, shown in examples:
            code = code.replace("127.0.0.1:50050", app.address).replace("baton.example.org:50050", other.address)
            code = code.replace("127.0.0.1:8000", app.http_address)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                await asyncio.to_thread(exec, compile(code, page, "exec"), {"__name__": page})
            assert not shown or output.getvalue() == shown, f"{page}:\n{code}"
    assert [caller.authorization for caller in secure.callers] == ["Bearer k-1"]

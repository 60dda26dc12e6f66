"""Start of each of several router processes, before it serves."""

import pytest

from baton.config.router import RouterConfig
from router import processes


def test_each_of_several_routers_sets_what_its_process_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    # Prepared, this process would have other memory and turns of threads for all tests after this one.
    calls: list[str] = []
    monkeypatch.setattr(processes, "configure", lambda *_: None)
    monkeypatch.setattr(processes, "prepare", lambda: calls.append("prepare"))
    monkeypatch.setattr(processes, "run", lambda *_, **__: calls.append("run"))
    processes.start(RouterConfig(prefill=("127.0.0.1:1",), decode=("127.0.0.1:2",)))
    assert calls == ["prepare", "run"]

"""A TCP proxy that plays a bad network: a process of its own, told what to do in lines of JSON.

    python -m tests.chaos.proxy CONTROL_PORT

A *link* is a listening port in front of one upstream port. A connection is forwarded as its link's mode says:

    pass    as fast as it goes
    cut     nothing moves, in either direction; connections stay open, new ones are accepted and hang. What was under
            way is delivered once the link passes again, as TCP would: late messages of the dead are part of the game
    slow    `rate` bytes per second in each direction, over all connections of the link
    reset   connections break, new ones too

A link opened with `identify` knows which process dials it (the local port of its connection, looked up among the
processes named by `pids`), so that it can be cut for one peer alone.

Requests (one line each, answered by one line): {"op": "open", "link", "listen", "upstream", "identify"},
{"op": "mode", "link", "mode", "rate", "peer"}, {"op": "abort", "link"}: reset the connections that are open now, and go
on taking new ones; {"op": "pids", "pids": {name: pid}}.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from typing import Any

import psutil

CHUNK = 64 << 10
SLOW_CHUNK = 1 << 10
BUFFER = 16 << 10
"""Small socket buffers, so that a slow link is felt by who writes to it, as a real one is."""


class Proxy:
    """All links of a fleet; leaving the context closes them."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self.pids: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [*self._tasks, *(task for link in self.links.values() for task in link.connections)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def command(self, request: dict[str, Any]) -> None:
        match request["op"]:
            case "open":
                link = Link(request["link"], request["upstream"], self if request["identify"] else None)
                self.links[link.name] = link
                self._tasks.add(asyncio.create_task(link.serve(listening(request["listen"]))))
            case "mode":
                self.links[request["link"]].set_mode(request["mode"], request.get("rate", 0), request.get("peer"))
            case "abort":
                self.links[request["link"]].abort()
            case "pids":
                self.pids = request["pids"]

    def owner(self, port: int) -> str:
        """Process, of the known ones, that has a connection with this local port."""
        for name, pid in self.pids.items():
            try:
                connections = psutil.Process(pid).net_connections("tcp")
            except psutil.Error:
                continue
            if any(connection.laddr.port == port for connection in connections):
                return name
        return ""


class Link:
    """One listening port in front of one upstream port."""

    def __init__(self, name: str, upstream: int, proxy: Proxy | None) -> None:
        self.name, self.upstream = name, upstream
        self._proxy = proxy
        self._modes: dict[str | None, tuple[str, float]] = {None: ("pass", 0.0)}
        self._changed = asyncio.Event()
        self.connections: set[asyncio.Task[None]] = set()
        self._free_at = [0.0, 0.0]

    def set_mode(self, mode: str, rate: float, peer: str | None) -> None:
        """Change the mode, for all or for one peer; a mode for all replaces those of single peers."""
        if peer is None:
            self._modes.clear()
        self._modes[peer] = (mode, rate)
        self._changed.set()
        self._changed = asyncio.Event()

    def abort(self) -> None:
        for task in self.connections:
            task.cancel()

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                near, address = await loop.sock_accept(listener)
                task = asyncio.create_task(self._connection(near, address[1]))
                self.connections.add(task)
                task.add_done_callback(self.connections.discard)

    def _mode(self, peer: str) -> tuple[str, float]:
        return self._modes.get(peer) or self._modes[None]

    async def _connection(self, near: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        far = None
        try:
            peer = await asyncio.to_thread(self._proxy.owner, port) if self._proxy else ""
            await self._passable(peer)
            far = socket.socket()
            _small(far)
            far.setblocking(False)
            await loop.sock_connect(far, ("127.0.0.1", self.upstream))
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(near, far, peer, 0))
                pumps.create_task(self._pump(far, near, peer, 1))
        except* (OSError, asyncio.CancelledError):
            for end in (near, far):
                if end is not None:
                    # A reset, not an orderly end: nobody may take half a message for a whole one.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            near.close()
            if far is not None:
                far.close()

    async def _pump(self, source: socket.socket, sink: socket.socket, peer: str, direction: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            rate = await self._passable(peer)
            try:
                data = await loop.sock_recv(source, SLOW_CHUNK if rate else CHUNK)
            except OSError:
                # A cut hides the end of a connection as well.
                await self._passable(peer)
                raise
            rate = await self._passable(peer)
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            if rate:
                self._free_at[direction] = max(loop.time(), self._free_at[direction]) + len(data) / rate
                await asyncio.sleep(self._free_at[direction] - loop.time())
                await self._passable(peer)
            await loop.sock_sendall(sink, data)

    async def _passable(self, peer: str) -> float:
        """Wait while the link is cut; the bytes per second that it carries, 0 for no limit."""
        while (mode := self._mode(peer))[0] == "cut":
            await self._changed.wait()
        if mode[0] == "reset":
            raise ConnectionResetError(self.name)
        return mode[1] if mode[0] == "slow" else 0.0


def listening(port: int) -> socket.socket:
    """A listening socket on loopback."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _small(listener)
    listener.bind(("127.0.0.1", port))
    listener.listen(256)
    listener.setblocking(False)
    return listener


def _small(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        end.setsockopt(socket.SOL_SOCKET, option, BUFFER)


async def serve(port: int) -> None:
    """Obey whoever connects to the control port, for ever."""

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                await proxy.command(json.loads(line))
                answer = {"ok": True}
            except (OSError, KeyError, ValueError) as error:
                answer = {"error": repr(error)}  # type: ignore[dict-item]
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(obey, "127.0.0.1", port)
    async with Proxy() as proxy, server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))

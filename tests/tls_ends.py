"""Ends that take TLS for servers that have none, such as the embedded Valkey."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests import certificates
from tests.redis_server import Server

_TLS_BEGINS = b"\x16"


class TlsEnds:
    """Ends of servers, which may want certificates of clients, and may take plain connections too.

    `plain` is what was said to them without TLS, `tls` are the ports of servers that were spoken to with it.
    """

    def __init__(self, *, client_certificates: bool = False, plain_too: bool = False) -> None:
        ours = certificates.fleet()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(ours / "router.crt", ours / "router.key")
        if client_certificates:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(ours / "ca.crt")
        self._plain_too = plain_too
        self._tasks: set[asyncio.Task[None]] = set()
        self.plain = bytearray()
        self.tls: set[int] = set()

    @asynccontextmanager
    async def of(self, server: Server) -> AsyncIterator[int]:
        """The port of a server's end."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            task = asyncio.create_task(self._accept(listener, server.port))
            try:
                yield int(listener.getsockname()[1])
            finally:
                for each in (task, *self._tasks):
                    each.cancel()
                await asyncio.wait({task, *self._tasks})

    async def _accept(self, listener: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(self._serve(connection, port))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, port: int) -> None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(connection, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(connection)
        secure = not self._plain_too or connection.recv(1, socket.MSG_PEEK) == _TLS_BEGINS
        reader = asyncio.StreamReader()
        with suppress(OSError):
            transport, protocol = await loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader), connection, ssl=self._context if secure else None
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            if secure:
                self.tls.add(port)
            said = None if secure else self.plain
            await asyncio.gather(self._copy(reader, inner_writer, said), self._copy(inner_reader, writer, None))

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytearray | None) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    if said is not None:
                        said += data
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()

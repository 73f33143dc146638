"""`FaultProxy`: TCP between the tiers through a process that can stop the bytes, for `bench.chaos`.

A route is a port of its own in front of one address. A cut stops the bytes of a route in one direction or in both,
on all of its connections (those that come meanwhile too) or on the oldest one; nobody is told, as in a network that
is parted. At its end the bytes that waited go on, or the connections break.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, Literal

from graftree.errors import GraftreeError

Way = Literal["up", "down"]  # from whoever connected to the address behind, and back
WAYS: tuple[Way, ...] = ("up", "down")


class FaultProxy:
    """The process, from any thread; ends with `close`, or with its parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.chaos_proxy"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def route(self, name: str, target: str) -> str:
        """Open a route, in place of one of the same name.

        Args:
            target: host:port, or the path of a unix socket.

        Returns:
            host:port in front of it.
        """
        return f"127.0.0.1:{self._do('route', name, target=target)['port']}"

    def cut(self, name: str, ways: tuple[Way, ...], *, oldest: bool) -> None:
        """Stop the bytes of a route; `oldest`: of its oldest connection only."""
        self._do("cut", name, ways=ways, oldest=oldest)

    def mend(self, name: str, *, broken: bool) -> None:
        """Let the bytes go on, or break the connections that were cut."""
        self._do("mend", name, broken=broken)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, what: str, name: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        with self._lock:
            self._process.stdin.write(json.dumps({"do": what, "name": name, **more}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "the fault proxy has ended"}
        if "error" in reply:
            raise GraftreeError(reply["error"])
        return reply


# The process itself.


class _End(asyncio.Protocol):
    """One of the two sockets of a connection. What it reads goes `way`; a reason to pause holds its reading."""

    def __init__(self, link: _Link, way: Way) -> None:
        self.link, self.way = link, way
        self.transport: asyncio.Transport | None = None
        self.pauses: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self.link.broken:
            transport.abort()
        elif self.pauses:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """As asyncio.Protocol."""
        if (other := self.link.other(self).transport) is not None:
            other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio.Protocol; the other one ends behind what is still to be written."""
        if (other := self.link.other(self).transport) is not None:
            other.close()
        self.link.over()

    def pause_writing(self) -> None:
        """As asyncio.Protocol."""
        self.link.other(self).pause("full")

    def resume_writing(self) -> None:
        """As asyncio.Protocol."""
        self.link.other(self).go("full")

    def pause(self, reason: str) -> None:
        """Read nothing until `go` was called for every reason."""
        if not self.pauses and self.transport is not None:
            self.transport.pause_reading()
        self.pauses.add(reason)

    def go(self, reason: str) -> None:
        """This reason has gone."""
        if reason in self.pauses:
            self.pauses.remove(reason)
            if not self.pauses and self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()


class _Link:
    """A connection through a route."""

    def __init__(self, route: _Route) -> None:
        self.route = route
        self.ends: dict[Way, _End] = {way: _End(self, way) for way in WAYS}
        self.ends["up"].pause("no other end")
        self.task: asyncio.Task[None] | None = None
        self.broken = False

    def front(self) -> _End:
        """The protocol of a socket that was accepted."""
        self.route.links[self] = None
        for way in self.route.cut_ways:
            self.ends[way].pause("cut")
        self.task = asyncio.create_task(self._reach())
        return self.ends["up"]

    async def _reach(self) -> None:
        loop, target = asyncio.get_running_loop(), self.route.target
        try:
            if target.startswith("/"):
                await loop.create_unix_connection(lambda: self.ends["down"], target)
            else:
                host, _, port = target.rpartition(":")
                await loop.create_connection(lambda: self.ends["down"], host, int(port))
            self.ends["up"].go("no other end")
        except OSError:
            self.abort()

    def other(self, end: _End) -> _End:
        """The socket at the other side."""
        return self.ends["down" if end.way == "up" else "up"]

    def abort(self) -> None:
        """Break both sockets, also one that is still to come."""
        self.broken = True
        for end in self.ends.values():
            if end.transport is not None:
                end.transport.abort()

    def over(self) -> None:
        """One of the sockets has ended."""
        self.route.links.pop(self, None)


class _Route:
    """A port in front of `target`."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.links: dict[_Link, None] = {}  # in order of arrival
        self.cut_ways: tuple[Way, ...] = ()  # of connections to come
        self.cut_links: list[_Link] = []
        self.server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listen; returns the port."""
        self.server = await asyncio.get_running_loop().create_server(lambda: _Link(self).front(), "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    def cut(self, ways: tuple[Way, ...], *, oldest: bool) -> None:
        """See `FaultProxy.cut`."""
        links = list(self.links)
        self.cut_links = links[:1] if oldest else links
        self.cut_ways = () if oldest else ways
        for link in self.cut_links:
            for way in ways:
                link.ends[way].pause("cut")

    def mend(self, *, broken: bool) -> None:
        """See `FaultProxy.mend`."""
        came_meanwhile = [link for link in self.links if self.cut_ways and link not in self.cut_links]
        for link in (*self.cut_links, *came_meanwhile):
            if broken:
                link.abort()
            for end in link.ends.values():
                end.go("cut")
        self.cut_ways, self.cut_links = (), []

    def close(self) -> None:
        """Listen no longer, and break what is left."""
        if self.server is not None:
            self.server.close()
        for link in list(self.links):
            link.abort()


async def _serve() -> None:
    routes: dict[str, _Route] = {}
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        name, reply = order["name"], {}
        if order["do"] == "route":
            if name in routes:
                routes[name].close()
            route = routes[name] = _Route(order["target"])
            reply = {"port": await route.open()}
        elif name not in routes:
            reply = {"error": f"no route {name}"}
        elif order["do"] == "cut":
            routes[name].cut(tuple(order["ways"]), oldest=order["oldest"])
        else:
            routes[name].mend(broken=order["broken"])
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())

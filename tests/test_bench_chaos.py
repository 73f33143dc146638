"""`bench.chaos`: what it does to the ways between tiers, what it calls a stall, and that it sees two owners."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from bench.chaos import Course, _groups
from bench.chaos_faults import NOTHING, Fault, Troublemaker
from bench.chaos_history import History
from bench.chaos_load import Stream
from bench.chaos_proxy import WAYS, FaultProxy, Way
from bench.chaos_races import Races, race
from bench.chaos_watch import Watch
from graftree.errors import GraftreeError
from graftree.store.embedded import EmbeddedRedis

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with FaultProxy() as running:
        yield running


class Echo:
    """A server that says everything again, and what it heard."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.address = ""

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Echo]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while word := await reader.read(100):
                self.heard.append(word)
                writer.write(word)
        except ConnectionError:
            pass
        finally:
            writer.close()


async def reach(address: str) -> Ends:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def say(ends: Ends, word: bytes) -> bytes:
    ends[1].write(word)
    return await ends[0].readexactly(len(word))


async def nothing_comes(ends: Ends) -> asyncio.Task[bytes]:
    """A read that has not ended after some round trips of others'."""
    reading = asyncio.create_task(ends[0].read(100))
    await asyncio.sleep(0.05)
    assert not reading.done()
    return reading


@pytest.mark.parametrize("ways", [WAYS, WAYS[:1], WAYS[1:]])
async def test_a_cut_that_mends(proxy: FaultProxy, ways: tuple[Way, ...]) -> None:
    """Bytes stop in the directions that were named, on connections that come meanwhile too, and arrive afterwards."""
    async with Echo()() as echo:
        address = proxy.route("echo", echo.address)
        ends = await reach(address)
        assert await say(ends, b"one") == b"one"
        proxy.cut("echo", ways, oldest=False)
        later = await reach(address)
        ends[1].write(b"two")
        later[1].write(b"six")
        waiting = [await nothing_comes(each) for each in (ends, later)]
        assert (b"two" in echo.heard, b"six" in echo.heard) == ("up" not in ways,) * 2
        proxy.mend("echo", broken=False)
        assert [await each for each in waiting] == [b"two", b"six"]
        for writer in (ends[1], later[1]):
            writer.close()


async def test_a_cut_that_breaks(proxy: FaultProxy) -> None:
    """Of two connections only the older one stands still, and breaks at the end; the route serves on."""
    async with Echo()() as echo:
        address = proxy.route("echo", echo.address)
        older, younger = await reach(address), await reach(address)
        assert await say(older, b"a") + await say(younger, b"b") == b"ab"
        proxy.cut("echo", WAYS, oldest=True)
        older[1].write(b"c")
        waiting = await nothing_comes(older)
        assert await say(younger, b"d") == b"d"
        proxy.mend("echo", broken=True)
        with pytest.raises(ConnectionError):
            await waiting
        third = await reach(address)
        assert await say(younger, b"e") + await say(third, b"f") == b"ef"
        assert b"c" not in echo.heard
        for writer in (older[1], younger[1], third[1]):
            writer.close()


async def test_a_way_to_nowhere(proxy: FaultProxy) -> None:
    """Where nobody listens behind a route its connections end; a name without a route is an error."""
    ends = await reach(proxy.route("nowhere", "/nonexistent/socket"))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await ends[0].readexactly(1)
    ends[1].close()
    with pytest.raises(GraftreeError, match="no route elsewhere"):
        proxy.mend("elsewhere", broken=True)


def test_stalls() -> None:
    """The longest time without a chunk that touches the fault, the wait for the first one included; None for streams
    that did not run then."""
    stream = Stream([1.0, 4.0, 5.0, 7.0, 7.5])
    assert stream.stall(4.5, 4.6) == 1.0
    assert stream.stall(4.5, 5.5) == 2.0
    assert stream.stall(0.0, 2.0) == 3.0
    assert stream.stall(7.2, 99.0) == 0.5
    assert stream.stall(0.0, 0.5) is None
    assert stream.stall(8.0, 9.0) is None
    assert Stream([2.0]).stall(1.0, 3.0) is None


def test_two_at_once_have_a_row_of_their_own() -> None:
    """What a fault does alone is not mixed with what two do together."""
    alone = Fault("router", "kill")
    pair = [Fault("redis", "kill", with_="router pause"), Fault("router", "pause", with_="redis kill")]
    assert list(_groups([alone, *pair]).values()) == [
        {"router kill": [alone]},
        {"redis kill + router pause": pair},
    ]


async def test_races() -> None:
    """Two routers race for a session on a real server: each position is acknowledged once, and the server's log of
    commands says the same."""
    with EmbeddedRedis() as redis:
        found, history = await race(redis.url, 100, Random(1))
    assert (found.races, found.double, found.astray) == (100, 0, 0)
    assert found.fenced > 0
    assert (history.commits, history.wrong) == (len(found.told), [])


def test_a_double_commit_is_counted() -> None:
    """One position that was acknowledged to two."""
    assert Races(told=[("s", 0, 1), ("s", 1, 2), ("s", 1, 3), ("t", 1, 3)]).double == 1


def test_nothing_happens_now_and_then() -> None:
    """A turn in which nobody is harmed lasts like a pause, shares its time with no fault, and is none."""

    class Nobody:
        """No place may be asked for anything."""

        def whole(self) -> None:
            """Two of everything serve."""

    maker = Troublemaker(Nobody(), [NOTHING], Random(0), down_seconds=(0.0, 0.001))  # type: ignore[arg-type]
    maker.run(threading.Event(), lambda: len(maker.faults) >= 3)
    course = Course([], maker.faults, History("unused"))
    assert [fault.with_ for fault in course.faults] == ["", "", ""]
    assert course.troubles == []


def test_a_machine_that_stands_still() -> None:
    """A sleep that ends much too late is noted, one that is a little late is not."""
    now, late = 0.0, iter([0.0, 0.2, 5.0, 0.0])

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + next(late)

    watch = Watch(lambda: now, sleep)
    for _ in range(4):
        watch.look()
    [(begun, over)] = watch.still
    assert watch.seconds == over - begun > 5.0
    assert watch.stood_still(0.0, begun)
    assert watch.stood_still(over - 1.0, over + 9.0)
    assert not watch.stood_still(over + 0.01, over + 9.0)

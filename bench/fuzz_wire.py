"""Bytes for `bench.fuzz`: connections to a port of gRPC or HTTP that are none, or that stop half way."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from bench.fuzz_record import DATA, PREFACE

HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 1, 3, 4, 6, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
KINDS = (*range(11), 77, 255)
OPENINGS = (b"", PREFACE, b"GET /metrics HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"SSH-2.0-x\r\n", b"\0" * 9)
SIZES = (0, 1, 9, 300, 70_000)
LENGTHS = (0, 1, 5, (16 << 20) + 1, (1 << 31) - 1, (1 << 32) - 1)  # that a gRPC message says it has
PATHS = ("/graftree.v1.GenerationService/Generate", "/grpc.health.v1.Health/Check", "/x/y", "", "*", "/" + "p" * 9000)
FLOOD = 300
PATIENCE_SECONDS = 2.0
Speech = Literal["grpc", "http"]


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """One HTTP/2 frame. `length`: that it says it has; None = the true one."""
    size = len(payload) if length is None else length
    return struct.pack(">BHBBI", size >> 16 & 0xFF, size & 0xFFFF, kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """One header, spelt out (HPACK without index and Huffman code)."""
    return b"\x10" + b"".join(_string(part.encode()) for part in (name, value))


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)]) + text
    size, rest = b"\x7f", len(text) - 127
    while rest > 127:
        size += bytes([rest & 127 | 128])
        rest >>= 7
    return size + bytes([rest]) + text


def call_headers(path: str, *extra: tuple[str, str]) -> bytes:
    """Headers of a gRPC call."""
    usual = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers"))
    return b"".join(literal(*pair) for pair in (*usual, ("content-type", "application/grpc"), *extra))


def garbage(rng: Random) -> bytes:
    """Something that begins like a protocol, or like none."""
    return rng.choice(OPENINGS) + rng.randbytes(rng.choice(SIZES))


def wild_frames(rng: Random) -> bytes:
    """Frames of every kind with any flags, stream and length."""
    out = PREFACE + frame(SETTINGS, 0, 0, b"")
    for _ in range(rng.choice((1, 5, 40))):
        payload = rng.randbytes(rng.choice((0, 4, 6, 8, 50)))
        length = rng.choice((None, None, None, 0, 3, (1 << 24) - 1))
        stream = rng.choice((0, 1, 3, 2, (1 << 31) - 1, (1 << 32) - 1))
        out += frame(rng.choice(KINDS), rng.randrange(256), stream, payload, length)
    return out


def lying_messages(rng: Random) -> bytes:
    """A proper call whose messages say that they are compressed, or as long as they are not."""
    odd = rng.choice(
        (("grpc-encoding", "gzip"), ("grpc-timeout", "-1S"), ("grpc-timeout", "9" * 40 + "n"), ("x-bin", "%%"))
    )
    out = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, call_headers(rng.choice(PATHS), odd))
    for _ in range(rng.choice((1, 3))):
        prefix = bytes([rng.choice((0, 0, 1, 7, 255))]) + rng.choice(LENGTHS).to_bytes(4, "big")
        body = prefix + rng.randbytes(rng.choice((0, 5, 300)))
        out += frame(DATA, rng.choice((0, 0, END_STREAM)), 1, body)
    return out


def flood(rng: Random) -> bytes:
    """Very many small things at once: calls taken back, headers without an end, pings, settings."""
    start = PREFACE + frame(SETTINGS, 0, 0, b"")
    path = rng.choice(PATHS)
    how = rng.choice(("reset", "continuation", "ping", "settings", "empty"))
    if how == "reset":
        each = (
            frame(HEADERS, END_HEADERS, stream, call_headers(path)) + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")
            for stream in range(1, 2 * FLOOD, 2)
        )
        return start + b"".join(each)
    if how == "continuation":
        return start + frame(HEADERS, 0, 1, call_headers(path)) + FLOOD * frame(CONTINUATION, 0, 1, literal("a", "b"))
    if how == "ping":
        return start + FLOOD * frame(PING, 0, 0, rng.randbytes(8))
    if how == "settings":
        return start + FLOOD * frame(SETTINGS, 0, 0, struct.pack(">HI", rng.randrange(9), rng.getrandbits(32)))
    return start + frame(HEADERS, END_HEADERS, 1, call_headers(path)) + FLOOD * frame(DATA, 0, 1, b"")


def odd_http(rng: Random) -> bytes:
    """A request of HTTP/1 with something odd."""
    method = rng.choice(("GET", "POST", "HEAD", "OPTIONS", "X" * 9, "get", ""))
    path = rng.choice(
        ("/metrics", "/", "/../../etc/passwd", "/?name[]=" + "a" * 3000, "/%00%ff", "*", "/" + "a" * 70_000)
    )
    version = rng.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/x", ""))
    heads = rng.choice(
        (
            "",
            "Host: x\r\n",
            "Content-Length: 99999999999\r\n",
            "Content-Length: -1\r\n",
            "Transfer-Encoding: chunked\r\n",
            "Expect: 100-continue\r\n",
            "Accept: application/openmetrics-text; version=\xff\r\n",
            "Accept-Encoding: gzip\r\n",
            "a: b\r\n" * 200,
            "no colon\r\n",
            " folded\r\n",
        )
    )
    end = rng.choice(("\r\n", "\n", "", "\r\n" + "x" * 5000))
    return f"{method} {path} {version}\r\n{heads}{end}".encode("latin-1")


SENDS: dict[Speech, dict[str, Callable[[Random], bytes]]] = {
    "grpc": {"garbage": garbage, "frames": wild_frames, "lies": lying_messages, "flood": flood},
    "http": {"garbage": garbage, "odd requests": odd_http},
}


async def send_once(address: str, data: bytes, rng: Random) -> None:
    """Connect, send at once or in pieces, read some or nothing, leave in good order or with a reset.

    Raises:
        ConnectionRefusedError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else len(data)
    reads, resets, pause = rng.random() < 0.6, rng.random() < 0.3, 0.05 * rng.random()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data[:cut])
                await writer.drain()
                if cut < len(data):
                    await asyncio.sleep(pause)
                    writer.write(data[cut:])
                    await writer.drain()
                if reads:
                    await asyncio.wait_for(reader.read(4096), 0.3)
            except ConnectionError:
                return  # the port has had enough
            finally:
                if resets:
                    writer.transport.abort()
                writer.close()


HALVES: dict[Speech, tuple[bytes, ...]] = {
    "grpc": (
        b"",
        PREFACE[:10],
        PREFACE,
        PREFACE + frame(SETTINGS, 0, 0, b""),
        PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 0, 1, call_headers(PATHS[0])),
        PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, call_headers(PATHS[0])),
    ),
    "http": (
        b"",
        b"GET ",
        b"GET /metrics HTTP/1.1\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
        b"POST / HTTP/1.1\r\n",
    ),
}


@dataclass
class Half:
    """A connection that was begun and says nothing more. `gone`: the other side has closed it."""

    begun: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: bool = False

    @classmethod
    async def open(cls, address: str, begun: bytes) -> Half:
        """Connect and say the beginning."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begun)
        return cls(begun, reader, writer)

    async def watch(self) -> None:
        """Read, answering nothing, until the other side has enough."""
        with contextlib.suppress(ConnectionError, OSError):
            while await self.reader.read(4096):
                pass
        self.gone = True

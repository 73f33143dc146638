"""Real messages for `bench.fuzz` to spoil: what goes over the wire between client, router, verifier and speculators.

A tap stands before each port of a small stack and keeps what is sent through it. The gRPC messages are then read from
the HTTP/2 frames: DATA frames of one stream, joined, are messages behind five bytes of flag and length.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from bench.vitals import free_port
from graftree.client import Client
from graftree.local_stack import LocalStack
from graftree.sdk.options import StructuredOutput

MODEL = "random:llama?layers=1&seed=3"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, PADDED = 0, 8
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "once upon a time", "max_new_tokens": 12},
    {"token_ids": [5, 6, 7, 8], "max_new_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2, "log_probs": True},
    {"token_ids": list(range(20, 90)), "max_new_tokens": 9, "temperature": 1.0, "seed": 6, "min_new_tokens": 2},
    {"prompt": "a", "max_new_tokens": 9, "structured_output": StructuredOutput(regex="[a-c]+")},
    {"prompt": "b", "max_new_tokens": 9, "stop": ["zz"], "logit_bias": {9: 2.0}, "bad_words": ["x"]},
)

Recordings = dict[str, list[list[bytes]]]  # full service name -> calls -> messages


class Tap:
    """A port that passes everything on to another one and keeps what comes from the side that connects.

    Args:
        target: HOST:PORT; may be set later.
    """

    def __init__(self, target: str = "") -> None:
        self.target = target
        self._kept: list[bytearray] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._pumps: list[threading.Thread] = []
        self._ends: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for pump in self._pumps:
            pump.join()
        for end in self._ends:
            end.close()

    def calls(self) -> list[list[bytes]]:
        """The messages of each call so far."""
        return [call for kept in self._kept for call in messages(bytes(kept))]

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._ends.append(near)
            host, _, port = self.target.rpartition(":")
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            self._ends.append(far)
            kept = bytearray()
            self._kept.append(kept)
            for source, sink, copy in ((near, far, kept), (far, near, None)):
                pump = threading.Thread(target=_pump, args=(source, sink, copy), daemon=True)
                self._pumps.append(pump)
                pump.start()


def _pump(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if kept is not None:
                kept += data
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def messages(sent: bytes) -> list[list[bytes]]:
    """The gRPC messages that a client sent over one connection, by call; those of a call without any are left out."""
    streams: dict[int, bytearray] = {}
    for kind, flags, stream, payload in frames(sent):
        if kind == DATA:
            padding = payload[0] if flags & PADDED else 0
            start = 1 if flags & PADDED else 0
            streams.setdefault(stream, bytearray()).extend(payload[start : len(payload) - padding])
    calls = [list(_split(bytes(data))) for data in streams.values()]
    return [call for call in calls if call]


def frames(sent: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of each whole HTTP/2 frame behind the preface."""
    at = len(PREFACE) if sent.startswith(PREFACE) else len(sent)
    while at + 9 <= len(sent):
        high, low, kind, flags, stream = struct.unpack_from(">BHBBI", sent, at)
        length = high << 16 | low
        at += 9
        if at + length > len(sent):
            return
        yield kind, flags, stream & 0x7FFFFFFF, sent[at : at + length]
        at += length


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 5 <= len(data):
        length = int.from_bytes(data[at + 1 : at + 5], "big")
        if at + 5 + length > len(data):
            return
        yield data[at + 5 : at + 5 + length]
        at += 5 + length


def record(model: str = MODEL) -> Recordings:
    """Run a small stack with taps before its ports and ask it a few things."""
    with Tap() as client_side, Tap() as verifier_side, Tap() as speculator_side:
        ports = {tap: free_port() for tap in (verifier_side, speculator_side)}
        for tap, port in ports.items():
            tap.target = f"127.0.0.1:{port}"
        with LocalStack(
            model,
            [{"drafter": "ngram", "port": ports[speculator_side], "advertise": speculator_side.address}],
            in_process=True,
            threads=1,
            router_options={"adaptive": False, "draft_wait_ms": 1000.0},
            verifier_options={
                "port": ports[verifier_side],
                "advertise": verifier_side.address,
                "step_time_seconds": 0,
            },
        ) as stack:
            client_side.target = stack.target
            with Client(client_side.address) as client:
                for request in REQUESTS:
                    client.generate(**request)
        return {
            "graftree.v1.GenerationService": client_side.calls(),
            "graftree.v1.VerificationService": verifier_side.calls(),
            "graftree.v1.SpeculationService": speculator_side.calls(),
        }

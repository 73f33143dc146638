"""bench.fuzz in small: what it sends, what it looks at, and that every port of a stack survives it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.chaos_load import Case
from bench.fuzz import KEEP_SECONDS, ports_of
from bench.fuzz_attack import Port, Tally, attack
from bench.fuzz_messages import dialogue, hostile, many, methods, spoilt
from bench.fuzz_record import DATA, PADDED, PREFACE, Recordings, Tap, messages, record
from bench.fuzz_watch import Control, Course, Watch, complaints
from bench.fuzz_wire import HALVES, SENDS, call_headers, frame, literal
from bench.vitals import free_port
from graftree import Client, LocalStack
from graftree.store.embedded import EmbeddedRedis
from graftree.v1.generation_pb2 import GenerateRequest
from graftree.v1.speculation_pb2 import SpeculateRequest
from graftree.v1.verification_pb2 import VerifyRequest
from tests.router_harness import until

MODEL = "random:llama?layers=1&seed=3"
REQUEST: dict[str, Any] = {"prompt": "once upon a time", "max_new_tokens": 24, "temperature": 0.7, "seed": 5}


@pytest.fixture(scope="module")
def recordings() -> Recordings:
    """Of a small stack."""
    return record()


def test_every_method_is_there() -> None:
    """Those of the three tiers, of health and of reflection, each with the class of its requests."""
    found = {method.path: method for method in methods()}
    assert found["/graftree.v1.GenerationService/Generate"].request is GenerateRequest
    assert found["/graftree.v1.VerificationService/Verify"].streams
    assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} < {
        method.service for method in methods()
    }


def test_what_is_sent_follows_from_the_seed() -> None:
    """The same draws give the same bytes, for messages and for the wire; other draws give others."""
    for method in methods():
        assert dialogue(method, Random(3)) == dialogue(method, Random(3))
    for kinds in SENDS.values():
        for make in kinds.values():
            assert make(Random(3)) == make(Random(3))
            assert len({make(Random(seed)) for seed in range(20)}) > 1


def test_hostile_messages_parse_and_reach_every_field() -> None:
    """They are well-formed, and within a few hundred each field of each type has been set."""
    for method in methods():
        built = [hostile(method.request, Random(seed)) for seed in range(300)]
        assert all(method.request.FromString(each.SerializeToString()) is not None for each in built)
        names = {field.name for each in built for field, _ in each.ListFields()}
        assert names == {field.name for field in method.request.DESCRIPTOR.fields}


def test_many_entries_are_small() -> None:
    """Two bytes an entry, in every list whose entries are work."""
    body = many(SpeculateRequest, 1000)
    read = SpeculateRequest.FromString(body)
    assert [len(read.opens), len(read.commits), len(read.closes)] == [1000] * 3
    assert read.hello.revision == 1
    assert len(body) < 6100


def test_real_messages_are_recorded(recordings: Recordings) -> None:
    """Each service's calls, message by message, as they were sent: hello first, opens, steps and commits in order."""
    (stream,) = recordings["graftree.v1.VerificationService"]
    first, *rest = [VerifyRequest.FromString(body) for body in stream]
    assert first.hello.revision == 1
    assert sum(len(each.opens) for each in rest) >= 5
    assert any(each.steps for each in rest)
    asked = [
        GenerateRequest.FromString(body) for call in recordings["graftree.v1.GenerationService"] for body in call
    ]
    assert asked[0].prompt == REQUEST["prompt"]
    drafted = [SpeculateRequest.FromString(b) for call in recordings["graftree.v1.SpeculationService"] for b in call]
    assert any(each.commits for each in drafted)


def test_spoilt_calls_differ_from_the_recorded_ones(recordings: Recordings) -> None:
    """Most of them do, most of their messages still parse, and the recording is left as it was."""
    calls = recordings["graftree.v1.VerificationService"]
    kept = [list(call) for call in calls]
    rng = Random(1)
    out = [spoilt(calls[0], VerifyRequest, rng) for _ in range(50)]
    assert sum(each != calls[0] for each in out) > 40
    assert calls == kept
    parsed = 0
    for call in out:
        for body in call:
            with contextlib.suppress(Exception):
                VerifyRequest.FromString(body)
                parsed += 1
    assert parsed > 0.9 * sum(map(len, out))


def test_messages_are_read_from_frames() -> None:
    """Over several DATA frames, padded or not, of several streams; what was cut off is left out."""

    def message(body: bytes) -> bytes:
        return struct.pack(">BI", 0, len(body)) + body

    one, two = message(b"first") + message(b""), message(b"other")
    sent = PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, call_headers("/x/y"))
    sent += frame(DATA, 0, 1, one[:4]) + frame(DATA, 0, 3, two) + frame(DATA, PADDED, 1, b"\x02" + one[4:] + b"\0\0")
    sent += frame(DATA, 0, 5, b"\0\0\0\0\x09half")
    assert messages(sent) == [[b"first", b""], [b"other"]]
    assert messages(b"GET / HTTP/1.1\r\n\r\n") == []


def test_headers_are_spelt_as_hpack_has_them() -> None:
    """Lengths of 127 and more take further bytes of seven bits."""
    assert literal("a", "b") == b"\x10\x01a\x01b"
    assert literal("a", "b" * 127)[3:5] == b"\x7f\x00"
    assert literal("a", "b" * 300)[3:6] == b"\x7f\xad\x01"


@contextlib.contextmanager
def listener(*, closes: bool) -> Iterator[str]:
    """A port that takes connections and closes them at once, or never."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.close() if closes else taken.append(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in taken:
        connection.close()


@pytest.mark.parametrize("closes", [True, False])
def test_silent_connections_are_counted(closes: bool) -> None:
    """A port that closes them leaves none hanging, one that does not leaves all."""
    with listener(closes=closes) as address:
        tally = attack(Port("x", address, "http"), 0.5, 0, {}, halves=2)
    assert tally.halves == 2 * len(HALVES["http"])
    assert tally.hanging == (0 if closes else tally.halves)
    assert tally.attacks.total() > 0


def test_a_port_that_is_not_there_is_counted() -> None:
    """As connections that nobody took."""
    tally = attack(Port("x", f"127.0.0.1:{free_port()}", "http"), 0.3, 0, {}, halves=0)
    assert tally.refused == tally.attacks.total() > 0
    assert (tally + tally).refused == 2 * tally.refused
    assert Tally().attacks.total() == 0


def _answered(control: Control) -> bool:
    return bool(control.answers or control.errors)


async def test_the_control_group_sees_what_changes() -> None:
    """An answer that is another one counts as changed, a request that fails as an error; a right one as neither."""
    with LocalStack(MODEL, [], in_process=True, threads=1) as stack:
        with Client(stack.target) as client:
            right, other = client.generate(**REQUEST), client.generate(**REQUEST | {"seed": 6})
        cases = {"right": Case(REQUEST, right), "changed": Case(REQUEST, other), "bad": Case({"prompt": ""}, right)}
        for name, case in cases.items():
            control = Control(stack.target, [case], 1)
            async with control:
                await until(partial(_answered, control))
            assert (control.changed > 0) is (name == "changed")
            assert bool(control.errors) is (name == "bad")
            assert bool(control.count()) is (name == "right")


def test_nonsense_on_every_port(recordings: Recordings) -> None:
    """A little of everything on each port of each tier: all live, all are as they were, and so is the answer;
    `python -m bench.fuzz` is the long run."""

    def ports() -> dict[str, Any]:
        return {name: f"127.0.0.1:{free_port()}" for name in ("metrics_listen", "health_listen")}

    with (
        EmbeddedRedis() as redis,
        LocalStack(
            MODEL,
            [{"drafter": "ngram"} | ports()],
            redis=redis.url,
            in_process=True,
            threads=1,
            router_options=ports() | {"replay_seconds": 1.0, "resume_seconds": 2.0},
            verifier_options=ports() | {"step_time_seconds": 0},
        ) as stack,
        Watch(stack, redis, keep_seconds=KEEP_SECONDS) as watch,
    ):
        with Client(stack.target) as client:
            expected = client.generate(**REQUEST)
        for port in ports_of(stack):
            tally = attack(port, 0.2, 1, recordings, halves=1)
            assert (tally.refused, tally.odd) == (0, [])
        with Client(stack.target) as client:
            assert client.generate(**REQUEST).token_ids == expected.token_ids
            assert {pod.state for pod in client.model_info().pods} == {"ready"}
        left, _ = asyncio.run(watch.back())
        # One process holds all pods here, and may keep what a router's pool keeps.
        assert {name for name in left if not re.match("descriptors of (verifier|speculator)", name)} == set()
        assert watch.dead() == []


def test_what_grows_is_seen() -> None:
    """The last third of a stretch over the second; nothing where nobody looked."""
    course = Course([float(at) for at in range(9)], [1.0] * 3 + [5.0] * 3 + [9.0] * 3)
    assert course.grown(0.0, 9.0) == pytest.approx(4.0)
    assert Course().grown(0.0, 9.0) == 0.0


def test_what_is_logged_is_seen(tmp_path: Path) -> None:
    """Traces and errors; other lines are not."""
    lines = ['{"level": "info"}', '{"event": "x", "level": "error"}', "Traceback (most recent call last):"]
    (tmp_path / "router-0.log").write_text("\n".join(lines))
    assert complaints(tmp_path) == [f"router-0: {line}" for line in lines[1:]]


def test_a_tap_passes_everything_on() -> None:
    """Both ways, and keeps one."""
    with socket.create_server(("127.0.0.1", 0)) as server, Tap(f"127.0.0.1:{server.getsockname()[1]}") as tap:
        host, _, port = tap.address.rpartition(":")
        with socket.create_connection((host, int(port))) as near:
            far, _ = server.accept()
            with far:
                near.sendall(PREFACE + frame(DATA, 0, 1, b"\0\0\0\0\x01a"))
                assert far.recv(24) == PREFACE
                far.sendall(b"back")
                assert near.recv(4) == b"back"
        while not tap.calls():
            time.sleep(0.01)
        assert tap.calls() == [[b"a"]]

"""Messages for `bench.fuzz`: of every type of every service, hostile from the first field on, or real ones spoilt.

Types and methods come from the services' descriptors, so a new method or field is attacked without a word here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from graftree.v1 import generation_pb2, speculation_pb2, verification_pb2

FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR
    for module in (generation_pb2, verification_pb2, speculation_pb2, health_pb2, reflection_pb2)  # type: ignore[attr-defined]
)
WHOLE = (0, 1, -1, 2, 7, 63, 64, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), (1 << 32) - 1, (1 << 63) - 1, 1 << 40)
REAL = (0.0, -0.0, -1.0, 0.5, 1.0, 1e-45, 1e30, -1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "\0",
    "a" * 3000,
    "s.1",
    "once upon a time",
    "\U0001f600" * 40,
    '{"type": "object"}',
    '{"$ref": "#"}',
    "(",
    "(a|aa)+" * 20,
    "((((a{9}){9}){9}){9}){9}",
    "start: start start | start",
    "00000000-0000-4000-8000-000000000000",
    "00-" + "f" * 32 + "-" + "f" * 16 + "-01",
    "../../etc/passwd",
    "{s:1}",
)
COUNTS = (0, 1, 2, 9, 200)
DEEPEST = 4
STREAM_CREDITS = 100


@dataclass(frozen=True)
class Method:
    """One method of one service.

    Attributes:
        path: as it is called.
        request: class of its requests.
        streams: whether several of them may be sent.
    """

    path: str
    request: type[Message]
    streams: bool

    @property
    def service(self) -> str:
        """Full name."""
        return self.path.split("/")[1]


def methods() -> list[Method]:
    """Of all services that a pod has."""
    return [
        Method(f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type), method.client_streaming)
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def hostile(cls: type[Message], rng: Random, depth: int = 0) -> Message:
    """A message of this type with random fields, most of them out of range or not fitting each other."""
    built = cls()
    for each in cls.DESCRIPTOR.fields:
        if rng.random() >= 0.4 + 0.1 * depth:
            spoil(built, each, rng, depth)
    return built


def spoil(built: Any, field: FieldDescriptor, rng: Random, depth: int = 0) -> None:
    """Give a field another value, or some more values where it is repeated."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = rng.choice(WHOLE)
        with contextlib.suppress(ValueError, TypeError):
            getattr(built, field.name)[key] = rng.choice(REAL)
        return
    count = rng.choice(COUNTS[: len(COUNTS) - depth] or (1,)) if field.is_repeated else 1
    for _ in range(count):
        if field.message_type is not None:
            if depth < DEEPEST:
                child = hostile(GetMessageClass(field.message_type), rng, depth + 1)
                target = getattr(built, field.name)
                target.append(child) if field.is_repeated else target.CopyFrom(child)
            continue
        with contextlib.suppress(ValueError, TypeError):  # not in the type's range
            value = _value(field, rng)
            getattr(built, field.name).append(value) if field.is_repeated else setattr(built, field.name, value)


def _value(field: FieldDescriptor, rng: Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(40)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(REAL)
    return rng.choice(WHOLE) if rng.random() < 0.5 else rng.randrange(300)


def greeting(message: Message) -> Message:
    """The message as the first of a pod's stream, with hello and credits where its type has them."""
    fields = message.DESCRIPTOR.fields_by_name
    if "hello" in fields and "credits" in fields:
        anything: Any = message
        anything.hello.Clear()
        anything.hello.revision, anything.hello.pod_id = 1, "fuzz"
        anything.credits = STREAM_CREDITS
    return message


def dialogue(method: Method, rng: Random) -> list[bytes]:
    """Messages of one call, each well-formed."""
    count = rng.choice((0, 1, 1, 3)) if method.streams else 1
    bodies = []
    for index in range(count):
        message = hostile(method.request, rng)
        if method.streams and index == 0 and rng.random() < 0.8:
            greeting(message)
        bodies.append(message.SerializeToString())
    return bodies


def spoilt(bodies: Sequence[bytes], cls: type[Message], rng: Random) -> list[bytes]:
    """A recorded call with something wrong: a field, some bytes, a message too many, too few or in another place."""
    out = list(bodies)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not out:
            break
        index = rng.randrange(len(out))
        how = rng.choice(("field", "field", "field", "bytes", "cut", "twice", "gone", "swap"))
        if how == "field":
            out[index] = _another_field(out[index], cls, rng)
        elif how == "bytes":
            out[index] = _other_bytes(out[index], rng)
        elif how == "cut":
            out[index] = out[index][: rng.randrange(len(out[index]) + 1)]
        elif how == "twice":
            out.insert(rng.randrange(len(out) + 1), out[index])
        elif how == "gone":
            del out[index]
        else:
            other = rng.randrange(len(out))
            out[index], out[other] = out[other], out[index]
    return out


def _another_field(body: bytes, cls: type[Message], rng: Random) -> bytes:
    """With one field at some depth spoilt; the bytes as they are where they do not parse any more."""
    message: Any = cls()
    try:
        message.ParseFromString(body)
    except Exception:  # whatever a parser says to bytes that were spoilt before
        return _other_bytes(body, rng)
    part = message
    while True:
        inner = [value for field, value in part.ListFields() if _is_message(field)]
        if not inner or rng.random() < 0.4:
            break
        chosen = rng.choice(inner)
        part = rng.choice(chosen) if hasattr(chosen, "append") else chosen
    if not part.DESCRIPTOR.fields:
        return _other_bytes(body, rng)
    present = [field for field, _ in part.ListFields()]
    field = rng.choice(present if present and rng.random() < 0.7 else list(part.DESCRIPTOR.fields))
    if rng.random() < 0.3:
        part.ClearField(field.name)
    if rng.random() < 0.8:
        spoil(part, field, rng, depth=1)
    return bytes(message.SerializeToString())


def _is_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


def _other_bytes(body: bytes, rng: Random) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice((1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    if rng.random() < 0.3:
        changed += rng.randbytes(rng.choice((1, 9, 300)))
    return bytes(changed)


def many(cls: type[Message], count: int) -> bytes:
    """A message with so many empty entries of each repeated message or text: two bytes an entry."""
    parts = [
        bytes([field.number << 3 | 2, 0])
        for field in cls.DESCRIPTOR.fields
        if field.is_repeated
        and field.number < 16  # a tag of one byte
        and field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING)
    ]
    return greeting(cls()).SerializeToString() + b"".join(part * count for part in parts)

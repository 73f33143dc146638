"""Where two requests under one id differ, in words that name the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from graftree.errors import AlreadyExists

_NOT_COMPARED = ("request_id", "resume_after", "recollection")


def refuse_another(request_id: str, began: Message, asked: Message) -> None:
    """Two GenerateRequests under one id must be the same.

    Raises:
        AlreadyExists: names the first field that differs, its value, and the one that the generation began with.
    """
    found = _difference(began, asked, "")
    if found is not None:
        field, ours, theirs = found
        raise AlreadyExists(
            f"request {request_id} exists and is a different one: {field} = {theirs}, it began with {ours}"
        )


def refuse_another_prompt(request_id: str, began: Sequence[int], asked: Sequence[int]) -> None:
    """The same for prompts in tokens, which are never shown. Raises AlreadyExists."""
    if tuple(began) != tuple(asked):
        raise AlreadyExists(
            f"request {request_id} exists and is a different one: its prompt is another one of {len(began)} tokens, "
            f"not this one of {len(asked)}"
        )


def _difference(began: Message, asked: Message, path: str) -> tuple[str, str, str] | None:
    for field in began.DESCRIPTOR.fields:
        name = f"{path}{field.name}"
        if name in _NOT_COMPARED:
            continue
        ours, theirs = _value(began, field), _value(asked, field)
        if ours == theirs:
            continue
        if isinstance(ours, Message) and isinstance(theirs, Message):
            deeper = _difference(ours, theirs, f"{name}.")
            return deeper or (name, "another", "one")
        shown, other = _shown(ours), _shown(theirs)
        return name, shown, other if other != shown else f"{other}, others than then"
    return None


def _value(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    return list(value) if field.is_repeated and field.message_type is None else value


def _shown(value: Any) -> str:
    """Fit for an error: numbers as they are, of texts and lists only how long they are."""
    if value is None:
        return "unset"
    if isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    if isinstance(value, Message):
        return "set"
    return f"{len(value)} values"

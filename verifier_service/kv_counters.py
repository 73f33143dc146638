"""`KvCounters`: what a verifier has had to do with the KV Redis since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """What became of a session's blocks that were not in the pool."""

    LOADED = "loaded"  # all that were there
    PART = "part"  # some: one was refused or gone, or time was up
    MISS = "miss"  # none was there
    REFUSED = "refused"  # the first one was
    LATE = "late"  # time was up before the first one
    FAILED = "failed"  # Redis broke off
    PREFILL = "prefill"  # too few were there to be worth it
    SHORT = "short"  # not even all of them would be worth it: nobody asked
    AWAY = "away"  # Redis was known to be away: nobody asked
    LEFT = "left"  # the session went away meanwhile


class Dropped(StrEnum):
    """Why a block was not written."""

    QUEUE = "queue"  # too many waited
    AWAY = "away"  # Redis was away
    GONE = "gone"  # the pool had needed its place
    FAILED = "failed"  # Redis did not take it
    PACKING = "packing"  # it cannot be packed


@dataclass
class KvCounters:
    """Plain numbers; each is written by one thread and read by anyone.

    Attributes:
        blocks_loaded: blocks that sessions got from the KV Redis.
        blocks_written: blocks that it took.
        blocks_kept: blocks that were there when they were to be written.
        blocks_looked_up: blocks that it was asked for.
        bytes_loaded, bytes_written: of the values.
        load_ns: nanoseconds that sessions waited for it, whatever came.
        write_ns: nanoseconds of writing, in the background.
        emptied: times that its content was gone and what open sessions need was written again.
        loads: by `Outcome`.
        dropped: blocks that were not written, by why (`Dropped`).
        refused: blocks that came and were not used, by why (`graftree.models.kv_codec.Refusal`).
    """

    blocks_loaded: int = 0
    blocks_written: int = 0
    blocks_kept: int = 0
    blocks_looked_up: int = 0
    bytes_loaded: int = 0
    bytes_written: int = 0
    load_ns: int = 0
    write_ns: int = 0
    emptied: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

"""What goes into the engine (operations) and what comes out of it (events)."""

from __future__ import annotations

from dataclasses import dataclass, field

from graftree.errors import GraftreeError
from graftree.v1.common_pb2 import Proposals
from speculator_service.drafters.base import DraftSession
from speculator_service.drawing import Drawing
from speculator_service.living_tree import LivingTree, Node


@dataclass(frozen=True, slots=True)
class Open:
    """A session begins with this tree."""

    session: DraftSession
    tree: LivingTree
    arrived_ns: int
    drawing: Drawing | None = None  # None: children are the drafter's best


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens were committed behind `committed_length` earlier ones. A budget of 0 is the open's."""

    session_id: str
    token_ids: tuple[int, ...]
    committed_length: int
    arrived_ns: int
    budget: int = 0
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """The session is to be forgotten."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Grown:
    """Nodes that entered a tree, parents before children; none where only the rest is news.

    `proposed` are nodes with what their children were drawn from. Times are nanoseconds: waiting for the first step,
    the last drafter call, and since the commit arrived.
    """

    session_id: str
    nodes: list[Node]
    committed_length: int
    complete: bool
    proposed: list[tuple[Node, Proposals]] = field(default_factory=list)
    queue_ns: int = 0
    forward_ns: int = 0
    total_ns: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A session that was given up."""

    session_id: str
    error: GraftreeError


Operation = Open | Commit | Close
Event = Grown | Failed

"""`BlockPool`: which blocks of a paged cache are free, who refers to the others, and what full ones hold.

A full block of committed rows can be published under a name that says what its tokens and all tokens before them
are. A later sequence that begins the same way refers to the same block (prefix caching in paged memory: vLLM,
SOSP'23, section 4.4). A published block to which nobody refers any more stays until its place is needed, least
recently used first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from graftree.errors import GraftreeError, ResourceExhausted


def block_names(before: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of a text: a chain of SHA-256, so equal names mean equal texts from the beginning.

    Args:
        before: name of the block before, or of the model where there is none.
        token_ids: tokens behind it.

    Returns:
        One name for each full block.
    """
    names = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        content = np.asarray(token_ids[start : start + block_size], dtype="<u4").tobytes()
        before = hashlib.sha256(before + content).digest()
        names.append(before)
    return names


class BlockPool:
    """Blocks are given out in one piece where there is one: rows that lie together are read without being gathered.

    Attributes:
        num_blocks: free, idle and used ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = np.ones(num_blocks, np.bool_)
        self._references: dict[int, int] = {}
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # published, referred to by nobody; least recently used first

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated, idle ones included."""
        return int(np.count_nonzero(self._free)) + len(self._idle)

    @property
    def idle_blocks(self) -> int:
        """Published blocks to which nobody refers."""
        return len(self._idle)

    def allocate(self, count: int, *, behind: int | None = None) -> list[int]:
        """Take `count` blocks, with a reference each. Idle ones lose their content where free ones do not suffice.

        Args:
            behind: the sequence's last block so far; the free ones that follow it are taken first.

        Raises:
            ResourceExhausted: fewer are free; none is taken.
        """
        if count > self.free_blocks:
            raise ResourceExhausted(f"{count} KV blocks wanted, {self.free_blocks} of {self.num_blocks} free")
        for block in list(self._idle)[: max(0, count - int(np.count_nonzero(self._free)))]:
            del self._idle[block]
            del self._named[self._names.pop(block)]
            self._free[block] = True
        blocks: list[int] = []
        if behind is not None:
            following = self._free[behind + 1 : behind + 1 + count]
            reach = len(following) if following.all() else int(np.argmin(following))
            blocks = list(range(behind + 1, behind + 1 + reach))
            self._free[blocks] = False
        blocks += self._one_piece(count - len(blocks))
        self._free[blocks] = False
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, names: Sequence[bytes]) -> list[int]:
        """The blocks published under the first of these names, up to one that is not known; a reference to each."""
        blocks = [self._named[name] for name in takewhile(self._named.__contains__, names)]
        for block in blocks:
            self._idle.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1
        return blocks

    def find(self, names: Sequence[bytes]) -> dict[bytes, int]:
        """The blocks that are published under any of these names; no reference to them is taken."""
        return {name: self._named[name] for name in names if name in self._named}

    def refer(self, blocks: Sequence[int]) -> None:
        """One more reference to blocks in use.

        Raises:
            GraftreeError: one is not.
        """
        self._expect_used(blocks)
        for block in blocks:
            self._references[block] += 1

    def publish(self, block: int, name: bytes) -> None:
        """Make a block in use known: it is full, and its rows never change again. A name that is taken stays.

        Raises:
            GraftreeError: the block is not in use.
        """
        self._expect_used([block])
        if name not in self._named and block not in self._names:
            self._named[name], self._names[block] = block, name

    def free(self, blocks: Sequence[int]) -> None:
        """Give a reference to each of a sequence's blocks back. Of those that become idle the last one goes first.

        Raises:
            GraftreeError: a block that is not in use, or named twice; none is given back.
        """
        self._expect_used(blocks)
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            if block in self._names:
                self._idle[block] = None
            else:
                self._free[block] = True

    def check(self) -> None:
        """Integrity: every block is free, idle or in use, exactly one of these, and names lead back to their blocks.

        Raises:
            GraftreeError: a block is lost, owned twice or wrongly named.
        """
        free, idle, used = set(np.flatnonzero(self._free).tolist()), set(self._idle), set(self._references)
        whole = len(free) + len(idle) + len(used) == self.num_blocks == len(free | idle | used)
        if not whole or not all(count > 0 for count in self._references.values()):
            raise GraftreeError(
                f"KV pool broken: {len(free)} free + {len(idle)} idle + {len(used)} used of {self.num_blocks} blocks"
            )
        if {name: block for block, name in self._names.items()} != self._named or not idle <= set(self._names):
            raise GraftreeError(f"KV pool broken: {len(self._named)} names of {len(self._names)} blocks")
        if free & set(self._names):
            raise GraftreeError("KV pool broken: a free block has a name")

    def _one_piece(self, count: int) -> list[int]:
        """The lowest `count` free blocks that follow each other, or just the lowest."""
        free = np.flatnonzero(self._free)
        ends = np.flatnonzero(np.diff(free, append=-1) != 1)
        starts = np.concatenate([[0], ends[:-1] + 1])
        long_enough = np.flatnonzero(ends - starts + 1 >= count)
        first = int(starts[long_enough[0]]) if len(long_enough) else 0
        found: list[int] = free[first : first + count].tolist()
        return found

    def _expect_used(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks) or not self._references.keys() >= set(blocks):
            raise GraftreeError("a KV block was named that is not in use, or twice")

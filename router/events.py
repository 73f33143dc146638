"""`EventLog`: a generation's events, written once, read by any number of streams from whichever token on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from graftree.errors import GraftreeError, InvalidArgument
from graftree.v1.generation_pb2 import GenerateResponse, GenerationChunk

Entry = tuple[GenerateResponse, tuple[str, ...]]  # an event and, of a chunk, the text of each of its tokens


class EventLog:
    """Append-only; at most one event per generated token and two more, so a slow reader costs a bounded amount."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._lengths: list[int] = []  # tokens of each sample
        self._readers: list[asyncio.Future[None]] = []
        self._error: GraftreeError | None = None
        self.ended = False

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, lengths: Sequence[int]) -> None:
        """There are so many samples, of which so many tokens are there or will be."""
        self._lengths = list(lengths)
        self._wake()

    def append(self, event: GenerateResponse, texts: Sequence[str] = ()) -> None:
        """Add an event; of a chunk with the text of each of its tokens."""
        self._entries.append((event, tuple(texts)))
        if event.HasField("chunk") and event.chunk.index < len(self._lengths):
            end = event.chunk.offset + len(event.chunk.token_ids)
            self._lengths[event.chunk.index] = max(self._lengths[event.chunk.index], end)
        self._wake()

    def end(self, error: GraftreeError | None = None) -> None:
        """Nothing follows; readers raise `error` behind the last event. The first end counts."""
        if not self.ended:
            self.ended, self._error = True, error
            self._wake()

    async def follow(self, after: Sequence[int] = ()) -> AsyncIterator[GenerateResponse]:
        """Every event from the first on.

        Args:
            after: for each sample the number of tokens to leave out; empty = none.

        Raises:
            InvalidArgument: a sample does not have so many.
            GraftreeError: the generation failed.
        """
        if after:
            while not self._lengths and not self.ended:
                await self._more()
            self._check(after)
        index = 0
        while True:
            while index < len(self._entries):
                entry, index = self._entries[index], index + 1
                if (event := _behind(entry, after)) is not None:
                    yield event
            if self.ended:
                if self._error is not None:
                    raise self._error
                return
            await self._more()

    def _check(self, after: Sequence[int]) -> None:
        for sample, (count, length) in enumerate(zip(after, self._lengths, strict=False)):
            check_resume(sample, count, length)

    async def _more(self) -> None:
        reader = asyncio.get_running_loop().create_future()
        self._readers.append(reader)
        await reader

    def _wake(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)


def check_resume(sample: int, count: int, length: int) -> None:
    """Raises InvalidArgument where a client says that it has more tokens of a sample than there are."""
    if count > length:
        raise InvalidArgument(f"resume_after[{sample}]", count, f"at most {length}, the tokens there are")


def _behind(entry: Entry, after: Sequence[int]) -> GenerateResponse | None:
    """What of an event lies behind the tokens that a client has; None = nothing."""
    event, texts = entry
    chunk = event.chunk
    if not event.HasField("chunk") or chunk.index >= len(after) or chunk.offset >= after[chunk.index]:
        return event
    known = after[chunk.index] - chunk.offset
    if known >= len(chunk.token_ids):
        return None
    rest = GenerationChunk(
        token_ids=chunk.token_ids[known:],
        text="".join(texts[known:]),
        log_probs=chunk.log_probs[known:],
        offset=after[chunk.index],
        index=chunk.index,
    )
    return GenerateResponse(chunk=rest)

"""`Answer`: folds the events of one request into chunks and, at its end, a `Result`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graftree.errors import GraftreeError, Unavailable
from graftree.sdk.results import Chunk, FinishReason, Result, SpeculationStats, Timings, TokenLogProb, Usage
from graftree.v1 import generation_pb2


@dataclass
class _Sample:
    """What has come of one sample. `position` and `characters` are where the stream that is read now stands."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    finished: generation_pb2.GenerationFinished | None = None
    length: int = 0  # characters of the text
    position: int = 0
    characters: int = 0

    def take(self, chunk: Chunk) -> Chunk | None:
        """What of a chunk is new; None = nothing."""
        if chunk.offset != self.position:
            raise GraftreeError(f"chunk for offset {chunk.offset} after {self.position} tokens")
        known = min(len(chunk.token_ids), len(self.token_ids) - self.position)
        if list(chunk.token_ids[:known]) != self.token_ids[self.position : self.position + known]:
            raise GraftreeError(
                f"the generation cannot be resumed: tokens from {self.position} on are others than before"
            )
        shown = min(len(chunk.text), self.length - self.characters)
        self.position += len(chunk.token_ids)
        self.characters += len(chunk.text)
        if known or shown:
            if known == len(chunk.token_ids) and shown == len(chunk.text):
                return None
            rest = (chunk.text[shown:], chunk.token_ids[known:], chunk.log_probs[known:])
            chunk = replace(chunk, text=rest[0], token_ids=rest[1], log_probs=rest[2], offset=chunk.offset + known)
        self.text.append(chunk.text)
        self.length += len(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.log_probs.extend(chunk.log_probs)
        return chunk


class Answer:
    """What has come of one request so far. `push` takes the events in order, of one stream or of several in turn.

    Args:
        sampled: whether tokens depend on the seed, so that a stream under another one does not fit.
    """

    def __init__(self, *, sampled: bool = True) -> None:
        self._sampled = sampled
        self.started: generation_pb2.GenerationStarted | None = None
        self._samples = [_Sample()]

    @property
    def token_counts(self) -> list[int]:
        """Tokens of each sample."""
        return [len(sample.token_ids) for sample in self._samples]

    def remember(self, recollection: generation_pb2.Recollection) -> None:
        """Say in `recollection` what is here of the generation, once it has started."""
        assert self.started is not None, "checked by the caller"
        recollection.seed = self.started.seed
        del recollection.samples[:]
        for sample in self._samples:
            recollection.samples.add().ids.extend(sample.token_ids)

    @property
    def complete(self) -> bool:
        """Whether every sample's last event is here."""
        return self.started is not None and all(sample.finished is not None for sample in self._samples)

    def resume(self, counts: Sequence[int]) -> None:
        """The next events are those of a stream that leaves out so many tokens of each sample."""
        self.repeat()
        for sample, count in zip(self._samples, counts, strict=False):
            if count:
                sample.position, sample.characters = len(sample.token_ids), sample.length

    def repeat(self) -> None:
        """The next events are those of a stream that begins at the beginning; what is here already is compared."""
        for sample in self._samples:
            sample.position = sample.characters = 0

    def push(self, event: generation_pb2.GenerateResponse) -> Chunk | None:
        """Take one event; returns what is new of the chunk it carries, if it is one."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._start(event.started)
        elif kind == "finished":
            sample = self._sample(event.finished.index)
            if sample.position < len(sample.token_ids):
                raise GraftreeError(
                    f"the generation cannot be resumed: it ends after {sample.position} tokens, "
                    f"{len(sample.token_ids)} are here"
                )
            sample.finished = sample.finished or event.finished
        elif kind == "chunk":
            chunk = Chunk.from_proto(event.chunk)
            return self._sample(chunk.index).take(chunk)
        return None

    def result(self) -> Result:
        """Raises: Unavailable where the stream ended before its last event."""
        first, *others = (self._result(index, sample) for index, sample in enumerate(self._samples))
        return replace(first, others=tuple(others))

    def _start(self, started: generation_pb2.GenerationStarted) -> None:
        count = max(1, started.n)
        if self.started is None:
            self._samples = [_Sample() for _ in range(count)]
            self.started = started
        elif (started.request_id, count) != (self.started.request_id, len(self._samples)) or (
            self._sampled and started.seed != self.started.seed
        ):
            raise GraftreeError("the generation cannot be resumed: the router began another one")

    def _sample(self, index: int) -> _Sample:
        if index >= len(self._samples):
            raise GraftreeError(f"sample {index} of {len(self._samples)}")
        return self._samples[index]

    def _result(self, index: int, sample: _Sample) -> Result:
        started, finished = self.started, sample.finished
        if started is None or finished is None:
            raise Unavailable(f"the answer broke off after {len(sample.token_ids)} tokens")
        return Result(
            text="".join(sample.text),
            token_ids=tuple(sample.token_ids),
            finish_reason=FinishReason.from_proto(finished.reason),
            usage=Usage(finished.usage.prompt_tokens, finished.usage.completion_tokens),
            speculation=SpeculationStats.from_proto(finished.speculation),
            timings=Timings.from_proto(finished.timings),
            log_probs=tuple(sample.log_probs),
            request_id=started.request_id,
            model=started.model,
            seed=(started.seed + index) % 2**64,
            prompt_token_ids=tuple(started.prompt_token_ids),
            stop_string=finished.stop_string if finished.HasField("stop_string") else None,
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
            index=index,
        )

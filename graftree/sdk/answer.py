"""`Answer`: folds the events of one request into chunks and, at its end, a `Result`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from graftree.errors import GraftreeError, Unavailable
from graftree.sdk.results import Chunk, FinishReason, Result, SpeculationStats, Timings, TokenLogProb, Usage
from graftree.v1 import generation_pb2


@dataclass
class _Sample:
    """What has come of one sample."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    finished: generation_pb2.GenerationFinished | None = None


class Answer:
    """What has come of one request so far. `push` takes the events in order."""

    def __init__(self) -> None:
        self.started: generation_pb2.GenerationStarted | None = None
        self._samples = [_Sample()]

    def push(self, event: generation_pb2.GenerateResponse) -> Chunk | None:
        """Take one event; returns the chunk it carries, if it is one."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self.started = event.started
            self._samples = [_Sample() for _ in range(max(1, event.started.n))]
        elif kind == "finished":
            self._sample(event.finished.index).finished = event.finished
        elif kind == "chunk":
            chunk = Chunk.from_proto(event.chunk)
            sample = self._sample(chunk.index)
            if chunk.offset != len(sample.token_ids):
                raise GraftreeError(f"chunk for offset {chunk.offset} after {len(sample.token_ids)} tokens")
            sample.text.append(chunk.text)
            sample.token_ids.extend(chunk.token_ids)
            sample.log_probs.extend(chunk.log_probs)
            return chunk
        return None

    def result(self) -> Result:
        """Raises: Unavailable where the stream ended before its last event."""
        first, *others = (self._result(index, sample) for index, sample in enumerate(self._samples))
        return replace(first, others=tuple(others))

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

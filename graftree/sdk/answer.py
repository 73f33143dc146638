"""`Answer`: folds the events of one generation into chunks and, at its end, a `Result`."""

from __future__ import annotations

from graftree.errors import GraftreeError, Unavailable
from graftree.sdk.results import Chunk, FinishReason, Result, SpeculationStats, Timings, TokenLogProb, Usage
from graftree.v1 import generation_pb2


class Answer:
    """What has come of one generation so far. `push` takes the events in order."""

    def __init__(self) -> None:
        self.started: generation_pb2.GenerationStarted | None = None
        self._finished: generation_pb2.GenerationFinished | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._log_probs: list[TokenLogProb] = []

    def push(self, event: generation_pb2.GenerateResponse) -> Chunk | None:
        """Take one event; returns the chunk it carries, if it is one."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self.started = event.started
        elif kind == "finished":
            self._finished = event.finished
        elif kind == "chunk":
            chunk = Chunk.from_proto(event.chunk)
            if chunk.offset != len(self._token_ids):
                raise GraftreeError(f"chunk for offset {chunk.offset} after {len(self._token_ids)} tokens")
            self._text.append(chunk.text)
            self._token_ids.extend(chunk.token_ids)
            self._log_probs.extend(chunk.log_probs)
            return chunk
        return None

    def result(self) -> Result:
        """Raises: Unavailable where the stream ended before its last event."""
        started, finished = self.started, self._finished
        if started is None or finished is None:
            raise Unavailable(f"the answer broke off after {len(self._token_ids)} tokens")
        return Result(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=FinishReason.from_proto(finished.reason),
            usage=Usage(finished.usage.prompt_tokens, finished.usage.completion_tokens),
            speculation=SpeculationStats.from_proto(finished.speculation),
            timings=Timings.from_proto(finished.timings),
            log_probs=tuple(self._log_probs),
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            prompt_token_ids=tuple(started.prompt_token_ids),
            stop_string=finished.stop_string if finished.HasField("stop_string") else None,
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        )

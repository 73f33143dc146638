"""`FakeGeneration`: a GenerationService that follows a script, to test clients without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
from grpc_status import rpc_status

from graftree.errors import GraftreeError
from graftree.rpc.status import to_status
from graftree.v1 import common_pb2, generation_pb2, generation_pb2_grpc

Responses = list[generation_pb2.GenerateResponse]


def script(pieces: list[tuple[str, list[int]]], seed: int = 5) -> Responses:
    """Started, one chunk per (text, token ids), finished."""
    responses = [
        generation_pb2.GenerateResponse(
            started=generation_pb2.GenerationStarted(
                request_id="r-1", model="fake", prompt_tokens=3, seed=seed, prompt_token_ids=[9, 8, 7]
            )
        )
    ]
    offset = 0
    for text, ids in pieces:
        log_probs = [
            common_pb2.TokenLogProb(
                token_id=each,
                log_prob=-0.5,
                rank=1,
                alternatives=[common_pb2.TokenLogProb.Alternative(token_id=each, log_prob=-0.5)],
            )
            for each in ids
        ]
        chunk = generation_pb2.GenerationChunk(token_ids=ids, text=text, log_probs=log_probs, offset=offset)
        responses.append(generation_pb2.GenerateResponse(chunk=chunk))
        offset += len(ids)
    finished = generation_pb2.GenerationFinished(
        reason=generation_pb2.FINISH_REASON_LENGTH,
        usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=offset),
        speculation=generation_pb2.SpeculationStats(
            num_spec_steps=len(pieces),
            num_draft_tokens=8,
            num_accepted_tokens=2,
            mean_acceptance_length=1.5,
            draft_acceptance_rate=0.25,
            acceptance_histogram=[1, 1],
            num_stale_nodes=1,
            num_speculators=2,
        ),
        timings=generation_pb2.RequestTimings(ttft_ns=1, decode_ns=2, total_ns=3, commit_ns=8),
    )
    responses.append(generation_pb2.GenerateResponse(finished=finished))
    return responses


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Serves `responses`, then raises `error` if there is one, then hangs if `endless` until the client is gone.

    Use as a context manager; `target` is its address, `requests` what came, `gone` is set when a call was cancelled.
    """

    def __init__(self, responses: Responses, error: GraftreeError | None = None, endless: bool = False) -> None:
        self.responses, self.error, self.endless = responses, error, endless
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.gone = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        """As the script says."""
        self.requests.append(generation_pb2.GenerateRequest.FromString(request.SerializeToString()))
        ended = threading.Event()

        def over() -> None:
            ended.set()
            if self.endless:  # which never ends by itself
                self.gone.set()

        context.add_callback(over)
        yield from self.responses
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(to_status(self.error)))
        if self.endless:
            ended.wait(timeout=60)

    def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> generation_pb2.GetModelInfoResponse:
        """A model with one pod."""
        pod = generation_pb2.GetModelInfoResponse.PodInfo(
            pod_id="v0", tier="verifier", kind="fake", address="127.0.0.1:1", state="ready", sessions=4
        )
        return generation_pb2.GetModelInfoResponse(
            model="fake",
            model_fingerprint="f",
            vocab_size=10,
            max_context=64,
            eos_token_ids=[2],
            has_chat_template=True,
            pods=[pod],
        )

    def __enter__(self) -> FakeGeneration:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait()

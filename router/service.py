"""`GenerationServicer`: the public service over `Generations`."""

from __future__ import annotations

from typing import Any

import grpc

from graftree.errors import GraftreeError
from graftree.rpc.status import abort
from graftree.text.tokenizer import Tokenizer
from graftree.v1 import generation_pb2 as pb
from graftree.v1 import generation_pb2_grpc
from router.edge import Edge
from router.generations import Generations
from router.metrics import Metrics
from router.pods import Pods

NO_DEADLINE_SECONDS = 1e8  # gRPC's own "never"


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """graftree.v1.GenerationService.

    Args:
        model: name that clients see.
    """

    def __init__(
        self,
        model: str,
        *,
        edge: Edge,
        generations: Generations,
        pods: Pods,
        tokenizer: Tokenizer,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._edge = edge
        self._generations = generations
        self._pods = pods
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        """Streams one generation; see protos/graftree/v1/generation.proto."""
        try:
            with (
                self._edge.visit("Generate", context) as visit,
                self._generations.start(request, visit.caller, remaining=_remaining(context)).reading() as events,
            ):
                async for event in events.follow(request.resume_after):
                    visit.passed(event)
                    await context.write(event)
        except GraftreeError as error:
            self._metrics.errors[error.reason] += 1
            await abort(context, error)

    async def GetModelInfo(
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        """The model and its limits (0 while no verifier has been seen), and the pods for those who may see them."""
        try:
            with self._edge.visit("GetModelInfo", context) as visit:
                return self._model_info(pods=visit.sees_pods)
        except GraftreeError as error:
            self._metrics.errors[error.reason] += 1
            await abort(context, error)

    def _model_info(self, *, pods: bool) -> pb.GetModelInfoResponse:
        identity = self._pods.identity
        return pb.GetModelInfoResponse(
            model=self._model,
            model_fingerprint=identity.model_fingerprint,
            vocab_size=identity.vocab_size,
            max_context=identity.max_context,
            eos_token_ids=self._tokenizer.eos_token_ids,
            has_chat_template=self._tokenizer.has_chat_template,
            pods=self._pods.infos() if pods else (),
        )


def _remaining(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until the caller's deadline; None without one."""
    seconds = context.time_remaining()
    return seconds if seconds is not None and seconds < NO_DEADLINE_SECONDS else None

"""What a client is told at the beginning and at the end of an answer."""

from __future__ import annotations

from graftree.v1 import generation_pb2 as pb
from router.caller import public_id
from router.figures import Figures
from router.request import GenerationPlan
from router.stops import Finish


def started(plan: GenerationPlan, model: str) -> pb.GenerateResponse:
    """The request is being served."""
    return pb.GenerateResponse(
        started=pb.GenerationStarted(
            request_id=public_id(plan.request_id),
            model=model,
            prompt_tokens=len(plan.prompt_token_ids),
            seed=plan.seed,
            prompt_token_ids=plan.prompt_token_ids if plan.echo_prompt_token_ids else (),
            n=plan.samples,
        )
    )


def finished(
    plan: GenerationPlan, finish: Finish, figures: Figures, speculation: pb.SpeculationStats, sample: int
) -> pb.GenerationFinished:
    """A sample has ended."""
    return pb.GenerationFinished(
        reason=finish.reason,
        usage=figures.usage(len(plan.prompt_token_ids)),
        speculation=speculation,
        timings=figures.timings(),
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        index=sample,
    )

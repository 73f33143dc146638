"""`Tools`: what the sessions of one router share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from graftree.config import RouterConfig
from graftree.observe.tracing import NO_TRACER, Tracer
from graftree.store.committer import Committer
from router.metrics import Metrics
from router.pods import Pods
from router.priors import Priors
from router.stops import TextSource


@dataclass(frozen=True)
class Tools:
    """See the module.

    Attributes:
        detokenizer: prompt ids -> where text comes from.
        random: for salts and jitter.
        priors: what sessions learn about speculators from one another.
        tracer: of the requests' spans.
        clock_ns: monotonic nanoseconds.
    """

    config: RouterConfig
    pods: Pods
    committer: Committer
    metrics: Metrics
    detokenizer: Callable[[Sequence[int]], TextSource]
    random: Random
    priors: Priors = field(default_factory=Priors)
    tracer: Tracer = NO_TRACER
    clock_ns: Callable[[], int] = time.monotonic_ns

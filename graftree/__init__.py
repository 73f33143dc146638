"""Graftree: an LLM's own answers, sooner, by token trees.

`Client`, `AsyncClient` and `LocalStack` are loaded on first use, so that `import graftree` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftree.client import AsyncClient, Client
    from graftree.local_stack import LocalStack
    from graftree.sdk.options import SpeculationOptions, StructuredOutput
    from graftree.sdk.reconnect import Reconnect
    from graftree.sdk.results import Chunk, FinishReason, Result

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "FinishReason",
    "LocalStack",
    "Reconnect",
    "Result",
    "SpeculationOptions",
    "StructuredOutput",
    "__version__",
]

_HOMES = {
    "AsyncClient": "graftree.client",
    "Chunk": "graftree.sdk.results",
    "Client": "graftree.client",
    "FinishReason": "graftree.sdk.results",
    "LocalStack": "graftree.local_stack",
    "Reconnect": "graftree.sdk.reconnect",
    "Result": "graftree.sdk.results",
    "SpeculationOptions": "graftree.sdk.options",
    "StructuredOutput": "graftree.sdk.options",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graftree' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

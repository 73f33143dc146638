"""Between the start of a step and the copying of its tokens to the host, nothing waits for the device.

On a GPU a value that Python looks at, or an operator whose result's size depends on values, stops the host until the
device has caught up. Which calls these are does not depend on the device, so a CPU shows them too. The attention here
is the one that reads everything from tensors; Triton's is launched likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graftree.models.load import load
from graftree.models.runner import TreeRunner
from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import TokenTree
from graftree.v1.common_pb2 import StructuredOutputParams
from tests.verifier_harness import LLAMA, Client, Router, chain
from verifier_service.engine import Engine

# Python looks at values, or its data become a tensor on the device by a copy from memory that is not pinned.
METHODS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
METHODS |= {"tensor", "as_tensor", "new_tensor"}
# The result's size, or the call itself, depends on values.
OPERATORS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"}


class Waited(AssertionError):
    """The host would have waited."""


class Methods(TorchFunctionMode):
    """Refuses METHODS until tokens are read back."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "cpu":
            self.reads += 1
        elif name in METHODS and not self.reads:
            raise Waited(name)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Refuses OPERATORS, and masks as indices, until tokens are read back."""

    def __init__(self, methods: Methods) -> None:
        super().__init__()
        self._methods = methods
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._methods.reads:
            self.seen += 1
            indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
            masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
            if name in OPERATORS or masked:
                raise Waited(f"{func} {'with a mask' if masked else ''}")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[tuple[Methods, Operators]]:
    methods = Methods()
    operators = Operators(methods)
    with methods, operators:
        yield methods, operators


def session(*, graphs: bool, params: SamplingParams, **fields: Any) -> Client:
    """One session on an engine that samples as on a GPU, its prompt computed and its steps recorded."""
    run = TreeRunner(load(LLAMA), kv_tokens=1024, implementation="static", graph_bytes=int(graphs))
    if run.graphs is not None:
        run.graphs.record_at = 1
    client = Router(Engine(run, max_sessions=4, step_tokens=64, sample_on_device=True)).open(
        "a", [1, 2, 3, 4], params=params, **fields
    )
    client.generate(3)
    client.verify(tree(client))
    return client


def tree(client: Client) -> TokenTree:
    return chain(client.root, [5, 6, 7])


PLAIN = {
    "greedy": GREEDY,
    "sampled": SamplingParams(seed=7),
    "filtered": SamplingParams(seed=7, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "processed": SamplingParams(
        seed=7, repetition_penalty=1.1, presence_penalty=0.2, logit_bias={3: 1.0}, bad_words_token_ids=((1,), (5, 6))
    ),
}


GRAMMAR = {"structured_output": StructuredOutputParams(regex="[a-z]{3,200}"), "stop_token_ids": [257]}


@pytest.mark.parametrize("name", PLAIN)
def test_a_step_under_a_grammar_waits_once(name: str) -> None:
    """So does one whose request says what its output must look like: no logits are read back."""
    client = session(graphs=True, params=PLAIN[name], **GRAMMAR)
    for tokens in ([97, 98, 99], [5, 6, 7]):  # what the grammar allows, and what it does not
        client.send(chain(client.root, tokens))
        with watched() as (methods, _):
            client.router.engine.iterate()
        client.router.engine.flush()
        assert client.take().token_ids
        assert methods.reads == 1


@pytest.mark.parametrize("graphs", [False, True], ids=["as it is", "recorded"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_step_waits_once(name: str, graphs: bool) -> None:
    """A step over a tree, its sampling included, runs until its tokens are read back, once, without one call that
    waits."""
    client = session(graphs=graphs, params=PLAIN[name])
    client.send(tree(client))
    with watched() as (methods, operators):
        client.router.engine.iterate()
    client.router.engine.flush()
    assert client.take().token_ids
    assert methods.reads == 1
    assert operators.seen > 20


def test_the_watch_sees_what_waits() -> None:
    """Each way to wait is noticed, so the other test proves something."""
    values = torch.arange(4)
    ways: list[Any] = [
        lambda: values[0].item(),
        lambda: values.tolist(),
        lambda: bool(values[0] > 1),
        lambda: int(values[0]),
        lambda: values.nonzero(),
        lambda: values[values > 1],
        lambda: values.masked_select(values > 1),
        lambda: values.numpy(),
        lambda: torch.tensor([1, 2]),
        lambda: torch.equal(values, values),
    ]
    for way in ways:
        with pytest.raises(Waited), watched():
            way()

"""What a router may send wrong, and what it costs: that tree, that step or that session (trials 14, 23, 24)."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import MAX_TREE_DEPTH, MAX_TREE_NODES, TokenTree
from graftree.v1 import common_pb2, verification_pb2
from tests.verifier_harness import Router, chain, greedy, make_engine

PROMPT = list(range(3, 20))
CODES = {code: code.value[0] for code in grpc.StatusCode}


def wire(tokens: list[int], parents: list[int], log_probs: list[float] | None = None) -> dict[str, Any]:
    return {"token_ids": tokens, "parents": parents, "log_probs": log_probs or []}


MALFORMED: dict[str, dict[str, Any]] = {
    "forward parent": wire([1, 2, 3], [1, -1, 0]),
    "cycle": wire([1, 2], [1, 0]),
    "its own parent": wire([1, 2], [-1, 1]),
    "missing parent": wire([1, 2], [-1, 7]),
    "parent below -1": wire([1, 2], [-1, -2]),
    "one parent short": wire([1, 2], [-1]),
    "duplicate sibling": wire([1, 2, 2], [-1, 0, 0]),
    "id at the vocabulary's end": wire([512], [-1]),
    "id of 32 bits": wire([2**32 - 1], [-1]),
    "too deep": wire([1] * (MAX_TREE_DEPTH + 1), list(range(-1, MAX_TREE_DEPTH))),
    "more nodes than announced": wire(list(range(129)), [-1] * 129),
    "more nodes than ever allowed": wire([1] * (MAX_TREE_NODES + 1), list(range(-1, MAX_TREE_NODES))),
    "NaN log-prob": wire([1, 2], [-1, 0], [-1.0, math.nan]),
    "infinite log-prob": wire([1], [-1], [-math.inf]),
    "positive log-prob": wire([1], [-1], [0.5]),
    "one log-prob short": wire([1, 2], [-1, 0], [-1.0]),
}


@pytest.mark.parametrize("tree", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_tree_costs_that_tree(tree: dict[str, Any]) -> None:
    """Trial 14: the step runs plain, says why, is counted; the session next to it and the next tree are fine."""
    truth = greedy(PROMPT, 12)
    router = Router(make_engine())
    bad, good = router.open("bad", PROMPT), router.open("good", PROMPT)
    bad.send(common_pb2.TokenTree(root_id=bad.root, **tree))
    good.send(chain(good.root, truth[:3]))
    router.run()
    verdict = bad.take()
    assert verdict.tree_error
    assert list(verdict.token_ids) == truth[:1]
    assert list(good.take().token_ids) == truth[:4]
    assert router.engine.counters.invalid_trees == 1
    verdict = bad.verify(chain(bad.root, truth[1:4]))
    assert not verdict.tree_error
    assert list(verdict.token_ids) == truth[1:5]
    assert not router.failures


def test_no_nodes_and_no_log_probs_are_fine() -> None:
    """Trial 14: an empty tree is plain decoding; log probabilities may be left out."""
    truth = greedy(PROMPT, 5)
    client = Router(make_engine()).open("a", PROMPT)
    assert client.verify(common_pb2.TokenTree(root_id=client.root)).tree_error == ""
    tree = common_pb2.TokenTree(root_id=client.root, token_ids=truth[1:3], parents=[-1, 0])
    assert list(client.verify(tree).token_ids) == truth[1:4]
    client.steps += 1
    step = verification_pb2.VerifyStep(session_id="a", step=client.steps, committed_length=len(client.token_ids))
    client.router.engine.step(client.router.stream, step, arrived_ns=0)
    client.router.run()
    assert list(client.take().token_ids) == truth[4:5]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 600), max_size=12),
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 12), max_size=12),
    st.lists(st.floats(width=32), max_size=12),
)
def test_no_tree_breaks_the_engine(tokens: list[int], parents: list[int], log_probs: list[float]) -> None:
    """Whatever bytes decode to: one verdict, the right token, nothing raised."""
    client = shared_router().open("fuzz", PROMPT)
    tree = common_pb2.TokenTree(root_id=client.root, token_ids=tokens, parents=parents, log_probs=log_probs)
    assert client.verify(tree).token_ids[0] == FIRST[0]
    client.router.engine.close(client.router.stream, "fuzz")
    assert not client.router.failures


FIRST = greedy(PROMPT, 1)
_ROUTERS: list[Router] = []


def shared_router() -> Router:
    if not _ROUTERS:
        _ROUTERS.append(Router(make_engine()))
    return _ROUTERS[0]


@pytest.mark.parametrize("wrong", ["root", "length", "future"])
def test_a_step_for_another_root_is_stale(wrong: str) -> None:
    """Trial 23: nothing is run, the verdict says stale, it is counted; the right step then works."""
    truth = greedy(PROMPT, 4)
    router = Router(make_engine())
    client = router.open("a", PROMPT)
    client.verify()
    old, rows = client.root, router.engine.counters.rows
    if wrong == "root":
        client.send(chain(old ^ 1, truth[1:3]))
    elif wrong == "length":
        client.send(chain(old, truth[1:3]), committed_length=len(PROMPT))
    else:
        client.send(chain(old, truth[1:3]), committed_length=len(PROMPT) + 2)
    router.run()
    verdict = client.take()
    assert verdict.stale
    assert not verdict.token_ids
    assert router.engine.counters.stale_steps == 1
    assert router.engine.counters.rows == rows
    assert list(client.verify(chain(old, truth[1:3])).token_ids) == truth[1:4]


OPENS: list[tuple[str, dict[str, Any], str, grpc.StatusCode]] = [
    ("no tokens", {"token_ids": []}, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
    ("id at the vocabulary's end", {"token_ids": [1, 512]}, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
    ("prompt longer than tokens", {"prompt_tokens": 18}, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
    ("limit above the context", {"max_length": 257}, "CONTEXT_TOO_LONG", grpc.StatusCode.INVALID_ARGUMENT),
    ("no room behind the prompt", {"max_length": 17}, "CONTEXT_TOO_LONG", grpc.StatusCode.INVALID_ARGUMENT),
    ("no limit", {"max_length": 0}, "CONTEXT_TOO_LONG", grpc.StatusCode.INVALID_ARGUMENT),
    ("too many nodes", {"max_nodes": 1025}, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
    ("too many alternatives", {"alternatives": 21}, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
    ("no id", {"session_id": ""}, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
    (
        "temperature",
        {"sampling": SamplingParams(temperature=-1.0).to_proto()},
        "INVALID_ARGUMENT",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "no seed",
        {"sampling": SamplingParams(temperature=1.0).to_proto()},
        "INVALID_ARGUMENT",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "every token banned",
        {"stop_token_ids": range(512), "min_new_tokens": 1},
        "INVALID_ARGUMENT",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
]


@pytest.mark.parametrize(("fields", "reason", "code"), [row[1:] for row in OPENS], ids=[row[0] for row in OPENS])
def test_a_bad_open_fails_that_session(fields: dict[str, Any], reason: str, code: grpc.StatusCode) -> None:
    """The failure names the reason; nothing is reserved; the neighbour does not notice."""
    router = Router(make_engine())
    message = {
        "session_id": "a",
        "token_ids": PROMPT,
        "prompt_tokens": len(PROMPT),
        "sampling": GREEDY.to_proto(),
        "max_length": 100,
        "max_nodes": 8,
    } | fields
    router.engine.open(router.stream, verification_pb2.VerifyOpen(**message))
    other = router.open("other", PROMPT)
    other.verify()
    (failure,) = router.failures
    assert (failure.session_id, failure.reason, failure.code) == (message["session_id"], reason, CODES[code])
    assert router.engine.sessions == 1
    assert router.engine.counters.refused == 1


def test_too_long_says_both_numbers() -> None:
    """Trial 28: what was asked and what is possible."""
    router = Router(make_engine())
    router.open("a", PROMPT, max_length=300)
    router.open("b", PROMPT, max_length=12)
    router.run()
    assert "300" in router.failures[0].message
    assert "256" in router.failures[0].message
    assert "17" in router.failures[1].message
    assert "12" in router.failures[1].message


def test_unknown_session() -> None:
    """A step for a session that is not there is answered with NOT_FOUND."""
    router = Router(make_engine())
    client = router.open("a", PROMPT)
    client.send(session_id="b")
    router.engine.flush()
    assert [(f.session_id, f.reason) for f in router.failures] == [("b", "NOT_FOUND")]
    assert client.session_id in router.stream.sessions


def test_a_second_step_in_flight_fails_the_session() -> None:
    """A router that does not wait for its verdict loses that session, and its blocks come back."""
    engine = make_engine()
    router = Router(engine)
    free = engine.load().free_blocks
    client, other = router.open("a", PROMPT), router.open("b", PROMPT)
    client.send()
    client.send()
    other.send()
    router.run()
    assert [(f.session_id, f.reason) for f in router.failures] == [("a", "INVALID_ARGUMENT")]
    assert list(other.take().token_ids) == FIRST
    engine.close(router.stream, "b")
    assert engine.load().free_blocks == free


def test_a_second_open_fails_the_session() -> None:
    """An id names one session; the failure ends it, and then the id is free again."""
    router = Router(make_engine())
    router.open("a", PROMPT)
    router.open("a", PROMPT)
    router.run()
    assert [(f.session_id, f.reason) for f in router.failures] == [("a", "ALREADY_EXISTS")]
    assert router.engine.sessions == 0
    assert list(router.open("a", PROMPT).verify().token_ids) == FIRST


def test_streams_do_not_see_each_others_sessions() -> None:
    """The same id on two streams is two sessions; one stream's end takes only its own."""
    engine = make_engine()
    first, second = Router(engine), Router(engine)
    one, two = first.open("a", PROMPT), second.open("a", [5, 6])
    one.verify()
    engine.close_stream(first.stream)
    assert list(two.verify().token_ids) == greedy([5, 6], 1)
    engine.open(first.stream, verification_pb2.VerifyOpen(session_id="late"))
    one.send()
    first.run()
    assert (first.verdicts, first.failures) == ([], [])
    assert engine.sessions == 1


def test_a_model_that_raises_fails_its_batch_only() -> None:
    """INTERNAL for the sessions in that forward; sessions opened later are served."""
    engine = make_engine()
    router = Router(engine)
    free = engine.load().free_blocks
    router.open("a", PROMPT).send()
    runner: Any = engine._runner
    forward, runner.forward = runner.forward, lambda batch: 1 / 0
    router.run()
    runner.forward = forward
    assert [(f.session_id, f.reason) for f in router.failures] == [("a", "INTERNAL")]
    assert engine.load().free_blocks == free
    assert list(router.open("b", PROMPT).verify().token_ids) == FIRST


def test_logits_that_are_not_finite_fail_one_session() -> None:
    """A diverged row costs its session; its neighbour in the same forward gets its token."""
    router = Router(make_engine())
    runner: Any = router.engine._runner
    forward = runner.forward

    def broken(batch: list[Any]) -> list[Any]:
        outputs = forward(batch)
        outputs[0] = outputs[0] * math.nan
        return outputs

    runner.forward = broken
    router.open("a", PROMPT).send()
    other = router.open("b", PROMPT)
    other.send()
    router.run()
    assert [(f.session_id, f.reason) for f in router.failures] == [("a", "INTERNAL")]
    assert list(other.take().token_ids) == FIRST


def test_the_tree_is_never_trusted_beyond_its_session() -> None:
    """A tree within the wire's limits but above what the session announced is left out."""
    client = Router(make_engine()).open("a", PROMPT, max_nodes=2)
    verdict = client.verify(TokenTree(client.root, (1, 2, 3), (-1, -1, -1), (-1.0,) * 3))
    assert "at most 2 nodes" in verdict.tree_error

"""Structured output on the verifier: the same tokens whatever is drafted, from wherever a session is taken up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import TokenTree
from graftree.v1.common_pb2 import StructuredOutputParams
from tests.verifier_harness import LLAMA, Client, Router, TreeMaker, chain, make_engine

PROMPT = list(range(3, 20))
EOS = 257
PADDED = LLAMA + "&padded=40"
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer",'
    ' "minimum": 0, "maximum": 99}}, "required": ["name", "n"], "additionalProperties": false}'
)
OBJECT = StructuredOutputParams(json_schema=SCHEMA, disable_any_whitespace=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5)


def open_session(router: Router, name: str = "s", tokens: list[int] = PROMPT, **fields: Any) -> Client:
    fields = {
        "prompt_tokens": len(PROMPT),
        "structured_output": OBJECT,
        "stop_token_ids": [EOS],
        "log_probs": True,
    } | fields
    return router.open(name, tokens, **fields)


def finish(client: Client, make_tree: TreeMaker | None = None) -> list[int]:
    """Verify until the session's EOS; what lies behind it is cut, as the router does."""
    start = len(client.token_ids)
    while EOS not in client.token_ids[start:]:
        client.verify(make_tree(client.token_ids, client.root) if make_tree else None)
        assert len(client.token_ids) < 200
    client.router.engine.close(client.router.stream, client.session_id)
    output = client.token_ids[start:]
    return output[: output.index(EOS) + 1]


def bushy(answer: list[int], seed: int) -> TreeMaker:
    """Trees that hold the answer's next tokens, tokens behind EOS among them, and wrong siblings before each."""
    source = random.Random(seed)

    def make(token_ids: list[int], root: int) -> TokenTree:
        rest = [*answer[len(token_ids) - len(PROMPT) :], EOS, EOS, 7, 7][: source.randrange(9)]
        tokens, parents, parent = list[int](), list[int](), -1
        for token in rest:
            wrong = [t for t in source.sample(range(512), 2) if t != token]
            tokens += [*wrong, token]
            parents += [parent] * (len(wrong) + 1)
            parent = len(tokens) - 1
        return TokenTree(root, tuple(tokens), tuple(parents), (-0.5,) * len(tokens))

    return make


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("uri", [LLAMA, PADDED], ids=["plain", "padded"])
def test_trees_change_nothing(params: SamplingParams, uri: str) -> None:
    """Plain decoding and random trees give the same tokens, and trees that are right are accepted."""
    router = Router(make_engine(uri))
    wanted = finish(open_session(router, "plain", params=params))
    assert wanted[-1] == EOS
    for seed in range(4):
        client = open_session(router, f"trees {seed}", params=params)
        assert finish(client, bushy(wanted, seed)) == wanted
        assert client.steps < len(wanted)


def test_taken_up_anywhere() -> None:
    """A session that is opened with part of the output goes on as the one that was lost would have."""
    router = Router(make_engine())
    wanted = finish(open_session(router, "first", params=SAMPLED))
    for cut in range(len(wanted)):
        client = open_session(router, f"from {cut}", [*PROMPT, *wanted[:cut]], params=SAMPLED)
        assert wanted[:cut] + finish(client, bushy(wanted, cut)) == wanted


def test_an_output_that_breaks_the_constraint_is_refused() -> None:
    """No session is opened with it."""
    router = Router(make_engine())
    open_session(router, tokens=[*PROMPT, ord("x")])
    router.run()
    assert [(f.reason, f.message) for f in router.failures] == [
        ("INVALID_ARGUMENT", "structured_output = 'token 120': output that the constraint allows")
    ]
    assert router.engine.sessions == 0


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (StructuredOutputParams(), "structured_output"),
        (StructuredOutputParams(json_schema='{"type": "foo"}'), "structured_output.json_schema"),
        (StructuredOutputParams(regex="("), "structured_output.regex"),
        (StructuredOutputParams(grammar="start: foo"), "structured_output.grammar"),
    ],
)
def test_a_bad_constraint_fails_its_session(message: StructuredOutputParams, field: str) -> None:
    """With INVALID_ARGUMENT and the field; the other session of the stream goes on."""
    router = Router(make_engine())
    open_session(router, "bad", structured_output=message)
    router.run()
    assert [f.session_id for f in router.failures] == ["bad"]
    assert router.failures[0].reason == "INVALID_ARGUMENT"
    assert router.failures[0].message.startswith(field)
    assert finish(open_session(router, "good"))[-1] == EOS


def test_nothing_left_to_say() -> None:
    """min_new_tokens beyond the longest text: an error at the first token that cannot be, not before, and the run
    that leads there is the one of plain decoding."""
    word = StructuredOutputParams(choice=StructuredOutputParams.Choice(options=["abc"]))
    said = [*b"abc"]
    for tree in (False, True):
        router = Router(make_engine())
        bias = SamplingParams(temperature=0.0, logit_bias={ord("a"): 100.0, ord("b"): 100.0, ord("c"): 100.0})
        client = open_session(router, structured_output=word, min_new_tokens=9, params=bias)
        output: list[int] = []
        while not router.failures:
            client.send(chain(client.root, [*said, EOS, EOS][len(output) :]) if tree else None)
            router.run()
            if not router.failures:
                output += client.take().token_ids
        assert output == said
        assert client.steps == (2 if tree else 4)
        assert router.failures[0].message.startswith("structured_output = 'no token is left to choose'")


def test_log_probs_are_the_models_own() -> None:
    """The constraint does not change what the model thought of a token."""
    router = Router(make_engine())
    free = router.open("free", PROMPT, log_probs=True, alternatives=20, prompt_tokens=len(PROMPT))
    bound = open_session(router, "bound", alternatives=20)
    first, second = free.verify().log_probs[0], bound.verify().log_probs[0]
    ids = [[each.token_id for each in said.alternatives] for said in (first, second)]
    assert ids[0] == ids[1]
    # The second prompt was computed behind a shared prefix: equal up to the rounding of sums.
    assert [each.log_prob for each in first.alternatives] == pytest.approx(
        [each.log_prob for each in second.alternatives], abs=1e-4
    )
    assert second.rank > 1
    assert second.token_id == ord("{")

"""Trees of every shape, pods that misbehave and clients that leave: a whole stack says what plain decoding says."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from graftree import Client, LocalStack
from graftree.errors import AlreadyExists, Incompatible, InvalidArgument
from graftree.sdk.options import SpeculationOptions
from graftree.sdk.results import Result
from tests.drafters import GARBAGE, SCRIPTS, spec

MODEL = "random:llama?layers=1&seed=3&scale=3"
PROMPT = [5, 17, 250, 33, 17]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 7}]
PATIENT = {"adaptive": False, "draft_wait_ms": 1000.0, "tree_budget": 128, "tree_depth": 16}
LARGE = {"max_nodes": 256, "max_depth": 16, "branching": 64}
PLAIN = SpeculationOptions(off=True)

Tree = dict[Any, Any]


def path_tree(tokens: Sequence[int], siblings: int, place: int | None = None) -> Tree:
    """The path `tokens`, at every level among `siblings` wrong children: behind `place` of them, None = the last."""
    below: Tree = {}
    for token in reversed(tokens):
        children = [((token + 1 + i) % 256, {}) for i in range(siblings)]
        children.insert(siblings if place is None else place, (token, below))
        below = dict(children)
    return below


def key(tokens: Sequence[int]) -> str:
    """A text that ends in `tokens`, as `SCRIPTS` names it."""
    return " ".join(map(str, tokens))


def undrafted() -> LocalStack:
    """A stack without speculators, whose steps wait for the first draft of one that is added."""
    return LocalStack(MODEL, [], in_process=True, threads=1, router_options=PATIENT)


def add_script(stack: LocalStack, script: Tree) -> None:
    """Add a speculator that drafts `script` and nothing else."""
    SCRIPTS["faults"] = script
    stack.add("speculator", "tests.drafters:Scripted?name=faults", **LARGE)


def agree(result: Result, plain: Result) -> None:
    """Tokens, text, end, usage and log probabilities are plain decoding's."""
    assert result.token_ids == plain.token_ids
    assert (result.text, result.finish_reason, result.usage) == (plain.text, plain.finish_reason, plain.usage)
    assert [each.log_prob for each in result.log_probs] == pytest.approx(
        [each.log_prob for each in plain.log_probs], abs=1e-3
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_trees_of_every_size_and_shape(sampling: dict[str, Any]) -> None:
    """Trials 11, 12, 13: the right child is the last of 16 at every level; 1 to 128 nodes alone, shapes together."""
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "log_probs": True, **sampling}
    prompts = [[*PROMPT, i] for i in range(6)]
    with undrafted() as stack, Client(stack.target) as client:
        plain = [client.generate(token_ids=prompt, speculation=PLAIN, **options) for prompt in prompts]
        add_script(stack, {key(p): path_tree(r.token_ids, 15) for p, r in zip(prompts, plain, strict=True)})

        def drafted(index: int, size: int) -> Result:
            speculation = SpeculationOptions(max_nodes=size)
            result = client.generate(token_ids=prompts[index], speculation=speculation, **options)
            agree(result, plain[index])
            return result

        for size in (1, 2, 31, 32, 33, 63, 64, 65, 128):
            figures = drafted(0, size).speculation
            assert figures.num_draft_tokens <= size * figures.num_spec_steps
            assert figures.num_draft_tokens >= size
            assert (figures.num_accepted_tokens > 0) == (size > 15)
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(drafted, range(6), (0, 1, 7, 64, 128, 33)))
        assert results[0].speculation.num_draft_tokens == 0
        assert all(result.speculation.num_accepted_tokens > 0 for result in results[3:])


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("place", [0, 1, None], ids=["first", "middle", "last"])
def test_the_right_branch_anywhere(place: int | None, sampling: dict[str, Any]) -> None:
    """Trial 11: wherever the accepted branch stands among its siblings, 50 more tokens follow from its KV rows."""
    options: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 60, "ignore_eos": True, **sampling}
    with undrafted() as stack, Client(stack.target) as client:
        plain = client.generate(speculation=PLAIN, **options)
        add_script(stack, {key(PROMPT): path_tree(plain.token_ids[:10], 2, place)})  # then 50 without a draft
        result = client.generate(**options)
    agree(result, plain)
    assert result.speculation.num_accepted_tokens > 0


def _flat(prompt: Sequence[int], out: Sequence[int]) -> Tree:
    return {key([*prompt, *out[:i]]): path_tree([out[i]], 3) for i in range(len(out))}


def _chain(prompt: Sequence[int], out: Sequence[int]) -> Tree:
    return {key(prompt): path_tree(out, 0)}


def _single(prompt: Sequence[int], out: Sequence[int]) -> Tree:
    return {"": {out[10]: {}}}


def _every_other(prompt: Sequence[int], out: Sequence[int]) -> Tree:
    return {key([*prompt, *out[:i]]): {out[i]: {}} for i in range(0, len(out), 4)}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [_flat, _chain, _single, _every_other])
def test_degenerate_trees(shape: Callable[..., Tree], sampling: dict[str, Any]) -> None:
    """Trial 15: depth 1 and four wide, a pure chain, a single node, and rounds without any draft in between."""
    options: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True, **sampling}
    with undrafted() as stack, Client(stack.target) as client:
        plain = client.generate(speculation=PLAIN, **options)
        add_script(stack, shape(PROMPT, list(plain.token_ids)))
        result = client.generate(**options)
    agree(result, plain)
    assert result.speculation.num_draft_tokens > 0


def test_malformed_drafts_reach_nobody() -> None:
    """Trials 14 and 24: beside a good SSM one drafter after the other answers with garbage, crashes or sleeps."""
    options: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 16, "ignore_eos": True}
    bad = [spec("Garbage", kind=kind) for kind in (*GARBAGE, "short", "huge")]
    bad += [spec("Crash", where=where) for where in ("open", "expand", "commit", "close")]
    bad.append(spec("Slow", seconds="0.2"))
    with (
        LocalStack(MODEL, [f"model:{MODEL}"], in_process=True, threads=1, router_options=PATIENT) as stack,
        Client(stack.target) as client,
    ):
        plain = client.generate(speculation=PLAIN, **options)
        accepted = 0
        for drafter in bad:
            index = stack.add("speculator", drafter)
            result = client.generate(**options)
            agree(result, plain)
            accepted += result.speculation.num_accepted_tokens
            stack.kill("speculator", index)
        assert accepted > 0
        agree(client.generate(**options), plain)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_up_to_the_context_limit(sampling: dict[str, Any]) -> None:
    """Trials 16 and 17: prompts up to the limit end with `length`; an SSM of shorter context drafts where it can."""
    llm, ssm = f"{MODEL}&context=64", f"{MODEL}&context=32"
    with (
        LocalStack(
            llm, [f"model:{llm}", f"model:{ssm}"], in_process=True, threads=1, router_options=PATIENT
        ) as stack,
        Client(stack.target) as client,
    ):
        for length in (8, 31, 32, 40, *range(56, 64)):
            options: dict[str, Any] = {"token_ids": [i * 7 % 250 for i in range(length)], "ignore_eos": True}
            plain = client.generate(speculation=PLAIN, **options, **sampling)
            result = client.generate(**options, **sampling)
            agree(result, plain)
            assert (result.finish_reason, len(result.token_ids)) == ("length", 64 - length)
        with pytest.raises(InvalidArgument, match="64"):
            client.generate(token_ids=[1] * 64)


def test_a_prompt_beyond_the_ssms_context_is_decoded_plainly() -> None:
    """Trial 17: SSM context 64, LLM 256, prompt 100."""
    options: dict[str, Any] = {"token_ids": [i * 7 % 250 for i in range(100)], "max_new_tokens": 20}
    with (
        LocalStack(f"{MODEL}&context=256", [f"model:{MODEL}&context=64"], in_process=True, threads=1) as stack,
        Client(stack.target) as client,
    ):
        plain = client.generate(speculation=PLAIN, **options)
        result = client.generate(**options)
        agree(result, plain)
        assert result.speculation.num_draft_tokens == 0
        assert {pod.state for pod in client.model_info().pods} == {"ready"}


@pytest.mark.parametrize("padded", ["llm", "ssm"])
def test_padded_vocabularies_work(padded: str) -> None:
    """Trial 18: further rows of the embedding, on either side, are no other vocabulary."""
    wide = f"{MODEL}&padded=64"
    llm, ssm = (wide, MODEL) if padded == "llm" else (MODEL, wide)
    options: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 24, "ignore_eos": True}
    with (
        LocalStack(llm, [f"model:{ssm}"], in_process=True, threads=1, router_options=PATIENT) as stack,
        Client(stack.target) as client,
    ):
        plain = client.generate(speculation=PLAIN, **options)
        result = client.generate(**options)
    agree(result, plain)
    assert result.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("ssm", [f"{MODEL}&permute=1", "random:llama?layers=1&vocab=300"])
def test_other_vocabularies_are_refused(ssm: str) -> None:
    """Trial 18: permuted ids and other tokenizers, at registration, with the reason."""
    with (
        pytest.raises(Incompatible, match="vocabulary"),
        LocalStack(MODEL, [f"model:{ssm}"], in_process=True, threads=1),
    ):
        pass


def test_identical_ids_at_once() -> None:
    """Requests with one id at once are one generation; another request under that id is refused."""
    options: dict[str, Any] = {"token_ids": PROMPT, "temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    with LocalStack(MODEL, ["ngram"], in_process=True, threads=1) as stack, Client(stack.target) as client:
        name = str(uuid.uuid4())
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda _: client.generate(request_id=name, **options), range(6)))
        assert len({result.token_ids for result in results}) == 1
        with pytest.raises(AlreadyExists):
            client.generate(request_id=name, **{**options, "max_new_tokens": 4})


def test_a_cancelled_session_leaves_no_ghost() -> None:
    """Trial 20, 21: a speculator for one session is free for the next request, however often one is cancelled."""
    model = "random:llama?layers=1&seed=3&scale=3&context=2048"
    options: dict[str, Any] = {"token_ids": [5, 17, 250, 33, 17], "ignore_eos": True}
    with (
        LocalStack(
            model,
            [f"model:{model}"],
            in_process=True,
            threads=1,
            router_options={"adaptive": False, "draft_wait_ms": 200},
            speculator_options={"max_sessions": 1},
        ) as stack,
        Client(stack.target) as client,
    ):
        for _ in range(5):
            with client.stream(max_new_tokens=1500, **options) as stream:
                next(iter(stream))
            deadline = time.monotonic() + 30
            while any(pod.sessions for pod in client.model_info().pods):
                assert time.monotonic() < deadline, client.model_info().pods
                time.sleep(0.02)
            # A load sent before the close may still come; the next one, 0.2 s later at most, corrects it.
            answers = (client.generate(max_new_tokens=400, **options) for _ in range(20))
            assert any(answer.speculation.num_draft_tokens > 0 for answer in answers)

"""Acceptance modes in the router: what pods are told, how proposals stay whole, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from graftree.errors import InvalidTree
from graftree.sdk.options import Mode, SpeculationOptions
from graftree.tree import node_id, root_id
from graftree.v1 import common_pb2
from graftree.v1.speculation_pb2 import TreeDelta
from router.budget import FixedBudget
from router.merge import MergedTree
from tests.fakes import VOCAB, FakeSpeculator, FakeVerifier, chain, plain
from tests.router_harness import PROMPT, harness, until

SALT = 9
ROOT = root_id(SALT, PROMPT)
MSS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "speculation": SpeculationOptions(mode="mss")}
IDENTIFIER = "12345678-1234-1234-1234-123456789abc"


def q(*ids: int, count: int = 2) -> common_pb2.Proposals:
    return common_pb2.Proposals(ids=ids, weights=[1.0 / (1 + rank) for rank in range(len(ids))], count=count)


def delta(paths: Sequence[tuple[int, ...]], proposals: dict[tuple[int, ...], common_pb2.Proposals]) -> TreeDelta:
    message = TreeDelta()
    for path in paths:
        message.parent_ids.append(at(path[:-1]))
        message.token_ids.append(path[-1])
        message.log_probs.append(-0.5)
    for path, offer in proposals.items():
        message.proposals.add(node_id=at(path), proposals=offer)
    return message


def at(path: Sequence[int]) -> int:
    identifier = ROOT
    for token in path:
        identifier = node_id(identifier, token)
    return identifier


def tree(**options: Any) -> MergedTree:
    return MergedTree(ROOT, vocab_size=50, max_nodes=8, max_depth=8, **{"tests_draws": True, **options})


def offers(merged: MergedTree, budget: int = 10) -> list[tuple[int, int, list[int]]]:
    """(node, salt, ids of q) of all that goes to the verifier."""
    cut = merged.cut(FixedBudget(budget), 8).tree
    return [(entry.node, entry.salt, list(entry.proposals.ids)) for entry in merged.proposals(cut)]


# --- the merged tree


def test_a_kept_node_keeps_its_proposals_whole() -> None:
    """Also where the budget cut all its children; those of nodes that were cut stay here."""
    merged = tree()
    merged.add("a", delta([(1,), (2,), (1, 3)], {(): q(1, 2), (1,): q(3, 4)}), salt=7)
    assert offers(merged) == [(-1, 7, [1, 2]), (0, 7, [3, 4])]
    assert offers(merged, budget=1) == [(-1, 7, [1, 2]), (0, 7, [3, 4])]
    assert offers(merged, budget=0) == [(-1, 7, [1, 2])]


def test_proposals_follow_re_rooting() -> None:
    """What was drawn at a surviving node is there when it is the root; the rest is gone."""
    merged = tree()
    merged.add("a", delta([(1,), (2,), (1, 3)], {(): q(1, 2), (1,): q(3), (2,): q(4), (1, 3): q(5)}), salt=7)
    merged.reroot([1])
    assert offers(merged) == [(-1, 7, [3]), (0, 7, [5])]
    merged.reroot([9])
    assert offers(merged) == []


def test_the_first_word_counts() -> None:
    """A delta that comes again, or another list for the same node, adds no draws; another opening's are its own."""
    merged = tree()
    message = delta([(1,)], {(): q(1, 2)})
    merged.add("a/1", message, salt=7)
    merged.add("a/1", message, salt=7)
    merged.add("a/1", delta([], {(): q(3)}), salt=7)
    assert offers(merged) == [(-1, 7, [1, 2])]
    merged.add("a/2", delta([], {(): q(3)}), salt=8)
    assert offers(merged) == [(-1, 7, [1, 2]), (-1, 8, [3])]


def test_a_nodes_order_is_canonical() -> None:
    """Whichever delta came first, the verifier tests the draws of one speculator before those of the other."""
    one, other = tree(), tree()
    one.add("a", delta([(1,)], {(): q(1)}), salt=1)
    for merged in (one, other):
        merged.add("b", delta([(1,)], {(): q(2)}), salt=2)
    other.add("a", delta([(1,)], {(): q(1)}), salt=1)
    assert offers(one) == offers(other) == [(-1, 1, [1]), (-1, 2, [2])]


def test_proposals_for_nodes_that_nobody_knows_are_stale() -> None:
    """They are dropped, as nodes with unknown parents are."""
    merged = tree()
    merged.add("a", delta([], {(5, 6): q(1)}), salt=1)
    assert offers(merged) == []


def test_a_node_holds_a_bounded_number() -> None:
    """As many as the verifier takes; the first to come."""
    merged = tree()
    for number in range(20):
        merged.add(f"{number:02}", delta([(1,)], {(): q(1)}), salt=number)
    assert [salt for _, salt, _ in offers(merged)] == list(range(16))


BAD: dict[str, Callable[[], TreeDelta]] = {
    "weights": lambda: delta([], {(): common_pb2.Proposals(ids=[1, 2], weights=[1.0], count=1)}),
    "vocabulary": lambda: delta([], {(): q(1, 50)}),
    "zero": lambda: delta([], {(): common_pb2.Proposals(ids=[1], weights=[0.0], count=1)}),
    "nan": lambda: delta([], {(): common_pb2.Proposals(ids=[1], weights=[float("nan")], count=1)}),
    "twice": lambda: delta([], {(): q(1, 1)}),
    "empty": lambda: delta([], {(): q()}),
    "support": lambda: delta([], {(): q(*range(49), *range(20))}),
    "no draws": lambda: delta([], {(): q(1, count=0)}),
    "draws": lambda: delta([], {(): q(1, count=65)}),
    "more than nodes": lambda: delta([], {(token,): q(1) for token in range(10)}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_proposals_change_nothing(name: str) -> None:
    """InvalidTree names the field; nodes that came with them are not merged either."""
    merged = tree()
    bad = BAD[name]()
    bad.MergeFrom(delta([(1,)], {}))
    with pytest.raises(InvalidTree, match="proposals"):
        merged.add("a", bad, salt=1)
    assert len(merged) == 0
    assert offers(merged) == []


def test_proposals_in_a_mode_that_tests_none_are_refused() -> None:
    """TARGET_ONLY, NAIVE and temperature 0: nothing is drawn from what nobody checks."""
    with pytest.raises(InvalidTree, match="proposals"):
        tree(tests_draws=False).add("a", delta([(1,)], {(): q(1)}))


# --- the session


@pytest.mark.parametrize("mode", ["target_only", "mss", "mss_without_replacement", "naive"])
async def test_pods_are_told_the_mode(mode: Mode) -> None:
    """Both tiers; every opening of a session draws under a salt of its own."""
    verifier = FakeVerifier()
    speculators = [FakeSpeculator(f"s{index}", kind=f"k{index}") for index in range(2)]
    async with harness(verifier, *speculators) as stack:
        options = {"temperature": 1.0, "speculation": SpeculationOptions(mode=mode)}
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=10, **options)
        assert list(result.token_ids) == plain(PROMPT, 10)
    wanted = common_pb2.SpeculationMode.Value(f"SPECULATION_MODE_{mode.upper()}")
    openings = [speculator.opened[0] for speculator in speculators]
    assert [opening.mode for opening in (*verifier.opened, *openings)] == [wanted] * 3
    assert len({opening.draft_salt for opening in openings} | {0, verifier.opened[0].salt}) == 4
    assert not any(step.proposals for step in verifier.steps)


def proposing(change: Callable[[common_pb2.Proposals], None] = lambda offer: None) -> FakeSpeculator:
    """A speculator whose deltas say what each parent's children were drawn from."""
    speculator = FakeSpeculator(draft=chain(3))

    def script(message: TreeDelta) -> TreeDelta:
        for parent, token in zip(message.parent_ids, message.token_ids, strict=True):
            offer = q(token, (token + 1) % VOCAB)
            change(offer)
            message.proposals.add(node_id=parent, proposals=offer)
        return message

    speculator.script = script
    return speculator


async def test_proposals_reach_the_verifier() -> None:
    """With the opening's salt, on the node they belong to, once each."""
    verifier, speculator = FakeVerifier(), proposing()
    async with harness(verifier, speculator, adaptive=False, draft_wait_ms=1000) as stack:
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=30, **MSS)
        assert list(result.token_ids) == plain(PROMPT, 30)
    salt = speculator.opened[0].draft_salt
    drafted = [step for step in verifier.steps if step.tree.token_ids]
    assert drafted
    for step in drafted:
        by_node = {entry.node: entry for entry in step.proposals}
        assert len(by_node) == len(step.proposals)
        for token, parent in zip(step.tree.token_ids, step.tree.parents, strict=True):
            assert by_node[parent].proposals.ids[0] == token
            assert by_node[parent].salt == salt


async def test_a_pod_with_malformed_proposals_is_quarantined() -> None:
    """Its session goes on without it and gets the same answer."""

    def negative(offer: common_pb2.Proposals) -> None:
        offer.weights[0] = -1.0

    verifier, speculator = FakeVerifier(), proposing(negative)
    async with harness(verifier, speculator, quarantine_seconds=60) as stack:
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=30, **MSS)
        assert list(result.token_ids) == plain(PROMPT, 30)
        await until(lambda: stack.states()["speculator-0"] == "quarantined")
    assert not any(step.proposals for step in verifier.steps)


async def test_a_request_is_taken_up_where_its_record_ends() -> None:
    """In an MSS mode generating again gives other tokens: those in the record are delivered, the rest follows."""
    verifier = FakeVerifier()
    async with harness(verifier, replay_seconds=0) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 12, "request_id": IDENTIFIER, **MSS}
        stream = stack.client.stream(**options)
        delivered = [token for chunk in [await anext(aiter(stream))] for token in chunk.token_ids]
        verifier.holding = True
        stream.cancel()
        await until(lambda: not stack.router.generations)
        verifier.holding = False
        verifier.model = lambda token_ids: 7  # what it would say now is something else
        result = await stack.client.generate(**options)
        opening = verifier.opened[-1]
        restored = list(opening.token_ids[opening.prompt_tokens :])
        assert restored[: len(delivered)] == delivered
        assert list(result.token_ids) == restored + [7] * (12 - len(restored))
        assert result.usage.completion_tokens == 12
        steps = result.speculation.num_spec_steps
        assert result.speculation.mean_acceptance_length == pytest.approx((12 - len(restored)) / steps)
        again = await stack.client.generate(**options)
        assert again.token_ids == result.token_ids
        assert again.finish_reason == "length"
        assert again.speculation.num_spec_steps == 0


async def test_log_probs_of_a_lost_life_are_in_its_record() -> None:
    """Generating again would tell those of other tokens: they come from the record, with their tokens."""
    async with harness(FakeVerifier(), replay_seconds=0) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 4, "request_id": IDENTIFIER, "log_probs": True, **MSS}
        first = await stack.client.generate(**options)
        again = await stack.client.generate(**options)
        assert len(first.log_probs) == 4
        assert (again.token_ids, again.log_probs) == (first.token_ids, first.log_probs)
        assert again.speculation.num_spec_steps == 0

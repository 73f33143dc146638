"""The model drafter: exact log probabilities, living KV, chunks, limits."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from graftree.config import SpeculatorConfig
from graftree.errors import ConfigError, ContextTooLong, ResourceExhausted
from graftree.models.load import load
from graftree.sampling import SamplingContext, SamplingParams, choose
from graftree.v1 import common_pb2, speculation_pb2
from speculator_service.drafters import loader
from speculator_service.drafters.model import PREFILL_ROWS, ModelDrafter
from speculator_service.engine import Engine
from speculator_service.events import Close, Commit, Failed, Grown, Open
from speculator_service.limits import Limits
from speculator_service.living_tree import LivingTree

URI = "random:llama?layers=2&hidden=64&heads=4&kv_heads=2&vocab=512&context=256&seed=0"
PROMPT = [(7 * i) % 500 for i in range(50)]


class Stack:
    """A model drafter under an engine whose turns the test takes itself."""

    def __init__(self, uri: str = URI, *, max_nodes: int = 24, **options: Any) -> None:
        self.drafter = ModelDrafter(uri, device="cpu", max_sessions=8, **options)
        self.limits = Limits(8, max_nodes, 6, 4, self.drafter.vocab_size, self.drafter.max_context)
        self.events: list[Grown | Failed] = []
        self.engine = Engine(self.drafter, batch_leaves=64, deliver=self.events.extend, clock=lambda: 0)
        self.texts: dict[str, list[int]] = {}
        self.trees: dict[str, LivingTree] = {}

    @property
    def rows(self) -> int:
        return self.drafter.runner.rows_computed

    def open(
        self, name: str, tokens: list[int], sampling: common_pb2.SamplingParams | None = None, **changes: Any
    ) -> None:
        request = speculation_pb2.DraftOpen(
            session_id=name,
            token_ids=tokens,
            prompt_tokens=len(tokens),
            sampling=sampling or common_pb2.SamplingParams(temperature=0.0),
            **{"vocab_size": 512, "max_length": 250, **changes},
        )
        session = self.limits.session(name, request)
        self.texts[name], self.trees[name] = list(tokens), self.limits.tree(session, 0)
        self.engine._inbox.append(Open(session, self.trees[name], 0))

    def commit(self, name: str, tokens: list[int]) -> None:
        self.engine._inbox.append(Commit(name, tuple(tokens), len(self.texts[name]), 0))
        self.texts[name] += tokens

    def turn(self) -> None:
        self.engine._turn(self.events.extend)

    def settle(self) -> None:
        while self.engine._inbox or self.engine._can_grow():
            self.turn()

    def failure(self) -> Exception:
        (failed,) = [event for event in self.events if isinstance(event, Failed)]
        return failed.error

    def check(self, name: str, model: Any) -> None:
        """Each node's log probability is that of one ordinary forward over its path."""
        tree = self.trees[name]
        for node in tree.nodes():
            path = tree.path(node)
            logits = model(torch.tensor([[*self.texts[name], *path]])).logits[0, -2].double()
            assert node.log_prob == pytest.approx(torch.log_softmax(logits, -1)[path[-1]].item(), abs=1e-4)


@pytest.fixture(scope="module")
def model() -> Any:
    return load(URI).model


def test_log_probs_are_the_models(model: Any) -> None:
    """A whole tree, batched over leaves and two sessions, agrees with one plain forward per path."""
    stack = Stack()
    stack.open("a", PROMPT)
    stack.open("b", PROMPT[:7])
    stack.settle()
    for name in ("a", "b"):
        assert 12 <= len(stack.trees[name]) <= 24  # growth ends where nothing likely is left
        stack.check(name, model)


def test_children_are_the_most_likely_tokens(model: Any) -> None:
    """At temperature 0 the root's children are the top four of the model."""
    stack = Stack()
    stack.open("a", PROMPT)
    stack.settle()
    top = torch.topk(model(torch.tensor([PROMPT])).logits[0, -1], 4).indices.tolist()
    assert set(stack.trees["a"].root.children) <= set(top)
    assert top[0] in stack.trees["a"].root.children


def test_prompt_and_expanded_nodes_are_computed_once() -> None:
    """Row count: the prompt, and one row per expanded node that is not the root."""
    stack = Stack()
    stack.open("a", PROMPT)
    stack.settle()
    expanded = sum(node.expanded for node in stack.trees["a"].nodes())
    assert stack.rows == len(PROMPT) + expanded


def test_a_commit_inside_the_tree_recomputes_nothing(model: Any) -> None:
    """After each of many commits only nodes that were never expanded cost a row, and what is drafted stays right."""
    stack = Stack()
    stack.open("a", PROMPT)
    stack.settle()
    for length in (1, 2, 1, 3, 2, 1):
        tree = stack.trees["a"]
        at, tokens = tree.root, []
        # The second-best child where it was expanded: the surviving rows then lie apart in the cache.
        while len(tokens) < length:
            at = max(at.children.values(), key=lambda node: (bool(node.children), -node.log_prob))
            if not at.expanded:
                break
            tokens.append(at.token_id)
        assert tokens
        survivors = {
            node.id for node in tree.nodes() if node.expanded and tree.path(node)[: len(tokens)] == (*tokens,)
        }
        before = stack.rows
        stack.commit("a", tokens)
        stack.settle()
        expanded = {node.id for node in (tree.root, *tree.nodes()) if node.expanded}
        assert survivors <= expanded
        assert stack.rows - before == len(expanded - survivors)
        stack.check("a", model)


def test_a_commit_outside_the_tree_computes_only_new_tokens(model: Any) -> None:
    """Accepted tokens keep their rows; the bonus token and nothing before it is run."""
    stack = Stack()
    stack.open("a", PROMPT)
    stack.settle()
    child = next(node for node in stack.trees["a"].root.children.values() if node.expanded)
    bonus = next(token for token in range(512) if token not in child.children)
    before = stack.rows
    stack.commit("a", [child.token_id, bonus])
    stack.turn()
    assert stack.rows - before == 1
    stack.settle()
    stack.check("a", model)


def test_commits_before_the_prompt_is_through(model: Any) -> None:
    """Commits that overtake prefill are queued behind it, also several at once."""
    stack = Stack("random:llama?layers=2&hidden=64&heads=4&kv_heads=2&vocab=512&context=512&seed=0")
    stack.open("a", PROMPT * 4, max_length=500)
    stack.turn()
    stack.commit("a", [5, 6])
    stack.commit("a", [7])
    stack.settle()
    assert stack.rows - sum(node.expanded for node in stack.trees["a"].nodes()) == 203
    stack.check("a", load("random:llama?layers=2&hidden=64&heads=4&kv_heads=2&vocab=512&context=512&seed=0").model)


def test_a_long_prompt_does_not_stall_others() -> None:
    """Prefill goes in chunks, and another session's tree grows in the same steps."""
    stack = Stack("random:llama?layers=1&hidden=32&heads=2&kv_heads=1&vocab=512&context=2048&seed=0")
    long = PROMPT * 20
    stack.open("long", long, max_length=2000)
    stack.open("short", PROMPT[:3])
    for _ in range(3):
        before = stack.rows
        stack.turn()
        assert stack.rows - before < PREFILL_ROWS + 24
    assert len(stack.trees["long"]) == 0
    assert len(stack.trees["short"]) > 4
    stack.settle()
    assert len(stack.trees["long"]) > 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_llm_as_its_own_ssm_is_always_right(model: Any, temperature: float) -> None:
    """With p = q the best child of every node is what plain decoding picks there, noise included."""
    stack = Stack(shortlist=512)
    stack.open("a", PROMPT, common_pb2.SamplingParams(temperature=temperature, seed=9))
    stack.settle()
    tree = stack.trees["a"]
    params = SamplingParams(temperature=temperature, seed=9)
    for node in (tree.root, *tree.nodes()):
        if node.children:
            text = [*PROMPT, *tree.path(node)]
            logits = model(torch.tensor([text])).logits[0, -1].numpy()
            expected = choose(logits, params, SamplingContext(text, vocab_size=512))
            assert max(node.children.values(), key=lambda child: child.log_prob).token_id == expected


def test_penalties_count_the_path(model: Any) -> None:
    """With a presence penalty the best child of every node is the penalised argmax along that very path."""
    stack = Stack()
    stack.open("a", PROMPT, common_pb2.SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.3))
    stack.settle()
    stack.commit("a", [11, 12])
    stack.settle()
    tree = stack.trees["a"]
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.3)
    context = SamplingContext(PROMPT, [11, 12], vocab_size=512)
    for node in (tree.root, *tree.nodes()):
        if node.children:
            path = tree.path(node)
            logits = model(torch.tensor([[*PROMPT, 11, 12, *path]])).logits[0, -1].numpy()
            best = max(node.children.values(), key=lambda child: child.log_prob).token_id
            assert best == choose(logits, params, context, path)


def test_prompt_beyond_the_context_is_refused() -> None:
    """One token more than the SSM's context: CONTEXT_TOO_LONG, with both numbers."""
    stack = Stack("random:llama?layers=1&hidden=32&heads=2&kv_heads=1&vocab=512&context=64&seed=0")
    with pytest.raises(ContextTooLong, match=r"65.*64"):
        stack.open("a", [1] * 65)


def test_drafting_stops_at_the_context(model: Any) -> None:
    """The last token of the context still has children; later commits leave the tree empty and complete."""
    stack = Stack("random:llama?layers=1&hidden=32&heads=2&kv_heads=1&vocab=512&context=64&seed=0")
    stack.open("a", [1] * 62)
    stack.settle()
    tree = stack.trees["a"]
    assert max(node.position for node in tree.nodes()) == 64
    stack.commit("a", [400, 401])
    stack.settle()
    assert {node.position for node in tree.nodes()} == {64}
    stack.commit("a", [402, 403])
    stack.settle()
    assert len(tree) == 0
    assert not [event for event in stack.events if isinstance(event, Failed)]


def test_out_of_kv_blocks_fails_one_session() -> None:
    """The session that finds no block is given up; its blocks and everybody else's return at close."""
    stack = Stack(kv_tokens=5 * 16)
    stack.open("a", PROMPT[:40])
    stack.settle()
    stack.open("b", PROMPT[:40])
    stack.settle()
    assert isinstance(stack.failure(), ResourceExhausted)
    assert len(stack.trees["a"]) > 12
    stack.engine._inbox.append(Close("a"))
    stack.settle()
    stack.turn()
    assert stack.drafter.blocks() == (5, 5)
    stack.drafter.runner.pool.check()


def test_padding_of_the_ssms_vocabulary_is_not_drafted() -> None:
    """Ids at or above the session's vocabulary never enter the tree, and are not ranked either."""
    stack = Stack(max_nodes=24)
    stack.open("a", [1, 2, 3], vocab_size=9)
    stack.settle()
    assert len(stack.trees["a"]) > 12
    assert all(node.token_id < 9 for node in stack.trees["a"].nodes())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "opt", "gpt2", "mistral"])
def test_other_architectures(family: str) -> None:
    """Every claimed family, past the sliding window where there is one, before and after a commit."""
    uri = f"random:{family}?layers=2&hidden=64&heads=4&vocab=512&context=256&seed=1"
    stack, reference = Stack(uri), load(uri).model
    stack.open("a", PROMPT)
    stack.settle()
    stack.check("a", reference)
    child = next(node for node in stack.trees["a"].root.children.values() if node.expanded)
    stack.commit("a", [child.token_id])
    stack.settle()
    stack.check("a", reference)


def test_random_weights_have_finite_chances() -> None:
    """Every log probability that leaves is finite and at most 0, at a temperature too."""
    stack = Stack()
    stack.open("a", PROMPT, common_pb2.SamplingParams(temperature=1.5, seed=3, top_p=0.9))
    stack.settle()
    assert all(math.isfinite(node.log_prob) and node.log_prob <= 0 for node in stack.trees["a"].nodes())


@pytest.mark.parametrize("spec", ["model:", "model:random:llama?nope=1", "model:random:nope"])
def test_a_bad_model_names_the_key(spec: str) -> None:
    """A model URI that does not parse is a configuration error of `drafter`."""
    with pytest.raises(ConfigError) as caught:
        loader.load(SpeculatorConfig(drafter=spec, device="cpu"))
    assert caught.value.key == "drafter"


def test_a_cache_below_one_block_names_its_own_key() -> None:
    """What is wrong with another key than the spec is said of that key."""
    with pytest.raises(ConfigError) as caught:
        loader.load(SpeculatorConfig(drafter=f"model:{URI}", device="cpu", kv_tokens=3))
    assert caught.value.key == "kv_tokens"


def test_blocks_return_after_many_short_sessions() -> None:
    """Opened, committed to and closed at any moment of their life, 60 sessions leave the pool as they found it."""
    stack = Stack("random:llama?layers=1&hidden=32&heads=2&kv_heads=1&vocab=512&context=256&seed=0", max_nodes=8)
    lots = random.Random(0)
    for number in range(60):
        name = str(number)
        stack.open(name, [lots.randrange(500) for _ in range(lots.randrange(1, 150))])
        for _ in range(lots.randrange(4)):
            stack.turn()
            if lots.random() < 0.5:
                stack.commit(name, [lots.randrange(500) for _ in range(lots.randrange(1, 4))])
        if lots.random() < 0.7:
            stack.engine._inbox.append(Close(name))
    for number in range(60):
        stack.engine._inbox.append(Close(str(number)))
    stack.turn()
    free, total = stack.drafter.blocks()
    assert free == total
    stack.drafter.runner.pool.check()
    assert not [event for event in stack.events if isinstance(event, Failed)]

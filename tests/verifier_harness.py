"""An engine on a tiny random model, driven by hand, and plain references for what it must say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graftree.codec import tree_to_proto
from graftree.models.load import load
from graftree.models.runner import TreeRunner
from graftree.sampling import GREEDY, SamplingContext, SamplingParams, choose
from graftree.tree import TokenTree, root_id
from graftree.v1 import common_pb2, verification_pb2
from verifier_service.engine import Engine
from verifier_service.session import Answer, Stream

LLAMA = "random:llama?layers=2&hidden=64&heads=4&kv_heads=2&vocab=512&context=256&seed=0&scale=3"
SALT = 77

TreeMaker = Callable[[list[int], int], TokenTree]


@functools.lru_cache(maxsize=8)
def reference_model(uri: str = LLAMA) -> Any:
    """The same weights with transformers' own attention."""
    model = load(uri).model
    model.set_attn_implementation("eager")
    return model


def make_engine(uri: str = LLAMA, *, kv_tokens: int = 4096, step_tokens: int = 512, **options: Any) -> Engine:
    runner = TreeRunner(
        load(uri, dtype=options.pop("dtype", "float32")),
        kv_tokens=kv_tokens,
        block_size=options.pop("block_size", 16),
        deterministic=options.pop("deterministic", False),
    )
    return Engine(runner, max_sessions=options.pop("max_sessions", 64), step_tokens=step_tokens, **options)


def greedy(prompt: Sequence[int], count: int, uri: str = LLAMA) -> list[int]:
    """What transformers' generate says, greedily."""
    output = reference_model(uri).generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt) :]]


@torch.inference_mode()
def plain(prompt: Sequence[int], count: int, params: SamplingParams, uri: str = LLAMA) -> list[int]:
    """Plain decoding: one ordinary forward over the whole sequence per token."""
    model, tokens = reference_model(uri), list(prompt)
    for _ in range(count):
        row = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float().numpy()
        context = SamplingContext(prompt, tokens[len(prompt) :], vocab_size=len(row))
        tokens.append(choose(row, params, context))
    return tokens[len(prompt) :]


def chain(root: int, tokens: Sequence[int]) -> TokenTree:
    return TokenTree(root, tuple(tokens), tuple(range(-1, len(tokens) - 1)), (-0.5,) * len(tokens))


@dataclass(eq=False)
class Router:
    """The other side of one stream."""

    engine: Engine
    verdicts: list[verification_pb2.Verdict] = field(default_factory=list)
    failures: list[common_pb2.SessionFailure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = Stream(self._take)

    def _take(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            (self.verdicts if isinstance(answer, verification_pb2.Verdict) else self.failures).append(answer)

    def open(self, session_id: str, prompt: Sequence[int], **fields: Any) -> Client:
        params = fields.pop("params", GREEDY)
        fields = {"max_length": 256, "max_nodes": 128, "prompt_tokens": len(prompt)} | fields
        self.engine.open(
            self.stream,
            verification_pb2.VerifyOpen(
                session_id=session_id, salt=SALT, token_ids=prompt, sampling=params.to_proto(), **fields
            ),
        )
        return Client(self, session_id, list(prompt))

    def run(self) -> None:
        """Iterate until nothing is left to run."""
        while self.engine.iterate():
            pass
        self.engine.flush()


@dataclass(eq=False)
class Client:
    """One session as the router sees it."""

    router: Router
    session_id: str
    token_ids: list[int]
    steps: int = 0

    @property
    def root(self) -> int:
        return root_id(SALT, self.token_ids)

    def send(self, tree: TokenTree | common_pb2.TokenTree | None = None, **fields: Any) -> None:
        """Queue one step; no tree = plain decoding."""
        self.steps += 1
        tree = TokenTree(self.root) if tree is None else tree
        wire = tree if isinstance(tree, common_pb2.TokenTree) else tree_to_proto(tree)
        message = verification_pb2.VerifyStep(
            **{
                "session_id": self.session_id,
                "step": self.steps,
                "committed_length": len(self.token_ids),
                "tree": wire,
                **fields,
            }
        )
        self.router.engine.step(self.router.stream, message, arrived_ns=0)

    def take(self) -> verification_pb2.Verdict:
        """The verdict on the last step; its tokens are committed here too."""
        found = [v for v in self.router.verdicts if v.session_id == self.session_id]
        assert len(found) == 1, (found, self.router.failures)
        self.router.verdicts.remove(found[0])
        assert found[0].step == self.steps
        self.token_ids.extend(found[0].token_ids)
        return found[0]

    def verify(self, tree: TokenTree | common_pb2.TokenTree | None = None) -> verification_pb2.Verdict:
        self.send(tree)
        self.router.run()
        return self.take()

    def generate(self, count: int, make_tree: TreeMaker | None = None) -> list[int]:
        """`count` tokens by verify steps whose trees `make_tree(committed tokens, root id)` gives."""
        start = len(self.token_ids)
        while len(self.token_ids) - start < count:
            self.verify(make_tree(self.token_ids, self.root) if make_tree else None)
        return self.token_ids[start : start + count]

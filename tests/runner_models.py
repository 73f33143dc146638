"""Random models for the runner's tests, each beside an ordinary copy of itself, and random trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import PreTrainedModel

from graftree.models.load import load
from graftree.models.runner import Rows, TreeRunner, chain_rows

SHAPE = "layers=2&hidden=32&heads=4&vocab=300&context=512&intermediate=64"
FAMILIES = {
    "llama": f"random:llama?kv_heads=2&{SHAPE}",
    "qwen2": f"random:qwen2?kv_heads=2&{SHAPE}",
    "qwen3": f"random:qwen3?kv_heads=2&{SHAPE}",
    "opt": f"random:opt?{SHAPE}",
    "gpt2": f"random:gpt2?{SHAPE}",
    "mistral": f"random:mistral?kv_heads=2&{SHAPE}&window=4096",
    "mistral-window": f"random:mistral?kv_heads=2&{SHAPE}&window=9",
}


@lru_cache
def ordinary(uri: str) -> PreTrainedModel:
    """The model as transformers alone runs it."""
    return load(uri).model


@lru_cache
def runner(uri: str) -> TreeRunner:
    """The same weights behind a TreeRunner, shared by the tests of one process."""
    return TreeRunner(load(uri), kv_tokens=4096)


@torch.inference_mode()
def path_logits(uri: str, token_ids: Sequence[int]) -> torch.Tensor:
    """(len, vocab) logits of one ordinary forward."""
    return ordinary(uri)(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@dataclass(frozen=True)
class Tree:
    """A random tree behind a context."""

    context: tuple[int, ...]
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def masks(self) -> list[int]:
        masks: list[int] = []
        for index, parent in enumerate(self.parents):
            masks.append(1 << index | (masks[parent] if parent >= 0 else 0))
        return masks

    def path(self, index: int) -> list[int]:
        """Node indices from the top down to `index`."""
        nodes: list[int] = []
        while index >= 0:
            nodes.append(index)
            index = self.parents[index]
        return nodes[::-1]

    def rows(self, blocks: Sequence[int], start: int = 0, stop: int | None = None) -> Rows:
        """Nodes start..stop as a step; the nodes before are in the cache already."""
        stop = len(self.token_ids) if stop is None else stop
        return Rows(
            blocks=blocks,
            context_len=len(self.context),
            tree_len=start,
            token_ids=self.token_ids[start:stop],
            positions=[len(self.context) + len(self.path(index)) - 1 for index in range(start, stop)],
            masks=self.masks[start:stop],
            logits=range(stop - start),
        )

    def expected(self, uri: str) -> torch.Tensor:
        """(nodes, vocab) logits, one ordinary forward per root-to-leaf path."""
        expected = torch.full((len(self.token_ids), ordinary(uri).config.vocab_size), torch.nan)
        for leaf in set(range(len(self.token_ids))) - set(self.parents):
            nodes = self.path(leaf)
            logits = path_logits(uri, [*self.context, *(self.token_ids[node] for node in nodes)])
            expected[nodes] = logits[len(self.context) :]
        return expected


class Sequences:
    """Blocks for several trees, with their contexts computed; gives the blocks back at the end."""

    def __init__(self, uri: str, trees: Iterable[Tree]) -> None:
        self.runner, self.trees = runner(uri), list(trees)

    def __enter__(self) -> list[list[int]]:
        size = self.runner.kv.block_size
        self.blocks = [
            self.runner.pool.allocate(-(-(len(tree.context) + len(tree.token_ids)) // size)) for tree in self.trees
        ]
        self.runner.forward(
            [chain_rows(blocks, 0, tree.context) for blocks, tree in zip(self.blocks, self.trees, strict=True)]
        )
        return self.blocks

    def __exit__(self, *_: object) -> None:
        for blocks in self.blocks:
            self.runner.pool.free(blocks)
        self.runner.pool.check()

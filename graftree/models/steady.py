"""`Steady`: forwards of a few fixed sizes, so that a row's logits do not depend on what shares the step.

Libraries choose an order of summation by shape, so a row's last bits change with the number of rows beside it. Here
every forward has one of a few numbers of rows, filled up with rows that nobody reads; more rows than the largest run
one forward after another. Attention has an order of its own (`kernels.invariant`). What then remains to be known of
the machine's libraries is found out before the first session: a row has the same bits at every place of a step of
every size. Sizes that disagree with most others are left out (`agreeing`).

The check is by example: rows with random caches, all of their logits, every place, every size. An order of summation
is a property of the shape, so one that differs shows in nearly every element, not in rare ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from graftree.errors import Incompatible
from graftree.models.paged import PagedKV
from graftree.models.rows import Rows, chain_rows
from graftree.models.spec import ModelSpec

SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 128, 256)

# What is compared at start-up: rows behind contexts of these lengths, and a text in one chunk and in several.
_CONTEXTS = (0, 1, 15, 63, 64, 65, 100, 127)
_LENGTH, _CHUNK = 53, 13

# (sequences, number of logits rows) -> (number of logits rows, V)
Run = Callable[[Sequence[Rows], int], Tensor]


class Steady:
    """Cuts steps and fills them up.

    Attributes:
        sizes: the rows that a forward may have, ascending.
    """

    def __init__(self, run: Run, sizes: Sequence[int], spare: Sequence[int]) -> None:
        """
        Args:
            run: one forward; gives the wanted rows' logits, the first one's again until there are as many as asked.
            sizes: that agree with each other (`agreeing`).
            spare: blocks for the keys and values of rows that nobody reads, enough for the largest size.
        """
        self._run, self.sizes, self._spare = run, sizes, spare

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        """One step, in as many forwards as it takes; (number of wanted rows, V) logits in the rows' order."""
        found: list[list[Tensor]] = [[] for _ in batch]
        for part in _cut(batch, self.sizes[-1]):
            own = [rows for _, rows in part]
            counts = [len(rows.logits) for rows in own]
            logits = self._sized(own)[: sum(counts)]
            for (sequence, _), piece in zip(part, logits.split(counts), strict=True):
                found[sequence].append(piece)
        return torch.cat([piece for pieces in found for piece in pieces])

    def _sized(self, rows: list[Rows]) -> Tensor:
        count, wanted = sum(len(own.token_ids) for own in rows), sum(len(own.logits) for own in rows)
        size, logits = (next(size for size in self.sizes if size >= number) for number in (count, wanted))
        if missing := size - count:
            filler = chain_rows(self._spare, 0, [0] * missing)
            rows = [*rows, replace(filler, positions=[0] * missing)]
        return self._run(rows, logits if wanted else 0)


def spare_blocks(block_size: int) -> int:
    """How many blocks the largest size's rows need."""
    return -(-SIZES[-1] // block_size)


def agreeing(run: Callable[[Sequence[Rows], int, PagedKV], Tensor], kv: PagedKV, spec: ModelSpec) -> tuple[int, ...]:
    """The sizes, as many as there are, at which a row has the same logits at every place.

    Args:
        run: one forward over a given cache, otherwise as `Steady`'s.
        kv: the runner's cache; only its shape is used.
        spec: the model's.

    Raises:
        Incompatible: there is no such size, or a text's logits change with how it is cut.
    """
    contexts = [min(context, spec.max_context - 1) for context in _CONTEXTS]
    cache, spare, blocks = _scratch(kv, [context + 1 for context in contexts])
    tokens = _text(len(contexts), spec)
    probes = [
        chain_rows(own, context, [token], logits=[0])
        for own, context, token in zip(blocks, contexts, tokens, strict=True)
    ]

    def logits(size: int, batch: Sequence[int]) -> Tensor:
        steady = Steady(lambda rows, wanted: run(rows, wanted, cache), (size,), spare)
        return steady.forward([probes[index] for index in batch])

    groups: list[tuple[Tensor, list[int]]] = []
    for size in SIZES:
        found = _same_everywhere(size, len(probes), partial(logits, size))
        if found is None:
            continue
        for known, sizes in groups:
            if torch.equal(known, found):
                sizes.append(size)
                break
        else:
            groups.append((found, [size]))
    if not groups:
        raise Incompatible("deterministic: here a row's logits change with its place in a step, at every size")
    most = tuple(max(groups, key=lambda group: len(group[1]))[1])
    _compare_chunks(run, kv, spec, most)
    return most


def _compare_chunks(
    run: Callable[[Sequence[Rows], int, PagedKV], Tensor], kv: PagedKV, spec: ModelSpec, sizes: tuple[int, ...]
) -> None:
    text = _text(min(_LENGTH, spec.max_context), spec)
    cache, spare, (blocks,) = _scratch(kv, [len(text)])
    steady = Steady(lambda rows, wanted: run(rows, wanted, cache), sizes, spare)
    whole, cut = (
        torch.cat(
            [
                steady.forward([chain_rows(blocks, start, own, logits=range(len(own)))])
                for start in range(0, len(text), chunk)
                if (own := text[start : start + chunk])
            ]
        )
        for chunk in (len(text), _CHUNK)
    )
    if not torch.equal(whole, cut):
        raise Incompatible("deterministic: here a text's logits change with how it is cut into chunks")


def _text(length: int, spec: ModelSpec) -> list[int]:
    draw = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(spec.vocab_size, (length,), generator=draw).tolist()
    return tokens


def _same_everywhere(size: int, probes: int, run: Callable[[list[int]], Tensor]) -> Tensor | None:
    """(probes, V) logits of every probe; None where they change with the place. Each place has a probe once."""
    found: list[Tensor | None] = [None] * probes
    for start in range(0, probes, size):
        batch = [(start + 5 * place) % probes if size >= probes else start + place for place in range(size)]
        batch = [probe for probe in batch if probe < probes]
        for probe, logits in zip(batch, run(batch), strict=True):
            known = found[probe]
            if known is None:
                found[probe] = logits
            elif not torch.equal(known, logits):
                return None
    return torch.stack([logits for logits in found if logits is not None])


def _scratch(kv: PagedKV, lengths: Sequence[int]) -> tuple[PagedKV, Sequence[int], list[list[int]]]:
    """A cache of random rows like another; its spare blocks, and blocks for sequences of these lengths."""
    counts = [spare_blocks(kv.block_size), *(-(-length // kv.block_size) for length in lengths)]
    cache = PagedKV.like(kv, num_blocks=sum(counts))
    rows = range(cache.num_blocks * kv.block_size)
    every = range(cache.num_blocks)
    draw = torch.Generator().manual_seed(0)
    cache.write_rows(every, rows, torch.randn(cache.read_rows(every, rows).shape, generator=draw))
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    spare, *blocks = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
    return cache, spare, blocks


def _cut(batch: Sequence[Rows], most: int) -> Iterator[list[tuple[int, Rows]]]:
    """Steps of at most `most` rows that together are one; each entry with the index of its sequence."""
    part: list[tuple[int, Rows]] = []
    room = most
    for sequence, rows in enumerate(batch):
        start, count = 0, len(rows.token_ids)
        while start < count:
            stop = min(count, start + room)
            part.append((sequence, _between(rows, start, stop)))
            room -= stop - start
            start = stop
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def _between(rows: Rows, start: int, stop: int) -> Rows:
    """Rows start..stop; the ones before them are in the cache already."""
    return replace(
        rows,
        tree_len=rows.tree_len + start,
        token_ids=rows.token_ids[start:stop],
        positions=rows.positions[start:stop],
        masks=rows.masks[start:stop],
        logits=[index - start for index in rows.logits if start <= index < stop],
    )

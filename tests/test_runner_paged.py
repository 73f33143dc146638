"""`BlockPool` and `PagedKV`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.errors import GraftreeError, ResourceExhausted
from graftree.models.blocks import BlockPool, block_names
from graftree.models.paged import PagedKV

ACTIONS = ("take", "free", "share", "publish", "refer")


def cache(num_blocks: int = 6, block_size: int = 4) -> PagedKV:
    kv = PagedKV(layers=3, num_blocks=num_blocks, block_size=block_size, kv_heads=2, head_dim=5, dtype=torch.float32)
    for layer in kv.keys + kv.values:
        layer.zero_()
    return kv


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "free", "share", "publish", "refer"]), st.integers(0, 5)), max_size=60
    )
)
def test_pool_never_loses_or_doubles_a_block(actions: list[tuple[str, int]]) -> None:
    """Whatever is taken, published, shared and given back in whatever order, every block is free, idle or in use, and
    the references are exactly those that were handed out."""
    pool, owned = BlockPool(12), list[list[int]]()
    texts = [block_names(b"", [text] * 16, 4) for text in range(3)]
    for action, count in actions:
        if action == "take" and count <= pool.free_blocks:
            owned.append(pool.allocate(count))
        elif action == "take":
            with pytest.raises(ResourceExhausted):
                pool.allocate(count)
        elif action == "share":
            owned.append(pool.share(texts[count % 3]))
        elif owned and action == "publish":
            for block, name in zip(owned[count % len(owned)], texts[count % 3], strict=False):
                pool.publish(block, name)
        elif owned and action == "refer":
            pool.refer(owned[count % len(owned)])
            owned.append(owned[count % len(owned)])
        elif owned:
            pool.free(owned.pop(count % len(owned)))
        pool.check()
        held = [block for blocks in owned for block in blocks]
        assert {block: held.count(block) for block in held} == pool._references
        assert len(set(held)) == 12 - pool.free_blocks


def test_published_blocks_are_found_until_their_place_is_needed() -> None:
    """A text finds the blocks of its longest known beginning; the end of the text used longest ago goes first."""
    pool = BlockPool(8)
    first, second = block_names(b"m", range(100, 112), 4), block_names(b"m", range(50, 58), 4)
    for names in (first, second):
        blocks = pool.allocate(len(names))
        for block, name in zip(blocks, names, strict=True):
            pool.publish(block, name)
        pool.free(blocks)
    assert (pool.free_blocks, pool.idle_blocks) == (8, 5)
    assert pool.share(block_names(b"m", [*range(100, 108), 7, 7, 7, 7], 4)) == [0, 1]
    assert pool.share(block_names(b"another model", range(100, 112), 4)) == []
    assert pool.allocate(4) == [2, 5, 6, 7], "the three that were free, and the one idle longest"
    assert pool.share(first) == [0, 1]
    assert pool.share(second) == [3, 4]
    assert pool.free_blocks == 0
    pool.check()


def test_names_say_the_whole_text_before() -> None:
    """Equal blocks behind different beginnings have different names; part of a block has none."""
    one, other = block_names(b"m", [1, 2, 3, 4, 5, 6, 7], 2), block_names(b"m", [1, 9, 3, 4, 5, 6], 2)
    assert len(one) == len(other) == 3
    assert not set(one) & set(other)
    assert block_names(one[0], [3, 4, 5, 6], 2) == one[1:]
    assert block_names(b"m", [], 2) == []


def test_pool_refuses_a_foreign_or_doubled_block() -> None:
    """Freeing what is not in use, or the same block twice, raises and changes nothing."""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    for wrong in ([3], [blocks[0], blocks[0]], [blocks[0], 3], [99]):
        with pytest.raises(GraftreeError, match="not in use"):
            pool.free(wrong)
    assert pool.free_blocks == 2
    pool.check()


def test_pool_check_finds_what_is_broken() -> None:
    """`check` sees a block that is neither free nor owned, one that is both, and a name that leads elsewhere."""
    pool = BlockPool(3)
    block = pool.allocate(1)[0]
    pool._references.clear()
    with pytest.raises(GraftreeError, match="broken"):
        pool.check()
    pool._references.update({block: 1, 2: 1})
    with pytest.raises(GraftreeError, match="broken"):
        pool.check()
    del pool._references[2]
    pool.check()
    pool.publish(block, b"name")
    pool._named[b"name"] = 1
    with pytest.raises(GraftreeError, match="names"):
        pool.check()


def test_lone_sequence_gets_one_piece() -> None:
    """Blocks come lowest first, so what one sequence takes bit by bit lies in one piece."""
    pool = BlockPool(8)
    assert pool.allocate(2) + pool.allocate(1) + pool.allocate(3) == list(range(6))


def test_blocks_lie_in_one_piece_where_they_can() -> None:
    """The lowest gap that is large enough is taken whole; a sequence that grows goes on behind its last block; where
    neither can be, the lowest blocks are taken."""
    pool = BlockPool(12)
    parts = [pool.allocate(count) for count in (2, 3, 1, 2)]
    pool.free(parts[0] + parts[1][1:])
    assert pool.allocate(3) == [8, 9, 10], "not 0, 1, 3"
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2, behind=2) == [3, 4]
    pool.free([9, 10])
    assert pool.allocate(3, behind=8) == [9, 10, 11]
    pool.free([0, 3, 4, 9])
    assert pool.allocate(3, behind=8) == [9, 3, 4]
    assert pool.allocate(1, behind=11) == [0]
    assert pool.free_blocks == 0
    pool.check()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), unique_by=lambda pair: pair[1], max_size=20))
def test_move_rows_is_as_if_all_at_once(pairs: list[tuple[int, int]]) -> None:
    """Rows move in every layer; overlapping sources and targets behave as a copy of the old state."""
    kv, blocks = cache(), [4, 0, 3, 1, 5]
    before = torch.randn(2, 3, 20, 2, 5)
    kv.write_rows(blocks, range(20), before)
    kv.move_rows(blocks, [source for source, _ in pairs], [target for _, target in pairs])
    expected = before.clone()
    for source, target in pairs:
        expected[:, :, target] = before[:, :, source]
    assert torch.equal(kv.read_rows(blocks, range(20)), expected)
    assert not kv.keys[0][2].any()  # a block that is not the sequence's


def test_layer_views_share_the_storage() -> None:
    """A write through one layer lands in that layer's view, at the row asked for, and nowhere else."""
    kv = cache()
    key, value = torch.randn(2, 2, 5), torch.randn(2, 2, 5)
    kv.write(1, torch.tensor(kv.slots([5, 2], [3, 4])), key, value)
    assert kv.keys[1].shape == (6, 4, 2, 5)
    assert kv.keys[1].is_contiguous()
    assert torch.equal(kv.keys[1][5, 3], key[0])
    assert torch.equal(kv.values[1][2, 0], value[1])
    assert int(sum(layer.abs().sum(dim=(2, 3)).count_nonzero() for layer in kv.keys + kv.values)) == 4


def test_bytes_per_token() -> None:
    """Planned memory: two tensors, three layers, two heads of five float32."""
    assert cache().bytes_per_token == 2 * 3 * 2 * 5 * 4

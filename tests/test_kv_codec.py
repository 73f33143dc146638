"""KV blocks as bytes: bit by bit or in int8 within the documented error, and nothing that is damaged or foreign."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftree.models.kv_codec import NAME_BYTES, BlockFormat, Packing, Refusal
from graftree.models.paged import PagedKV

NAME, OTHER = b"n" * NAME_BYTES, b"o" * NAME_BYTES
FORMAT = BlockFormat(torch.float32, layers=3, block_size=4, kv_heads=2, head_dim=8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(form: BlockFormat, seed: int = 0, scale: float = 1.0) -> Tensor:
    """(2, layers, block_size, KVH, D) normal numbers whose heads differ in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 1, form.kv_heads)[:, None]
    return (torch.randn(form.shape, generator=generator) * sizes * scale).to(form.dtype)


def packed(form: BlockFormat, data: Tensor, name: bytes = NAME) -> bytearray:
    value = form.pack(name, data)
    assert value is not None
    assert len(value) == form.value_bytes
    return value


def unpacked(form: BlockFormat, value: bytes | bytearray, name: bytes = NAME) -> Tensor:
    out = form.empty(1)[:, :, 0]
    assert form.unpack(name, value, out) is None
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back(dtype: torch.dtype) -> None:
    """Also NaN, infinities, negative zero and denormals, into a slice with strides, from bytes as Redis has them."""
    form = replace(FORMAT, dtype=dtype)
    data = rows(form)
    for index, special in enumerate((float("nan"), float("inf"), -float("inf"), -0.0, torch.finfo(dtype).tiny / 2)):
        data[0, 0, 0, 0, index] = special
    several = form.empty(3)
    assert form.unpack(NAME, bytes(packed(form, data)), several[:, :, 1]) is None
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert torch.equal(several[:, :, 1].view(bits), data.view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 100))
@settings(max_examples=20, deadline=None)
def test_int8_stays_within_the_documented_error(dtype: torch.dtype, seed: int, scale: float) -> None:
    """Against the formula in float64, head by head: half a step of max|x| / 127, and the dtype's own rounding."""
    form = replace(FORMAT, dtype=dtype, packing=Packing.INT8)
    data = rows(form, seed, scale)
    back = unpacked(form, packed(form, data)).double()
    exact = data.double()
    largest = exact.abs().amax(dim=(2, 4), keepdim=True)
    limits = torch.finfo(dtype)
    rounding = limits.eps * largest if dtype != torch.float32 else 1e-6 * largest
    rounding += limits.smallest_normal * limits.eps  # denormals are that far apart
    assert bool(((back - exact).abs() <= largest / 254 + rounding).all())
    assert bool((largest / 300 < (back - exact).abs().amax(dim=(2, 4), keepdim=True) * 2).any())  # it is no copy


def test_int8_at_its_edges() -> None:
    """A head of zeros stays zero, the largest element is kept, and what is not finite has no int8 form."""
    form = replace(FORMAT, packing=Packing.INT8)
    data = rows(form)
    data[0, 1, :, 1] = 0
    back = unpacked(form, packed(form, data))
    assert bool((back[0, 1, :, 1] == 0).all())
    assert torch.allclose(back.abs().amax(dim=(2, 4)), data.abs().amax(dim=(2, 4)))
    for special in (float("nan"), float("inf")):
        data[1, 2, 3, 0, 0] = special
        assert form.pack(NAME, data) is None


def test_int8_is_smaller() -> None:
    """A quarter of float32, half of bfloat16, and some bytes for the scales."""
    large = replace(FORMAT, block_size=16, head_dim=64)
    for dtype in DTYPES:
        exact, small = (replace(large, dtype=dtype, packing=packing).value_bytes for packing in Packing)
        assert small / exact == pytest.approx(1 / dtype.itemsize, rel=0.05)


def test_any_changed_bit_is_noticed() -> None:
    """Whichever byte changes, the value is refused: by what the header says, or by the checksum."""
    value = packed(FORMAT, rows(FORMAT))
    out = FORMAT.empty(1)[:, :, 0]
    for index in (*range(64), *range(64, len(value), 97), *range(len(value) - 32, len(value))):
        damaged = bytearray(value)
        damaged[index] ^= 1 << index % 8
        refusal = FORMAT.unpack(NAME, damaged, out)
        assert refusal is not None, index
        assert (refusal is Refusal.CHECKSUM) == (index >= 56), index


@pytest.mark.parametrize(
    ("other", "refusal"),
    [
        (replace(FORMAT, dtype=torch.float16), Refusal.DTYPE),
        (replace(FORMAT, layers=4), Refusal.SHAPE),
        (replace(FORMAT, block_size=8), Refusal.SHAPE),
        (replace(FORMAT, kv_heads=4, head_dim=4), Refusal.SHAPE),
        (replace(FORMAT, packing=Packing.INT8), Refusal.PACKING),
    ],
)
def test_a_block_of_another_kind(other: BlockFormat, refusal: Refusal) -> None:
    """Another dtype, shape (of the same size, even) or packing under the right name is refused by its reason."""
    assert FORMAT.unpack(NAME, packed(other, rows(other)), FORMAT.empty(1)[:, :, 0]) is refusal
    assert other.unpack(NAME, packed(FORMAT, rows(FORMAT)), other.empty(1)[:, :, 0]) is refusal


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda value: value[:-1], Refusal.SIZE),
        (lambda value: value[:100], Refusal.SIZE),
        (lambda value: value[:63], Refusal.SIZE),
        (lambda value: b"", Refusal.SIZE),
        (lambda value: value + b"\0", Refusal.SIZE),
        (lambda value: value * 2, Refusal.SIZE),
        (lambda value: bytes(len(value)), Refusal.HEADER),
        (lambda value: b"GTKV\2\0" + value[6:], Refusal.HEADER),
    ],
)
def test_what_is_no_whole_block(change: object, refusal: Refusal) -> None:
    """Truncated, too long, zeros, another schema."""
    value = bytes(packed(FORMAT, rows(FORMAT)))
    assert callable(change)
    assert FORMAT.unpack(NAME, change(value), FORMAT.empty(1)[:, :, 0]) is refusal


def test_another_texts_block_under_this_name() -> None:
    """The name in the value must be the one that was asked for."""
    value = packed(FORMAT, rows(FORMAT), OTHER)
    assert FORMAT.unpack(NAME, value, FORMAT.empty(1)[:, :, 0]) is Refusal.NAME


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_random_bytes(value: bytes) -> None:
    """Never an exception, never a block."""
    assert FORMAT.unpack(NAME, value, FORMAT.empty(1)[:, :, 0]) is not None
    assert FORMAT.unpack(NAME, b"GTKV\1\0" + value, FORMAT.empty(1)[:, :, 0]) is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_one_cache_and_into_another(dtype: torch.dtype) -> None:
    """Blocks that are copied out, packed, unpacked and put elsewhere are the same rows, and no others are touched."""
    one, two = (
        PagedKV(layers=2, num_blocks=count, block_size=4, kv_heads=2, head_dim=8, dtype=dtype) for count in (6, 9)
    )
    for cache, start in ((one, 0.0), (two, 500.0)):
        count = cache.read_blocks(range(cache.num_blocks)).numel()
        everything = (torch.arange(count, dtype=torch.float32) % 251 + start).to(dtype)
        cache.write_blocks(range(cache.num_blocks), everything.view(2, 2, cache.num_blocks, 4, 2, 8))
    form, before = BlockFormat.of(one), two.read_blocks(range(9))
    out = form.empty(2)
    for index, copied in enumerate(one.read_blocks([5, 1]).unbind(2)):
        assert form.unpack(NAME, packed(form, copied), out[:, :, index]) is None
    two.write_blocks([7, 0], out)
    assert torch.equal(two.read_blocks([7, 0]), one.read_blocks([5, 1]))
    assert torch.equal(two.read_rows([7, 0], [5]), one.read_rows([5, 1], [5]))
    untouched = [1, 2, 3, 4, 5, 6, 8]
    assert torch.equal(two.read_blocks(untouched), before[:, :, untouched])

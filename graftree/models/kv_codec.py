"""`BlockFormat`: one KV block as bytes and back. What does not fit is refused, never used.

    header    64 bytes: magic, schema, packing, dtype, layers, KV heads, head dim, block size, payload bytes, name
    payload   none   keys, then values: (2, layers, block size, KVH, D) in the cache's own dtype, bit by bit
              int8   scales (2, layers, KVH) float32, then (2, layers, block size, KVH, D) int8
    checksum  32 bytes: SHA-256 over all before

All numbers are little-endian. The name (`graftree.models.blocks.block_names`) says which model, tenant and text the
rows are of, so a value that stands under another block's key is refused too. SHA-256 against damage: it is what names
are made of already, and with the processor's own instructions faster than BLAKE2b. Whoever can write to the store can
forge a block; that is for passwords and TLS to prevent.

int8: each head's keys, and its values, have one scale per layer and block, s = max|x| / 127. An element comes back as
round(x / s) * s, so it is off by at most s / 2 = max|x| / 254, and by the rounding to the cache's dtype.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftree.models.paged import PagedKV

SCHEMA = 1
NAME_BYTES = 32
_MAGIC = b"GTKV"
_HEADER = struct.Struct("<4sHBBHHHHQ32s8x")
_CHECKSUM_BYTES = 32
_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
# The same bits as numbers that numpy knows.
_BITS: dict[torch.dtype, tuple[torch.dtype, str]] = {
    torch.float32: (torch.int32, "<i4"),
    torch.bfloat16: (torch.int16, "<i2"),
    torch.float16: (torch.int16, "<i2"),
    torch.int8: (torch.int8, "i1"),
}


class Packing(StrEnum):
    """How a block's rows are stored."""

    NONE = "none"
    INT8 = "int8"


_PACKINGS = {Packing.NONE: 0, Packing.INT8: 1}


class Refusal(StrEnum):
    """Why a value is not used."""

    SIZE = "size"  # truncated, or longer than a block
    HEADER = "header"  # no block at all, or one of another schema
    PACKING = "packing"
    DTYPE = "dtype"
    SHAPE = "shape"  # other layers, heads or block size
    NAME = "name"  # another text's, tenant's or model's block
    CHECKSUM = "checksum"


@dataclass(frozen=True)
class BlockFormat:
    """What all blocks of one cache have in common.

    Attributes:
        dtype: the cache's: float32, bfloat16 or float16.
        layers, block_size, kv_heads, head_dim: the cache's.
        packing: how rows are stored.
    """

    dtype: torch.dtype
    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    packing: Packing = Packing.NONE

    @classmethod
    def of(cls, kv: PagedKV, packing: Packing = Packing.NONE) -> BlockFormat:
        """The format of a cache's blocks."""
        _, layers, block_size, kv_heads, head_dim = kv.block_shape
        return cls(kv.dtype, layers, block_size, kv_heads, head_dim, packing)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(2, layers, block_size, KVH, D): keys, then values."""
        return 2, self.layers, self.block_size, self.kv_heads, self.head_dim

    @property
    def value_bytes(self) -> int:
        """Bytes of every value: there are no others."""
        return _HEADER.size + self._payload_bytes + _CHECKSUM_BYTES

    @property
    def _scale_shape(self) -> tuple[int, int, int]:
        return 2, self.layers, self.kv_heads

    @property
    def _payload_bytes(self) -> int:
        elements = int(np.prod(self.shape))
        if self.packing is Packing.INT8:
            return elements + 4 * int(np.prod(self._scale_shape))
        return elements * self.dtype.itemsize

    def empty(self, count: int) -> Tensor:
        """Room for `count` blocks, (2, layers, count, block_size, KVH, D), not initialised."""
        return torch.empty((*self.shape[:2], count, *self.shape[2:]), dtype=self.dtype)

    def pack(self, name: bytes, rows: Tensor) -> bytearray | None:
        """A block as a value.

        Args:
            name: the block's.
            rows: (2, layers, block_size, KVH, D) on the CPU.

        Returns:
            None: rows that are not finite have no int8 form.
        """
        value = bytearray(self.value_bytes)
        _HEADER.pack_into(value, 0, *self._header, self._payload_bytes, name)
        if self.packing is Packing.INT8:
            exact = rows.float()
            largest = exact.abs().amax(dim=(2, 4))
            if not bool(torch.isfinite(largest).all()):
                return None
            scales = largest / 127
            self._scales(value)[...] = scales.numpy()
            divisor = torch.where(scales > 0, scales, 1.0)[:, :, None, :, None]
            rows = torch.round(exact / divisor).to(torch.int8)
        self._rows(value)[...] = _bits(rows)
        covered = memoryview(value)[: len(value) - _CHECKSUM_BYTES]
        value[-_CHECKSUM_BYTES:] = hashlib.sha256(covered).digest()
        return value

    def unpack(self, name: bytes, value: bytes | bytearray, out: Tensor) -> Refusal | None:
        """Check a value and write its rows.

        Args:
            name: the block's that is wanted.
            value: whatever was stored under its key.
            out: (2, layers, block_size, KVH, D) of the cache's dtype, on the CPU; any strides.

        Returns:
            None: it is done. Otherwise why not, and `out` may hold anything.
        """
        refusal = self._check(name, value)
        if refusal is not None:
            return refusal
        if self.packing is Packing.INT8:
            numbers = torch.from_numpy(self._rows(value).astype(np.float32))
            scales = torch.from_numpy(self._scales(value).astype(np.float32))
            out.copy_(numbers * scales[:, :, None, :, None])
        else:
            _bits(out)[...] = self._rows(value)
        return None

    def _check(self, name: bytes, value: bytes | bytearray) -> Refusal | None:
        if len(value) < _HEADER.size:
            return Refusal.SIZE
        magic, schema, *kind, payload_bytes, found = _HEADER.unpack_from(value)
        expected = self._header
        if (magic, schema) != expected[:2]:
            return Refusal.HEADER
        for got, want, refusal in zip(kind, expected[2:], _REFUSALS, strict=True):
            if got != want:
                return refusal
        if found != name:
            return Refusal.NAME
        if payload_bytes != self._payload_bytes or len(value) != self.value_bytes:
            return Refusal.SIZE
        end = len(value) - _CHECKSUM_BYTES
        if hashlib.sha256(memoryview(value)[:end]).digest() != value[end:]:
            return Refusal.CHECKSUM
        return None

    @property
    def _header(self) -> tuple[bytes, int, int, int, int, int, int, int]:
        kind = (_PACKINGS[self.packing], _DTYPES[self.dtype])
        return _MAGIC, SCHEMA, *kind, self.layers, self.kv_heads, self.head_dim, self.block_size

    def _scales(self, value: bytes | bytearray) -> NDArray[np.float32]:
        count = int(np.prod(self._scale_shape))
        return np.frombuffer(value, "<f4", count, _HEADER.size).reshape(self._scale_shape)

    def _rows(self, value: bytes | bytearray) -> NDArray[np.signedinteger]:
        """The payload's rows, by their bits, in place."""
        packed = self.packing is Packing.INT8
        start = _HEADER.size + (4 * int(np.prod(self._scale_shape)) if packed else 0)
        number = _BITS[torch.int8 if packed else self.dtype][1]
        return np.frombuffer(value, number, int(np.prod(self.shape)), start).reshape(self.shape)


_REFUSALS = (Refusal.PACKING, Refusal.DTYPE, *[Refusal.SHAPE] * 4)


def _bits(rows: Tensor) -> NDArray[np.signedinteger]:
    return rows.view(_BITS[rows.dtype][0]).numpy()

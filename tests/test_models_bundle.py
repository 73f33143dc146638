"""`Bundle`: many small arrays, one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graftree.errors import GraftreeError
from graftree.models.bundle import Bundle, to_device

CPU = torch.device("cpu")
ARRAYS = {
    "ids": np.arange(5),
    "flags": np.array([True, False, True]),
    "table": np.arange(6, dtype=np.int32).reshape(2, 3),
    "none": np.empty((0, 4)),
    "bits": np.array([[255, 0, 7]], np.uint8),
    "values": np.array([0.5, -1.0]),
}


def test_arrays_come_out_as_they_went_in() -> None:
    """Shapes, dtypes and values, at addresses that kernels like."""
    bundle = Bundle(ARRAYS, CPU)
    for name, array in ARRAYS.items():
        tensor = bundle.tensors[name]
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.data_ptr() % 16 == 0
        assert tensor.is_contiguous()
    assert bundle.nbytes == 48 + 16 + 32 + 0 + 16 + 16


def test_a_fill_changes_the_same_tensors() -> None:
    """The tensors that a recorded step reads stay where they are; nothing of the former content is left."""
    bundle = Bundle(ARRAYS, CPU)
    tensors = dict(bundle.tensors)
    bundle.fill({name: np.zeros_like(array) for name, array in ARRAYS.items()})
    assert all(bundle.tensors[name] is tensor and not tensor.any() for name, tensor in tensors.items())


def test_what_does_not_fit_is_refused() -> None:
    """A missing array, one too many, another shape, another dtype: the error names it."""
    bundle = Bundle({"a": np.arange(3)}, CPU)
    for wrong, named in (
        ({}, "a"),
        ({"a": np.arange(3), "b": np.arange(1)}, "b"),
        ({"a": np.arange(4)}, "a is"),
        ({"a": np.arange(3, dtype=np.int32)}, "a is int32"),
    ):
        with pytest.raises(GraftreeError, match=named):
            bundle.fill(wrong)


def test_nothing_is_copied_on_a_cpu() -> None:
    """There arrays become tensors where they are."""
    array = np.arange(3)
    tensor = to_device({"a": array}, CPU)["a"]
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2]

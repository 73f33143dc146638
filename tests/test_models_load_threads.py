"""Models loaded from several threads at once, as the pods of an in-process stack do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from graftree.models.load import load
from graftree.text.tokenizer import Tokenizer

URI = "random:llama?layers=2&seed=6"


def test_threads_load_the_same_directory_at_once(tmp_path: Path) -> None:
    """transformers loads under process-wide settings; every thread still gets all the weights."""
    original = load(URI).model
    original.save_pretrained(tmp_path)
    Tokenizer.load(URI).save(tmp_path)
    expected = original.state_dict()
    with ThreadPoolExecutor(4) as pool:
        models = [loaded.model for loaded in pool.map(load, [str(tmp_path)] * 12)]
    for model in models:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name])

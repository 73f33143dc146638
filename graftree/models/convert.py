"""A .gguf file becomes a directory of safetensors, config.json and tokenizer.json.

`python -m graftree.models.convert FILE DIRECTORY`, run as a process of its own by `graftree.models.pull`: torch is
gone when it ends, and a router that pulls a model never holds it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, directory: Path) -> None:
    """Dequantise a .gguf file to float32 and save model and tokenizer as `from_pretrained` reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, file = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=file, dtype=torch.float32, trust_remote_code=False, local_files_only=True
    )
    # The weights are plain float32 now; what is left of the quantiser would make save and load look for it.
    for holder in (model, model.config):
        for name in [name for name in vars(holder) if "quant" in name]:
            delattr(holder, name)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file, trust_remote_code=False, local_files_only=True)
    if not tokenizer.is_fast:
        raise ValueError("the file's tokenizer has no form that the tokenizers library reads")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

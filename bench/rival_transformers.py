"""`Transformers`: its greedy, assisted and prompt look-up decoding, on the weights that the service loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.rival_worker import Engine, Setup, threads
from graftree.models.load import computes_bfloat16, load


class FullHead(nn.Module):
    """An SSM package's head as a head for the whole vocabulary: tokens that it has no row for never come.

    Args:
        head: (hidden -> H).
        draft_ids: (H,) int64, the token of each row.
        vocab_size: V.
    """

    def __init__(self, head: nn.Module, draft_ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.head, self._ids, self._vocab_size = head, draft_ids, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden) -> (..., V)."""
        some = self.head(x)
        logits = some.new_full((*some.shape[:-1], self._vocab_size), torch.finfo(some.dtype).min)
        logits[..., self._ids] = some
        return logits


def assistant(uri: str, dtype: str) -> PreTrainedModel:
    """The SSM as a model that `generate` takes for an assistant."""
    loaded = load(uri, dtype=dtype)
    model = loaded.model
    if loaded.draft_ids is not None:
        head = model.get_output_embeddings()
        assert head is not None, "a causal language model has a head"
        model.set_output_embeddings(FullHead(head, loaded.draft_ids, loaded.spec.vocab_size))
    return model


class Transformers(Engine):
    """`generate` with its cache and its defaults, in the service's own precision."""

    def __init__(self, setup: Setup) -> None:
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._llm = load(setup.model).model
        self._eos, self._lookup_tokens = list(setup.eos), setup.lookup_tokens
        # The service's SSM runs in bfloat16 where that is native; which is faster here is found out.
        dtypes = ["float32", "bfloat16"] if computes_bfloat16(torch.device("cpu")) else ["float32"]
        self._assistants = {dtype: assistant(setup.ssm, dtype) for dtype in dtypes if setup.ssm}
        self.settings = {
            "greedy": threads(),
            "look-up": threads(),
            "assisted": [{**each, "assistant": dtype} for each in threads() for dtype in self._assistants],
        }
        if not self._assistants:
            del self.settings["assisted"]

    def generate(self, way: str, setting: dict[str, Any], token_ids: Sequence[int], tokens: int) -> list[int]:
        """As `Engine.generate`."""
        torch.set_num_threads(setting["threads"])
        options: dict[str, Any] = {}
        if way == "look-up":
            options["prompt_lookup_num_tokens"] = self._lookup_tokens
        elif way == "assisted":
            options["assistant_model"] = self._assistants[setting["assistant"]]
        prompt = torch.tensor([list(token_ids)])
        with torch.inference_mode():
            found: Any = self._llm.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                use_cache=True,
                max_new_tokens=tokens,
                eos_token_id=self._eos or None,
                pad_token_id=self._eos[0] if self._eos else 0,
                **options,
            )
        return [int(token) for token in found[0, len(token_ids) :]]

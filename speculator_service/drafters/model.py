"""`ModelDrafter`: an SSM package or any causal language model, batched over sessions and leaves in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from torch import Tensor

from graftree.constraint import Constraint
from graftree.errors import GraftreeError, InvalidArgument
from graftree.grammar import Grammars
from graftree.models.load import LoadedModel, load
from graftree.models.runner import Rows, TreeRunner
from graftree.models.threads import use_threads
from graftree.sampling import SamplingContext
from graftree.text.tokenizer import Tokenizer
from speculator_service.drafters.base import Answer, Candidate, Drafter, DraftSession, Leaf
from speculator_service.drafters.ranking import rank
from speculator_service.drafters.shortlist import NOTHING, SIZE, penalised, shortlists
from speculator_service.drafters.tree_cache import TreeCache

log = structlog.get_logger(__name__)

PREFILL_ROWS = 128  # of all sessions in one step, so that a long prompt does not stall the others
_LEAST_CHUNK = 16
_CPU_BYTES = 1 << 30  # KV cache where nobody says: a pod beside others, with a model that is meant to be small
_GPU_SHARE = 0.1


@dataclass
class _Session:
    given: DraftSession
    cache: TreeCache
    context: SamplingContext | None  # only where what was said decides what may follow
    ends: frozenset[int]  # tokens behind which nothing is said, where they are known


class ModelDrafter(Drafter):
    """An SSM with its own tree KV cache.

    Args:
        uri: see `graftree.models.uri`; a directory may be an SSM package (`graftree.models.ssm`).
        dtype: of its weights, see `graftree.models.load.load`.
        device: auto, cpu, cuda or cuda:N.
        threads: CPU threads of this process' torch; 0 = all cores it may use but one.
        kv_tokens: capacity of its KV cache in tokens; 0 = what max_sessions need, at most 1 GiB on a CPU and a
            tenth of the free memory on a GPU.
        max_sessions, max_nodes: most sessions, and most nodes of a session's tree.
        shortlist: ids per node that are ranked under the noise.

    Raises:
        InvalidArgument: the URI, or kv_tokens below one full sequence.
        Incompatible: a model that cannot be run over trees.
    """

    def __init__(
        self,
        uri: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 0,
        kv_tokens: int = 0,
        max_sessions: int = 256,
        max_nodes: int = 64,
        shortlist: int = SIZE,
    ) -> None:
        use_threads(threads)
        loaded = load(uri, dtype=dtype, device=device)
        self.model_fingerprint = loaded.spec.fingerprint
        self.vocab_fingerprint = loaded.spec.vocab_fingerprint
        self.llm_identity = loaded.made_for
        self.vocab_size = loaded.spec.vocab_size
        self.max_context = loaded.spec.max_context
        wanted = max_sessions * (self.max_context + max_nodes)
        self.runner = TreeRunner(loaded, kv_tokens=kv_tokens or _affordable(loaded, wanted))
        self._grammars = Grammars(partial(Tokenizer.load, loaded.tokenizer_uri))
        self._draft_ids = loaded.draft_ids  # (H,) token of each entry of a logits row; None = they are the tokens
        self._shortlist = shortlist
        self._sessions: dict[str, _Session] = {}

    def open(self, session: DraftSession) -> None:
        if max(session.token_ids) >= self.vocab_size:
            raise InvalidArgument("token_ids", max(session.token_ids), f"below the SSM's {self.vocab_size}")
        context = None
        if session.sampling.penalised or session.sampling.phrases or session.structured_output is not None:
            prompt, output = session.token_ids[: session.prompt_tokens], session.token_ids[session.prompt_tokens :]
            vocab_size = min(session.vocab_size, self.vocab_size)
            constraint = self._constraint(session, output, vocab_size)
            context = SamplingContext(prompt, output, vocab_size=vocab_size, constraint=constraint)
        cache = TreeCache(self.runner.pool, self.runner.kv, session.root_id, session.token_ids)
        self._sessions[session.session_id] = _Session(session, cache, context, frozenset(session.stop_token_ids))

    def _constraint(self, session: DraftSession, output: Sequence[int], vocab_size: int) -> Constraint | None:
        if session.structured_output is None:
            return None
        try:
            return self._grammars.constrain(
                session.structured_output,
                vocab_size=vocab_size,
                stop_token_ids=session.stop_token_ids,
                output_ids=output,
            )
        except GraftreeError as error:  # guesses without it are better than none
            log.debug("constraint not followed", reason=type(error).__name__)
            return None

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        session = self._sessions[session_id]
        if max(token_ids) >= self.vocab_size:
            raise InvalidArgument("token_ids", max(token_ids), f"below the SSM's {self.vocab_size}")
        session.cache.commit(token_ids)
        if session.context is not None:
            session.context.extend(token_ids)

    def close(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.cache.free()

    def blocks(self) -> tuple[int, int]:
        return self.runner.pool.free_blocks, self.runner.pool.num_blocks

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        by_session: dict[str, list[int]] = {}
        for index, leaf in enumerate(leaves):
            by_session.setdefault(leaf.session_id, []).append(index)
        prefills = sum(not leaf.path for leaf in leaves)
        chunk = max(_LEAST_CHUNK, PREFILL_ROWS // max(prefills, 1))
        answers: list[Answer] = [None] * len(leaves)
        shares: list[tuple[list[int], Rows]] = []
        for session_id, indices in by_session.items():
            try:
                shares.append((indices, self._rows(session_id, [leaves[i] for i in indices], chunk)))
            except GraftreeError as error:
                answers[indices[0]] = error
        logits = self.runner.forward([rows for _, rows in shares])
        for (indices, rows), own in zip(shares, logits, strict=True):
            self._advance([leaves[i] for i in indices], rows)
            if not rows.logits:
                continue  # a prompt is not through yet
            for index, answer in zip(indices, self._answers([leaves[i] for i in indices], own), strict=True):
                answers[index] = answer
        return answers

    def _rows(self, session_id: str, leaves: Sequence[Leaf], chunk: int) -> Rows:
        cache = self._sessions[session_id].cache
        return cache.tree_rows(leaves) if leaves[0].path else cache.context_rows(chunk)

    def _advance(self, leaves: Sequence[Leaf], rows: Rows) -> None:
        cache = self._sessions[leaves[0].session_id].cache
        if leaves[0].path:
            cache.tree_done(leaves, rows)
        else:
            cache.context_done(len(rows.token_ids))

    def _answers(self, leaves: Sequence[Leaf], logits: Tensor) -> Sequence[Answer]:
        """logits: (len(leaves), V), or (len(leaves), H) of a reduced vocabulary."""
        session = self._sessions[leaves[0].session_id]
        given = session.given
        ids = self._draft_ids
        if ids is not None and (session.context is not None or given.sampling.changes_argmax):
            logits, ids = self._spread(logits, ids), None
        if ids is None:
            logits = logits[:, : given.vocab_size]
        try:
            if session.context is not None:
                lists = [
                    penalised(row, given.sampling, session.context, leaf.path, self._shortlist)
                    if session.ends.isdisjoint(leaf.path)
                    else NOTHING
                    for row, leaf in zip(logits, leaves, strict=True)
                ]
            else:
                size = given.branching if given.sampling.greedy else self._shortlist
                lists = shortlists(logits, given.sampling, size, ids)
        except GraftreeError as error:
            return [error] * len(leaves)
        ranked: list[list[Candidate]] = []
        for leaf, (token_ids, log_q) in zip(leaves, lists, strict=True):
            ranked.append(rank(token_ids, log_q, given.sampling, leaf.position, given.branching))
        return ranked

    def _spread(self, logits: Tensor, draft_ids: Tensor) -> Tensor:
        """(n, V) from (n, H): tokens that the head does not have are impossible."""
        whole = torch.full((logits.shape[0], self.vocab_size), -torch.inf, device=logits.device)
        return whole.index_copy_(1, draft_ids, logits)


def _affordable(loaded: LoadedModel, wanted: int) -> int:
    """KV tokens: what is wanted, within the memory an SSM may take, but at least one full sequence."""
    model, config = loaded.model, loaded.model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
    room = _CPU_BYTES
    if model.device.type == "cuda":
        room = int(torch.cuda.mem_get_info(model.device)[0] * _GPU_SHARE)
    return max(min(wanted, room // token_bytes), loaded.spec.max_context + 1024)

"""Trees grown along recorded texts: how many of their tokens the LLM would have taken, without the LLM.

Everything that makes a tree is the product's own: drafters, `Engine` and living trees of the speculator pod, and the
router's `MergedTree` with its calibration. What is missing is the wire and time: a tree is cut when all speculators
have grown theirs to the end, and the recorded text says which path is taken.

Trees that grow best first live on from step to step. Those of a fixed shape are grown anew at every root, as in
SpecInfer: a branch that survives a step has the shape of lower levels.

Many trees go along one text side by side, each from root to root at its own pace, so that an SSM is asked about a
node of the text once (`bench.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.recording import Recording
from graftree.tree import MAX_TREE_DEPTH, MAX_TREE_NODES, TokenTree, node_id, root_id
from graftree.v1.speculation_pb2 import DraftOpen, TreeDelta
from router.budget import FixedBudget
from router.drafts import LIVING_FACTOR
from router.merge import MergedTree
from router.priors import Priors
from router.record import Record


@dataclass(frozen=True)
class Setting:
    """One way of drafting.

    Attributes:
        speculators: names of the drafters whose trees are merged.
        tree: kind of the living trees, as the speculator's configuration has it.
        budget, depth: of the tree that is verified.
        forced: every token is a root, whatever was accepted: for counting how often a root's children hold the next
            token.
    """

    speculators: tuple[str, ...]
    tree: str
    budget: int
    depth: int
    forced: bool = False

    @property
    def anew(self) -> bool:
        """Trees are grown anew at every root."""
        return self.forced or self.tree != "best_first"

    @property
    def living_nodes(self) -> int:
        """Of each speculator's tree."""
        return self.budget if self.anew else min(LIVING_FACTOR * self.budget, MAX_TREE_NODES)

    @property
    def living_depth(self) -> int:
        """Of each speculator's tree."""
        return self.depth if self.anew else min(LIVING_FACTOR * self.depth, MAX_TREE_DEPTH)


@dataclass(frozen=True)
class Step:
    """One verify step.

    Attributes:
        drafted: nodes of the tree that was verified.
        accepted: of these, the ones whose tokens were delivered.
        delivered: tokens that reach the client, the bonus token among them unless the text ended before it.
    """

    drafted: int
    accepted: int
    delivered: int


def followed(tree: TokenTree, future: Sequence[int]) -> tuple[int, ...]:
    """The nodes of a tree that a text follows from its root."""
    nodes: list[int] = []
    children, node = tree.children(), -1
    for token in future:
        found = children[node].get(token)
        if found is None:
            break
        nodes.append(found)
        node = found
    return tuple(nodes)


class Walk:
    """One tree on its way along one text.

    Args:
        name: of its sessions.
        salt: the text's: trees of one text share it.
        vocab_size: the LLM's.
        priors: what trees of the same setting have learnt about the speculators.
        watch: told of each step's tree and the nodes taken, before the tree moves on.

    Attributes:
        session: its name on the speculators now.
        length: tokens of the output committed so far.
        steps: verify steps so far, the prompt's own, which has no tree, first.
        promises: node id -> speculator -> the log probability it gave the token; kept for `watch` only.
    """

    def __init__(
        self,
        name: str,
        recording: Recording,
        setting: Setting,
        *,
        salt: int,
        vocab_size: int,
        priors: Priors,
        watch: Watch | None = None,
    ) -> None:
        self.name, self.recording, self.setting, self.salt = name, recording, setting, salt
        self.session = name
        self.length = 0
        self.steps: list[Step] = []
        self.promises: dict[int, dict[str, float]] = {}
        self._vocab_size, self._watch, self._priors = vocab_size, watch, priors
        self._records: dict[str, Record] = {}
        self._unfinished = set(setting.speculators)
        self.tree = self._root()

    def _root(self) -> MergedTree:
        return MergedTree(
            root_id(self.salt, self._text),
            vocab_size=self._vocab_size,
            max_nodes=2 * self.setting.living_nodes,  # with those that better ones displaced
            max_depth=self.setting.living_depth,
            record=self._record,
            agreement=self._priors.agreement,
        )

    def _record(self, kind: str) -> Record:
        if kind not in self._records:
            self._records[kind] = self._priors.record(kind)
        return self._records[kind]

    @property
    def _text(self) -> tuple[int, ...]:
        """What is committed."""
        return (*self.recording.prompt.token_ids, *self.recording.output[: self.length])

    @property
    def committed(self) -> int:
        """Tokens of prompt and output."""
        return len(self.recording.prompt.token_ids) + self.length

    @property
    def most(self) -> int:
        """Longest prompt and output."""
        return len(self.recording.prompt.token_ids) + len(self.recording.output)

    @property
    def grown(self) -> bool:
        """Every speculator has grown its tree to the end."""
        return not self._unfinished

    def request(self) -> DraftOpen:
        """What opens its session on each speculator, as the text is now."""
        return DraftOpen(
            session_id=self.session,
            salt=self.salt,
            token_ids=self._text,
            prompt_tokens=len(self.recording.prompt.token_ids),
            sampling=self.recording.params.to_proto(),
            max_nodes=self.setting.living_nodes,
            max_depth=self.setting.living_depth,
            vocab_size=self._vocab_size,
            max_length=self.most,
        )

    def take(self, speculator: str, delta: TreeDelta) -> None:
        """A speculator has grown."""
        self.tree.add(f"{speculator}/{self.name}", delta)
        if self._watch is not None:
            for parent, token, log_prob in zip(delta.parent_ids, delta.token_ids, delta.log_probs, strict=True):
                self.promises.setdefault(node_id(parent, token), {})[speculator] = log_prob
        if delta.complete and delta.committed_length == self.committed:
            self._unfinished.discard(speculator)

    def step(self) -> tuple[int, ...]:
        """Verify and re-root; the prompt's own step brings the first token.

        Returns:
            The tokens delivered.
        """
        future = self.recording.output[self.length :]
        tree = TokenTree(0)
        if self.length:
            room = self.most - self.committed - 1  # the bonus token needs a place too
            tree = self.tree.cut(FixedBudget(self.setting.budget), min(self.setting.depth, room)).tree
        path = followed(tree, future)
        delivered = 1 if self.setting.forced else min(len(path) + 1, len(future))
        self.steps.append(Step(len(tree), min(len(path), delivered), delivered))
        if self._watch is not None and self.length:
            self._watch(self, tree, path)
        tokens = future[:delivered]
        self.tree.reroot(tokens)
        self.length += delivered
        if self.setting.anew:
            self.tree = self._root()
            self.promises.clear()
            self.session = f"{self.name}/{self.length}"
        self._unfinished = set(self.setting.speculators)
        return tokens


Watch = Callable[[Walk, TokenTree, Sequence[int]], None]

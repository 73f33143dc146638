"""`replay`: the walks of many settings along many recorded texts, with the real speculators' engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from bench.recording import Recording
from bench.replay import Setting, Walk, Watch
from graftree.config import SpeculatorConfig, build
from graftree.noise import mix64
from graftree.v1.speculation_pb2 import TreeDelta
from router.priors import Priors
from speculator_service import shapes
from speculator_service.drafters.base import Drafter
from speculator_service.engine import Engine
from speculator_service.events import Close, Commit, Event, Failed, Open
from speculator_service.limits import Limits
from speculator_service.router_stream import delta_of

BATCH_LEAVES = 4096  # so that every session gets as many leaves at once as in a pod of its own


class Pod:
    """A speculator without its wire.

    Args:
        drafter: several pods may use it, one at a time.
        config: kind and limits of its trees.
        sink: takes each session's deltas.
    """

    def __init__(self, drafter: Drafter, config: SpeculatorConfig, sink: Callable[[str, TreeDelta], None]) -> None:
        self._sink = sink
        self.error: Exception | None = None
        self._limits = Limits(
            max_sessions=config.max_sessions,
            max_nodes=config.max_nodes,
            max_depth=config.max_depth,
            branching=config.branching,
            shape=shapes.parse(config.tree),
            vocab_size=drafter.vocab_size,
            max_context=drafter.max_context,
        )
        self._engine = Engine(drafter, batch_leaves=BATCH_LEAVES, deliver=self._deliver)
        self._engine.start()

    def open(self, walk: Walk) -> None:
        request = walk.request()
        session = self._limits.session(request.session_id, request)
        tree = self._limits.tree(session, request.max_depth)
        self._engine.submit([Open(session, tree, 0, self._limits.drawing(session, request))])

    def commit(self, walk: Walk, tokens: tuple[int, ...]) -> None:
        self._engine.submit([Commit(walk.session, tokens, walk.committed - len(tokens), 0)])

    def close(self, session: str) -> None:
        self._engine.submit([Close(session)])

    async def stop(self) -> None:
        await self._engine.stop()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                self.error = event.error
            elif (delta := delta_of([event])) is not None:
                self._sink(event.session_id, delta)


# Speculator and setting: what pods learn in one setting is not known in another.
PodKey = tuple[str, Setting]


class Stand:
    """Drafters, and the pods made of them for each setting, which remember what texts have taught them.

    Args:
        drafters: by name; models as `Kept`.
        config: of the pods, but for drafter and tree.
        vocab_size: the LLM's.
    """

    def __init__(self, drafters: Mapping[str, Drafter], config: Mapping[str, Any], vocab_size: int) -> None:
        self._drafters, self._config, self._vocab_size = drafters, dict(config), vocab_size
        self._priors: dict[Setting, Priors] = {}
        self._walks: dict[str, Walk] = {}
        self._pods: dict[PodKey, Pod] = {}
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stop())
        self._runner.close()

    async def _stop(self) -> None:
        for pod in self._pods.values():
            await pod.stop()

    def replay(
        self,
        recordings: Sequence[Recording],
        settings: Sequence[Setting],
        *,
        horizon: int,
        watch: Mapping[Setting, Watch] | None = None,
    ) -> dict[Setting, list[Walk]]:
        """Walk every setting along every recording.

        Args:
            recordings: all at once, so as many as the SSMs' caches hold.
            horizon: no step begins at or behind this many tokens of output. Where recordings go on for a tree's depth
                behind it, no step is cut short, and tokens per step are unbiased (Wald's identity).
            watch: what looks on at each step of a setting.

        Returns:
            Per setting one walk per recording, finished.

        Raises:
            GraftreeError: a speculator failed.
        """
        walks: dict[Setting, list[Walk]] = {setting: [] for setting in settings}
        for setting in settings:
            for index, recording in enumerate(recordings):
                walk = Walk(
                    f"walk-{len(self._walks)}",
                    recording,
                    setting,
                    salt=mix64(index + 1),
                    vocab_size=self._vocab_size,
                    priors=self._priors.setdefault(setting, Priors()),
                    watch=(watch or {}).get(setting),
                )
                walks[setting].append(walk)
                self._walks[walk.name] = walk
        try:
            self._runner.run(self._walk(list(self._walks.values()), horizon))
        finally:
            self._walks.clear()
        return walks

    async def _walk(self, walks: Sequence[Walk], horizon: int) -> None:
        """From token to token: a tree moves when the roots of all trees of its text have come as far."""
        for walk in walks:
            for pod in self._own(walk):
                pod.open(walk)
        due = list(walks)
        news: dict[Walk, tuple[str, tuple[int, ...]]] = {}
        while due or news:
            await self._grown(due)
            for walk in due:
                session, tokens = walk.session, walk.step()
                if walk.length < min(horizon, len(walk.recording.output)):
                    news[walk] = session, tokens
                    continue
                for pod in self._own(walk):
                    pod.close(session)
            position = min((walk.length for walk in news), default=0)
            due = [walk for walk in news if walk.length == position]
            for walk in due:
                self._move(walk, *news.pop(walk))

    def _move(self, walk: Walk, session: str, tokens: tuple[int, ...]) -> None:
        for pod in self._own(walk):
            if walk.setting.anew:
                pod.open(walk)  # first, so that the text stays open
                pod.close(session)
            else:
                pod.commit(walk, tokens)

    async def _grown(self, walks: Sequence[Walk]) -> None:
        """Wait until their trees have grown to the end."""
        while not all(walk.grown for walk in walks):
            for pod in self._pods.values():
                if pod.error is not None:
                    raise pod.error
            await asyncio.sleep(0)

    def _own(self, walk: Walk) -> Iterator[Pod]:
        for speculator in walk.setting.speculators:
            key = speculator, walk.setting
            if key not in self._pods:
                self._pods[key] = self._pod(key)
            yield self._pods[key]

    def _pod(self, key: PodKey) -> Pod:
        speculator, setting = key

        def sink(session: str, delta: TreeDelta) -> None:
            walk = self._walks.get(session.partition("/")[0])
            if walk is not None and walk.session == session:
                walk.take(speculator, delta)

        config = build(SpeculatorConfig, {**self._config, "drafter": speculator, "tree": setting.tree})
        return Pod(self._drafters[speculator], config, sink)

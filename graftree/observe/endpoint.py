"""`MetricsEndpoint`: a pod's metrics over HTTP, in Prometheus' format, on an address of their own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from graftree.errors import ConfigError
from graftree.observe.exports import Export, Reading
from graftree.observe.histogram import Histogram
from graftree.observe.http_server import serve

READ_SECONDS = 5.0  # an event loop that has no time for a scrape within this makes it fail, visibly

_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


def split_address(key: str, address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises: ConfigError names `key`."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(key, address, "host:port (port 0 = any free one), or empty = off")
    return match["six"] or match["host"], int(match["port"])


class PodCollector(Collector):
    """Reads a pod's exports, on the pod's event loop, when a scrape comes.

    Args:
        pod: what the exports are read from.
        loop: the event loop that owns it.
    """

    def __init__(self, exports: Sequence[Export[Any]], pod: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._exports, self._pod, self._loop = tuple(exports), pod, loop

    def describe(self) -> Iterable[Metric]:
        return ()  # without it, registering would collect

    def collect(self) -> Iterator[Metric]:
        readings = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(READ_SECONDS)
        for export, reading in zip(self._exports, readings, strict=True):
            if reading is not None:
                yield _family(export, reading)

    async def _read(self) -> list[Reading | None]:
        return [export.read(self._pod) for export in self._exports]


def _family(export: Export[Any], reading: Reading) -> Metric:
    if isinstance(reading, Histogram):
        return HistogramMetricFamily(export.name, export.help, buckets=reading.cumulative(), sum_value=reading.sum)
    kind = CounterMetricFamily if export.kind == "counter" else GaugeMetricFamily
    family = kind(export.name, export.help, labels=export.labels)
    values = reading.items() if not isinstance(reading, int | float) else [((), float(reading))]
    for labels, value in values:
        family.add_metric([str(label) for label in labels], float(value))
    return family


class MetricsEndpoint:
    """Serves /metrics from a thread until closed.

    Args:
        listen: host:port; port 0 = any free one.

    Raises:
        ConfigError: names metrics_listen.
    """

    def __init__(self, listen: str, exports: Sequence[Export[Any]], pod: Any) -> None:
        host, port = split_address("metrics_listen", listen)
        registry = CollectorRegistry()
        registry.register(PodCollector(exports, pod, asyncio.get_running_loop()))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        try:
            self._server = serve(make_wsgi_app(registry), host, port)
        except (OSError, OverflowError) as error:
            raise ConfigError("metrics_listen", listen, f"cannot listen there: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.server_port}"

    async def close(self) -> None:
        """Stop; a scrape under way is broken off."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

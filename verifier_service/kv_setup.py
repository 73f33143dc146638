"""From a verifier's configuration to its `KvCache`."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from redis.asyncio import Redis

from graftree.config import VerifierConfig
from graftree.errors import ConfigError
from graftree.models.kv_codec import BlockFormat, Packing
from graftree.models.paged import PagedKV
from graftree.security.secrets import RedisCredentials
from graftree.store.connection import connect
from graftree.store.kv_blocks import BlockStore
from verifier_service.engine import Runner
from verifier_service.kv_cache import KvCache
from verifier_service.kv_choice import Choice, LoadTimes
from verifier_service.kv_loader import BATCHES, LOADS
from verifier_service.step_times import StepTimes

log = structlog.get_logger(__name__)

_CONNECTIONS = LOADS * BATCHES + 4  # and the writer, deletions, the question whether Redis is back


def client(config: VerifierConfig) -> Redis | None:
    """The KV Redis, None where there is none. Nothing is sent; call it before anything slow is done.

    Raises:
        ConfigError: names a key that cannot be, or contradicts another one.
    """
    if not config.kv_redis:
        return None
    if not config.prefix_cache:
        raise ConfigError("kv_redis", "", "unset without prefix_cache: blocks are found by their texts")
    if config.deterministic and config.kv_packing != Packing.NONE:
        raise ConfigError("kv_packing", config.kv_packing, "none, for an output that is the same to the last bit")
    credentials = RedisCredentials.given(config.kv_redis_username, config.kv_redis_password_file, keys="kv_redis")
    return connect(config.kv_redis, key="kv_redis", credentials=credentials, max_connections=_CONNECTIONS)


def kv_cache(
    redis: Redis | None,
    config: VerifierConfig,
    runner: Runner,
    step_times: StepTimes,
    changed: Callable[[bool], None],
) -> KvCache | None:
    """The verifier's way to its KV Redis; None where it has none.

    Args:
        changed: called when Redis went away (False) or is back (True).
    """
    if redis is None:
        return None
    if not isinstance(runner.kv, PagedKV):
        log.warning("no KV Redis: this model has no KV", model=runner.spec.name)
        return None
    # A deterministic verifier's rows are its own to the last bit; others' are theirs to within rounding.
    space = config.kv_packing + ("-deterministic" if config.deterministic else "")
    choice = Choice(
        LoadTimes(),
        lambda: step_times.latest,
        block_size=config.block_size,
        step_tokens=config.step_tokens,
        from_tokens=config.kv_load_tokens,
        wait_seconds=config.kv_wait_seconds,
    )
    return KvCache(
        BlockStore(redis, space=space, ttl_seconds=config.kv_ttl_seconds),
        BlockFormat.of(runner.kv, Packing(config.kv_packing)),
        choice,
        queue_blocks=config.kv_queue_blocks,
        ttl_seconds=config.kv_ttl_seconds,
        changed=changed,
    )

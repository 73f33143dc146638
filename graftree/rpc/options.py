"""Channel and server options, the same on both ends of every connection."""

from __future__ import annotations

# 16 MiB holds a 1M-token prompt (packed varints) and stops anything sillier.
MAX_MESSAGE_BYTES = 16 << 20

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # gRPC waits for this one too, a minute by default: without it a peer that is silent is lost much later.
    ("grpc.http2.ping_timeout_ms", 5_000),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # A channel per peer: streams of different peers must not share one TCP connection's fate.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

SHORTEST_SILENCE_SECONDS = 0.5  # servers mind pings that come oftener than every 200 ms


def channel_options(silence_seconds: float) -> list[tuple[str, int]]:
    """CHANNEL_OPTIONS for a peer that counts as lost when it has answered no ping for so long, about."""
    half = round(max(SHORTEST_SILENCE_SECONDS, silence_seconds) * 500)
    changed = {
        "grpc.keepalive_time_ms": half,
        "grpc.keepalive_timeout_ms": half,
        "grpc.http2.ping_timeout_ms": half,
    }
    return [*((name, value) for name, value in CHANNEL_OPTIONS if name not in changed), *changed.items()]


SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 200),  # a client may want to know soon (stall_seconds)
    # The default of 1000 answers a burst with bare CANCELLED; admission is ours to decide, with RetryInfo.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    # Likewise a call that could not be looked at for so many seconds (30 by default); its own deadline is earlier.
    ("grpc.server_max_unrequested_time_in_server", 3600),
    # A connection that never says what it is (two minutes by default).
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Two servers on one port would split its connections silently.
    ("grpc.so_reuseport", 0),
]

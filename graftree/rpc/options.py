"""Channel and server options, the same on both ends of every connection."""

from __future__ import annotations

# 16 MiB holds a 1M-token prompt (packed varints) and stops anything sillier.
MAX_MESSAGE_BYTES = 16 << 20

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
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

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 200),  # a client may want to know soon (stall_seconds)
    # The default of 1000 answers a burst with bare CANCELLED; admission is ours to decide, with RetryInfo.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    # Likewise a call that could not be looked at for so many seconds (30 by default); its own deadline is earlier.
    ("grpc.server_max_unrequested_time_in_server", 3600),
    # Two servers on one port would split its connections silently.
    ("grpc.so_reuseport", 0),
]

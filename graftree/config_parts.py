"""Parts of `graftree.config.PodConfig`: what every tier tells about itself, and how it is kept safe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# A port from 1 to 65535, and an address: a name, an IPv4 or a bracketed IPv6 address, with one.
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
ADVERTISE = rf"^$|^{_HOST}:{_PORT}$"
LISTEN = rf"^$|^0$|^{_HOST}:(0|{_PORT})$"
TRACE_ENDPOINT = rf"^$|^https?://{_HOST}(:{_PORT})?/?$|^file:.+$"


class Config(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ObservedConfig(Config):
    """Metrics, traces, logs."""

    metrics_listen: Annotated[str, Field(pattern=LISTEN)] = Field(
        "", description="host:port of the Prometheus metrics over HTTP, port 0 = any free one; empty or 0 = off"
    )
    trace_endpoint: Annotated[str, Field(pattern=TRACE_ENDPOINT)] = Field(
        "",
        description="OTLP/gRPC collector, http://host:port or https://..., or file:PATH for JSON lines; empty = off",
    )
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="share of requests traced, unless the client's trace context decides; 0 = none of one's own"
    )
    log_level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = Field(
        "info", description="debug, info, warning or error"
    )
    log_format: Literal["json", "console"] = Field("json", description="json, or console for people")


class SecuredConfig(Config):
    """TLS of the pod's own port, and the way to Redis. Files may be replaced while the pod runs."""

    tls_certificate: str = Field("", description="PEM file: certificate chain of this pod's port; empty = plaintext")
    tls_key: str = Field("", description="PEM file: its private key")
    tls_client_ca: str = Field(
        "", description="PEM file: authorities one of which must have certified each client; empty = anybody"
    )
    health_listen: Annotated[str, Field(pattern=LISTEN)] = Field(
        "",
        description="host:port of a second, plaintext port with the health service alone, for probes; empty = none",
    )
    redis_username: str = Field(
        "", description="ACL user of Redis, with redis_password_file; empty = the default one"
    )
    redis_password_file: str = Field(
        "", description="file with the password of Redis, read at each connection; empty = the URL's, or none"
    )


class KvStoreConfig(Config):
    """The Redis in which verifiers share KV blocks."""

    kv_redis: str = Field("", description="URL of the KV Redis, where verifiers share KV blocks; empty = none")
    kv_redis_username: str = Field(
        "", description="ACL user of the KV Redis, with kv_redis_password_file; empty = the default one"
    )
    kv_redis_password_file: str = Field(
        "", description="file with the password of the KV Redis, read at each connection; empty = the URL's, or none"
    )
    kv_packing: Literal["none", "int8"] = Field(
        "none",
        description="how blocks are stored there: none = bit by bit, int8 = in a quarter to a half of the size, each "
        "element off by at most 1/254 of its head's largest; blocks of one packing are not seen by the other",
    )
    kv_ttl_seconds: Annotated[float, Field(ge=1, le=30 * 86_400)] = Field(
        3600.0, description="how long a block is kept there after it was last used"
    )
    kv_queue_blocks: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        4096, description="most blocks that wait to be written there; further ones are not written"
    )
    kv_wait_seconds: Annotated[float, Field(gt=0, le=60)] = Field(
        2.0, description="longest wait of a session for blocks from there; what has not come by then is computed"
    )
    kv_load_tokens: Annotated[int, Field(ge=0)] = Field(
        0,
        description="load blocks from there where they save the computing of so many tokens; 0 = where loading is "
        "quicker by what both take, and never wait longer than computing takes",
    )


class EdgeConfig(Config):
    """The router's two sides: its clients, and the pods behind it."""

    api_keys: str = Field(
        "", description="JSON file with the API keys that may ask, and their limits; empty = everybody may"
    )
    audit_log: str = Field(
        "", description="file for one JSON line per call, - = stderr; empty = - with api_keys, else none"
    )
    peer_ca: str = Field("", description="PEM file: authorities of verifiers and speculators; empty = plaintext")
    peer_certificate: str = Field("", description="PEM file: certificate chain shown to verifiers and speculators")
    peer_key: str = Field("", description="PEM file: its private key")
    peer_name: str = Field(
        "", description="name in verifiers' and speculators' certificates; empty = the address they are reached at"
    )

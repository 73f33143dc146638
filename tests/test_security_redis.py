"""Redis over TLS, as an ACL user with just enough rights, with a password that comes from a file."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as SyncRedis
from redis.exceptions import ConnectionError, NoPermissionError

from graftree import LocalStack
from graftree.config import RouterConfig, load
from graftree.errors import ConfigError
from graftree.security.secrets import RedisCredentials, read_secret
from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from router.pod import RouterPod
from tests.certificates import Identity, authority, bundle
from tests.fakes import FakeSpeculator, FakeVerifier
from tests.router_harness import PROMPT, harness

RULE = re.search(r"ACL SETUSER graftree (.*)", (Path(__file__).parent.parent / "docs/security.md").read_text())


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A Redis of the test's own, with the user that docs/security.md describes; its password is hunter2."""
    assert RULE is not None
    with EmbeddedRedis() as running:
        with SyncRedis.from_url(running.url) as admin:
            admin.execute_command("ACL", "SETUSER", "graftree", *RULE[1].replace("PASSWORD", "hunter2").split())
        yield running


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("hunter2\n")
    return path


def users(server: EmbeddedRedis) -> set[str]:
    with SyncRedis.from_url(server.url) as admin:
        return {each["user"] for each in admin.client_list()}


async def test_the_documented_rights_are_enough(server: EmbeddedRedis, secret: Path) -> None:
    """A router lives its whole life as that user: registry, sessions, commits, a request taken up again."""
    identity = {"redis_username": "graftree", "redis_password_file": str(secret)}
    pods = FakeVerifier("v"), FakeSpeculator("s")
    async with harness(*pods, redis=server, replay_seconds=0, **identity) as running:
        request = {"token_ids": PROMPT, "max_new_tokens": 20, "request_id": "0c6d3f7e-54a5-4a0e-9a6b-0c3e5f6d7a81"}
        first = await running.client.generate(**request)
        assert "graftree" in users(server)
        committer = running.router.committer
        assert committer.commits_durable > 0
        assert (committer.commits_degraded, committer.degraded) == (0, False)
        again = await running.client.generate(**request)
        assert again.token_ids == first.token_ids
        assert running.metrics.resumed == 1
        registered = {pod.pod_id for pod in await running.router.registry.pods()}
        assert running.router.config.pod_id in registered
        await running.router.registry.unregister(running.router.config.pod_id)
        assert running.metrics.commit_failures == 0


async def test_and_no_more(server: EmbeddedRedis, secret: Path) -> None:
    """The same user can neither read another's keys nor list or drop them."""
    redis = connect(server.url, credentials=RedisCredentials("graftree", str(secret)))
    async with redis:
        await redis.ping()
        for command in (("GET", "other"), ("KEYS", "*"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "WHOAMI")):
            with pytest.raises(NoPermissionError):
                await redis.execute_command(*command)


async def test_the_password_is_read_at_each_connection(server: EmbeddedRedis, secret: Path) -> None:
    """A password that was replaced works from the next connection on; a wrong one is an error without it."""
    redis = connect(server.url, credentials=RedisCredentials("graftree", str(secret)))
    async with redis:
        await redis.ping()
        with SyncRedis.from_url(server.url) as admin:
            admin.execute_command("ACL", "SETUSER", "graftree", ">swordfish", "<hunter2")
        await redis.connection_pool.disconnect()
        with pytest.raises(ConnectionError, match="invalid username-password") as caught:
            await redis.ping()
        assert "hunter2" not in str(caught.value)
        await asyncio.to_thread(secret.write_text, "swordfish")
        await redis.ping()


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 5000, b"\xff\xfe"])
def test_a_file_that_holds_no_secret(tmp_path: Path, content: bytes) -> None:
    """Empty, endless or no text: an error that names the key, and not what the file holds."""
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        RedisCredentials("graftree", str(path))
    assert caught.value.key == "redis_password_file"
    assert "xxx" not in str(caught.value)


def test_keys_that_contradict_each_other(tmp_path: Path, secret: Path) -> None:
    """A password in the URL and one in a file, or a user without a password, are refused by key."""
    credentials = RedisCredentials("", str(secret))
    assert credentials.get_credentials() == ("hunter2",)
    with pytest.raises(ConfigError, match="redis") as caught:
        connect("redis://:hunter2@localhost/0", credentials=credentials)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="redis_password_file"):
        read_secret("redis_password_file", str(tmp_path / "missing"))


async def test_a_user_needs_a_password() -> None:
    """redis_username alone is a start-up error."""
    with pytest.raises(ConfigError, match="redis_password_file"):
        async with harness(redis_username="graftree"):
            pass


# TLS.


@asynccontextmanager
async def tls_in_front(server: EmbeddedRedis, identity: Identity, folder: Path) -> AsyncIterator[int]:
    """A port that speaks TLS and hands on to the server's socket."""
    files = identity.write(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield front.sockets[0].getsockname()[1]
    finally:
        front.close()


async def test_redis_over_tls(server: EmbeddedRedis, secret: Path, tmp_path: Path) -> None:
    """rediss:// checks the server's certificate: with its authority all works, with another's nothing is sent."""
    root, stranger = authority(), authority()
    good, bad = bundle(tmp_path / "ca.pem", root), bundle(tmp_path / "stranger.pem", stranger)
    credentials = RedisCredentials("graftree", str(secret))
    async with tls_in_front(server, root.issue("localhost"), tmp_path / "redis") as port:
        url = f"rediss://127.0.0.1:{port}/0"
        redis = connect(f"{url}?ssl_ca_certs={good}", credentials=credentials)
        async with redis:
            assert await redis.ping()
            assert "graftree" in users(server)
        wrong = connect(f"{url}?ssl_ca_certs={bad}", credentials=credentials)
        async with wrong:
            with pytest.raises(ConnectionError, match="certificate verify failed"):
                await wrong.ping()


def test_no_password_on_a_command_line(tmp_path: Path) -> None:
    """The pods of a stack get the URLs of their Redis in their environment: a command line is everybody's to read."""
    with EmbeddedRedis() as server:
        with SyncRedis.from_url(server.url) as admin:
            admin.config_set("requirepass", "hunter2")
        url = f"{server.url}?password=hunter2"
        kv = {"kv_redis": url, "step_time_seconds": 0}
        with LocalStack(
            "random:llama?layers=1", [], redis=url, threads=1, log_directory=tmp_path, verifier_options=kv
        ) as stack:
            pods: list[Any] = [*stack.pods("router"), *stack.pods("verifier")]
            commands = [Path(f"/proc/{pod.pid}/cmdline").read_text() for pod in pods]
    assert all("graftree.local.child" in command and "hunter2" not in command for command in commands)
    assert "hunter2" not in "".join(path.read_text() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ([], {"GRAFTREE_REDIS_PASSWORD": "hunter2"}),
        (["--redis-password", "hunter2"], {}),
        (["--redis-password=hunter2"], {}),
        ([], {"GRAFTREE_REDIS": "redis://user:hunter2@host:port/0"}),
    ],
)
async def test_a_mistake_repeats_no_secret(arguments: list[str], environ: dict[str, str]) -> None:
    """A password under a key that does not exist, or in a malformed URL, is not in the error."""
    with pytest.raises(ConfigError) as caught:
        RouterPod(load(RouterConfig, arguments, environ))
    assert "hunter2" not in str(caught.value)

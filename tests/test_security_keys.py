"""API keys: the file, the limits, tenants that never meet, and the line that says who asked."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from graftree.cli import main, parser
from graftree.cli.access import client_options
from graftree.client import AsyncClient
from graftree.errors import AlreadyExists, ConfigError, InvalidArgument, ResourceExhausted, Unauthenticated
from graftree.security.keys import ApiKey, KeyRing, digest, new_key
from router.caller import Caller, public_id
from router.limits import Allowance, Bucket
from tests.certificates import authority, bundle
from tests.fakes import FakeVerifier
from tests.router_harness import PROMPT, Harness, harness, until

ID = "0c6d3f7e-54a5-4a0e-9a6b-0c3e5f6d7a81"


def entry(key: str, name: str, tenant: str = "", **more: Any) -> dict[str, Any]:
    return {"name": name, "tenant": tenant or name, "sha256": digest(key), **more}


def write(path: Path, *entries: dict[str, Any]) -> str:
    path.write_text(json.dumps({"keys": entries}))
    return str(path)


# The file.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "JSON"),
        ("[]", "the whole"),
        ('{"keys": [{}]}', r"keys\.0\.name"),
        (json.dumps({"keys": [entry("k", "two words")]}), r"keys\.0\.name"),
        (json.dumps({"keys": [entry("k", "a", concurrent=-1)]}), r"keys\.0\.concurrent"),
        (json.dumps({"keys": [entry("k", "a", colour="red")]}), r"keys\.0\.colour"),
        (json.dumps({"keys": [{"name": "a", "tenant": "a", "sha256": "secret"}]}), r"keys\.0\.sha256"),
        (json.dumps({"keys": [entry("k", "a"), entry("l", "a")]}), "name of its own"),
        (json.dumps({"keys": [entry("k", "a"), entry("k", "b")]}), "sha256 of its own"),
    ],
)
def test_a_wrong_file_names_key_and_place(tmp_path: Path, content: str, words: str) -> None:
    """What is wrong in the file is said with its place, and no value of it is repeated: it may be a secret."""
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        KeyRing(str(path))
    assert caught.value.key == "api_keys"
    assert "secret" not in str(caught.value)


def test_the_file_is_followed(tmp_path: Path) -> None:
    """A key that is added opens, one that is taken out or has expired does not; a broken file changes nothing."""
    old, fresh = new_key(), new_key()
    path = tmp_path / "keys.json"
    ring = KeyRing(write(path, entry(old, "old")))
    assert ring.find(old).tenant == "old"
    for wrong in (fresh, "", digest(old), old + "x", "x" * 100_000):
        with pytest.raises(Unauthenticated):
            ring.find(wrong)
    path.write_text("{")
    assert ring.find(old).name == "old"
    assert ring.files.failures == 1
    write(path, entry(fresh, "fresh"), entry(old, "old", expires="2020-01-01T00:00:00Z"))
    assert ring.find(fresh).name == "fresh"
    with pytest.raises(Unauthenticated):
        ring.find(old)


def test_keys_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command's entry opens with the command's key, which appears on stderr alone."""
    assert main(["keys", "new", "alice", "--tenant", "acme", "--concurrent", "3"]) == 0
    said = capsys.readouterr()
    key = said.err.split()[-1]
    path = tmp_path / "keys.json"
    path.write_text(f'{{"keys": [{said.out}]}}')
    assert KeyRing(str(path)).find(key) == ApiKey(name="alice", tenant="acme", sha256=digest(key), concurrent=3)
    assert key not in said.out
    assert main(["keys", "new", "two words"]) == 2


# Limits.


def test_bucket() -> None:
    """So much at once, so much a second, and what was taken beyond is paid back by waiting."""
    now = 0.0
    bucket = Bucket(2.0, 4.0, lambda: now)
    bucket.take(4.0)
    assert bucket.wait(1.0) == 0.5
    bucket.take(2.0)
    assert bucket.wait(1.0) == 1.5
    now = 100.0
    assert bucket.wait(4.0) == 0.0
    assert bucket.wait(5.0) == 0.5


def test_allowance() -> None:
    """Each limit refuses by name and with the time to wait; without limits nothing is refused."""
    now = 0.0
    key = ApiKey(name="a", tenant="a", sha256=digest("k"), requests_per_second=0.5, burst=2, tokens_per_minute=60)
    allowance = Allowance(key, lambda: now)
    allowance.enter()
    allowance.enter()
    with pytest.raises(ResourceExhausted, match=r"0\.5 requests a second") as caught:
        allowance.enter()
    assert caught.value.retry_after_s == 2.0
    allowance.follow(key.model_copy(update={"concurrent": 2}))
    with pytest.raises(ResourceExhausted, match="2 requests under way"):
        allowance.enter()
    allowance.leave()
    allowance.charge(90)
    with pytest.raises(ResourceExhausted, match="60 tokens a minute") as caught:
        allowance.enter()
    assert caught.value.retry_after_s == 31.0
    now = 31.0
    allowance.enter()
    free = Allowance(ApiKey(name="b", tenant="b", sha256=digest("l")), lambda: now)
    for _ in range(1000):
        free.enter()
        free.charge(1_000_000)


def test_ids_are_scoped() -> None:
    """Inside, a request id belongs to its tenant; outside it is what the client chose."""
    assert Caller().scoped(ID) == ID
    assert Caller("acme").scoped(ID) == f"acme:{ID}"
    assert public_id(Caller("acme").scoped(ID)) == public_id(ID) == ID


# The edge.


class Edge:
    """A router with keys for two tenants and an administrator."""

    def __init__(self, running: Harness, keys: dict[str, str], audit: Path, verifier: FakeVerifier) -> None:
        self.running, self.keys, self.audit, self.verifier = running, keys, audit, verifier

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[AsyncClient]:
        async with AsyncClient(self.running.router.address, api_key=self.keys.get(name, name or None)) as client:
            yield client

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@asynccontextmanager
async def edge(tmp_path: Path, **limits: Any) -> AsyncIterator[Edge]:
    """`limits` are those of alice's key."""
    keys = {name: new_key() for name in ("alice", "bob", "root")}
    entries = [
        entry(keys["alice"], "alice", "acme", **limits),
        entry(keys["bob"], "bob", "other"),
        entry(keys["root"], "root", "ops", admin=True),
    ]
    path, audit, verifier = tmp_path / "keys.json", tmp_path / "audit.jsonl", FakeVerifier("v")
    async with harness(verifier, api_keys=write(path, *entries), audit_log=str(audit)) as running:
        yield Edge(running, keys, audit, verifier)


async def test_nobody_asks_without_a_key(tmp_path: Path) -> None:
    """No key and a wrong one are UNAUTHENTICATED for both methods, and nothing reaches a verifier."""
    async with edge(tmp_path) as at:
        for name in ("", "gt_wrong"):
            async with at.client(name) as client:
                with pytest.raises(Unauthenticated):
                    await client.generate(token_ids=PROMPT, max_new_tokens=2)
                with pytest.raises(Unauthenticated):
                    await client.model_info()
        async with at.client("alice") as client:
            assert (await client.generate(token_ids=PROMPT, max_new_tokens=2)).usage.completion_tokens == 2
        assert at.running.metrics.requests == 1
        assert at.running.metrics.errors["UNAUTHENTICATED"] == 4


async def test_pods_are_for_administrators(tmp_path: Path) -> None:
    """A tenant learns the model and its limits, not what stands behind the router."""
    async with edge(tmp_path) as at, at.client("alice") as alice, at.client("root") as root:
        seen, all_of_it = await alice.model_info(), await root.model_info()
    assert seen.pods == ()
    assert [pod.pod_id for pod in all_of_it.pods] == ["v"]
    assert (seen.model, seen.vocab_size) == (all_of_it.model, all_of_it.vocab_size)


async def test_tenants_never_meet(tmp_path: Path) -> None:
    """The same request id is another generation for another tenant, running or finished; one's own is joined."""
    async with edge(tmp_path) as at, at.client("alice") as alice, at.client("bob") as bob:
        mine = await alice.generate(token_ids=PROMPT, max_new_tokens=4, request_id=ID, temperature=1.0)
        theirs = await bob.generate(token_ids=PROMPT, max_new_tokens=4, request_id=ID, temperature=1.0)
        assert mine.request_id == theirs.request_id == ID
        assert mine.seed != theirs.seed  # nobody joined: each had a seed of its own
        again = await alice.generate(token_ids=PROMPT, max_new_tokens=4, request_id=ID, temperature=1.0)
        assert (again.seed, again.token_ids) == (mine.seed, mine.token_ids)
        with pytest.raises(AlreadyExists) as caught:
            await alice.generate(token_ids=[9], max_new_tokens=4, request_id=ID)
        assert "acme" not in str(caught.value)
        await bob.generate(token_ids=[9], max_new_tokens=4, request_id=str(uuid.uuid4()))
        opened = at.verifier.opened
    assert [each.tenant for each in opened] == ["acme", "other", "other"]
    assert len({each.session_id for each in opened}) == 3
    assert at.running.metrics.attached == 1


async def test_tenants_never_meet_in_redis(tmp_path: Path) -> None:
    """Another router finds a tenant's session under the tenant's name only."""
    async with edge(tmp_path) as at, at.client("alice") as alice:
        await alice.generate(token_ids=PROMPT, max_new_tokens=4, request_id=ID)
        store = at.running.router.generations._records._store
        record = await store.load(f"acme:{ID}")
        assert record is not None
        assert record.prompt_token_ids == tuple(PROMPT)
        assert await store.load(ID) is None
        assert await store.load(f"other:{ID}") is None


async def test_limits_at_the_edge(tmp_path: Path) -> None:
    """One more request than allowed is refused with the time to wait; another key's are not."""
    limits = {"concurrent": 1, "tokens_per_minute": 10}
    async with edge(tmp_path, **limits) as at, at.client("alice") as alice, at.client("bob") as bob:
        at.verifier.holding = True
        first = asyncio.ensure_future(alice.generate(token_ids=PROMPT, max_new_tokens=8))
        await at.verifier.until(lambda: bool(at.verifier.held))
        with pytest.raises(ResourceExhausted, match="under way") as caught:
            await alice.generate(token_ids=PROMPT, max_new_tokens=8)
        assert caught.value.retry_after_s > 0
        at.verifier.holding = False
        at.verifier.release()
        await bob.generate(token_ids=PROMPT, max_new_tokens=8)
        await first
        with pytest.raises(ResourceExhausted, match="tokens a minute"):
            await alice.generate(token_ids=PROMPT, max_new_tokens=8)
        refused = [line for line in at.lines() if line["code"] == "RESOURCE_EXHAUSTED"]
        assert [(line["key"], line["tenant"]) for line in refused] == [("alice", "acme")] * 2


async def test_audit(tmp_path: Path) -> None:
    """One line per call: who, what, how it ended and how much it was; no prompt, no answer, no key."""
    async with edge(tmp_path) as at:
        async with at.client("alice") as alice, at.client("gt_wrong") as nobody:
            result = await alice.generate("a secret prompt", max_new_tokens=3)
            await alice.model_info()
            with pytest.raises(Exception, match="max_new_tokens"):
                await alice.generate(token_ids=PROMPT, max_new_tokens=0)
            with pytest.raises(Unauthenticated):
                await nobody.generate("a secret prompt", max_new_tokens=3)
            async with alice.stream(token_ids=PROMPT, max_new_tokens=200) as stream:
                await anext(stream)
        await until(lambda: len(at.lines()) == 5)
        lines, text = at.lines(), at.audit.read_text()
    assert [(line["method"], line["key"], line["tenant"], line["code"]) for line in lines] == [
        ("Generate", "alice", "acme", "OK"),
        ("GetModelInfo", "alice", "acme", "OK"),
        ("Generate", "alice", "acme", "INVALID_ARGUMENT"),
        ("Generate", "", "", "UNAUTHENTICATED"),
        ("Generate", "alice", "acme", "CANCELLED"),
    ]
    first = lines[0]
    assert (first["request_id"], first["completion_tokens"]) == (result.request_id, 3)
    assert first["prompt_tokens"] == result.usage.prompt_tokens
    assert first["seconds"] > 0
    assert first["peer"]
    assert first["timestamp"].endswith("Z")
    assert "secret" not in text
    assert not any(key in text for key in at.keys.values())


def test_an_audit_log_that_cannot_be_written_names_its_key(tmp_path: Path) -> None:
    """A start-up error, not a surprise at the first request."""
    from router.audit import AuditLog

    with pytest.raises(ConfigError, match="audit_log"):
        AuditLog(str(tmp_path / "no" / "such" / "folder"))


def test_the_command_line_shows_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$GRAFTREE_API_KEY and --ca become what the client shows and trusts; a file that is not there names its flag."""
    monkeypatch.setenv("GRAFTREE_API_KEY", "gt_mine")
    chosen = parser().parse_args(["generate", "x", "--target", "router:8000"])
    assert client_options(chosen) == {"api_key": "gt_mine"}
    monkeypatch.delenv("GRAFTREE_API_KEY")
    ca = bundle(tmp_path / "ca.pem", authority())
    options = client_options(parser().parse_args(["up", "--ca", ca]))
    assert options["api_key"] is None
    assert options["credentials"] is not None
    with pytest.raises(InvalidArgument, match="--ca"):
        client_options(parser().parse_args(["up", "--ca", str(tmp_path / "missing")]))

"""TLS between client, router and pods: who gets in, what a rotation does, and what a wrong file says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from graftree import Client, LocalStack
from graftree.errors import ConfigError, Unavailable
from graftree.security.files import WatchedFiles
from graftree.security.tls import ClientTls, ServerTls, TlsFiles, read
from tests.certificates import authority, bundle, channel_credentials

MODEL = "random:llama?layers=1&seed=3"
NAMES = ("tls_certificate", "tls_key", "tls_client_ca")


class World:
    """An authority for pods and routers, one for the public edge, and the files of a stack under them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inside, self.outside, self.stranger = authority("inside"), authority("outside"), authority("stranger")
        inside = bundle(folder / "inside.pem", self.inside)
        self.pod = self.inside.issue("pod.graftree").write(folder / "pod")
        router = self.inside.issue("router.graftree").write(folder / "router")
        self.edge = self.outside.issue("api.example.org").write(folder / "edge")
        self.pods = {
            "tls_certificate": self.pod["certificate"],
            "tls_key": self.pod["key"],
            "tls_client_ca": inside,
        }
        self.router = {
            "tls_certificate": self.edge["certificate"],
            "tls_key": self.edge["key"],
            "peer_ca": inside,
            "peer_certificate": router["certificate"],
            "peer_key": router["key"],
        }

    def stack(self, router: dict[str, Any] | None = None, **options: Any) -> LocalStack:
        return LocalStack(
            MODEL,
            ["ngram"],
            in_process=True,
            threads=1,
            router_options=self.router | (router or {}),
            verifier_options=self.pods,
            speculator_options=self.pods,
            client_options={"credentials": channel_credentials(self.outside)},
            **options,
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stack(world: World) -> Iterator[LocalStack]:
    """TLS at the edge, mutual TLS behind it."""
    with world.stack({"health_listen": "127.0.0.1:0"}) as running:
        yield running


def health(channel: grpc.Channel, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=20).status)


def asks(address: str, credentials: grpc.ChannelCredentials) -> int:
    with grpc.secure_channel(address, credentials, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return health(channel)


def test_answers_come_through(world: World, stack: LocalStack) -> None:
    """A stack whose every connection is TLS answers, with drafts: all tiers found each other."""
    with Client(stack.target, credentials=channel_credentials(world.outside)) as client:
        result = client.generate("to the moon, to the moon, to the", max_new_tokens=8, ignore_eos=True)
        states = {pod.tier: pod.state for pod in client.model_info().pods}
    assert len(result.token_ids) == 8
    assert states == {"verifier": "ready", "speculator": "ready"}


def test_plaintext_and_other_authorities_do_not_get_in(world: World, stack: LocalStack) -> None:
    """The edge answers neither a plaintext client nor convinces one that trusts somebody else."""
    with Client(stack.target) as client, pytest.raises(Unavailable):
        client.generate("x", max_new_tokens=1, timeout=20)
    deceived = Client(stack.target, credentials=channel_credentials(world.stranger))
    with deceived as client, pytest.raises(Unavailable, match=r"(?i)handshake|certificate"):
        client.generate("x", max_new_tokens=1, timeout=20)


def test_pods_let_in_who_shows_a_certificate(world: World, stack: LocalStack) -> None:
    """Mutual TLS: a client of the right authority may ask a verifier; one without, or of another, may not."""
    address = stack.pods("verifier")[0].address
    router = world.inside.issue("router.graftree")
    assert asks(address, channel_credentials(world.inside, router)) == health_pb2.HealthCheckResponse.SERVING
    for own in (None, world.stranger.issue("router.graftree")):
        with pytest.raises(grpc.RpcError) as caught:
            asks(address, channel_credentials(world.inside, own))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_probes_have_a_port_of_their_own(stack: LocalStack) -> None:
    """Kubernetes' probes know no TLS: the health service, and nothing else, is on a plaintext port too."""
    pod: Any = stack.pods("router")[0]
    with grpc.insecure_channel(pod.instance.health_address) as channel:
        assert health(channel, "readiness") == health_pb2.HealthCheckResponse.SERVING
    with Client(pod.instance.health_address) as client, pytest.raises(Exception, match=r"UNIMPLEMENTED|not found"):
        client.generate("x", max_new_tokens=1, timeout=20)


def test_rotation(tmp_path: Path) -> None:
    """Certificates of a new authority take over while the stack runs: old connections go on, new ones use the new."""
    world = World(tmp_path)
    with world.stack() as stack:
        old = channel_credentials(world.outside)
        with Client(stack.target, credentials=old) as before:
            expected = before.generate("x", max_new_tokens=4).token_ids
            outside, inside = authority("outside 2"), authority("inside 2")
            bundle(tmp_path / "inside.pem", world.inside, inside)
            outside.issue("api.example.org").write(tmp_path / "edge")
            inside.issue("pod.graftree").write(tmp_path / "pod")
            inside.issue("router.graftree").write(tmp_path / "router")
            with Client(stack.target, credentials=channel_credentials(outside)) as after:
                assert after.generate("x", max_new_tokens=4).token_ids == expected
            assert before.generate("x", max_new_tokens=4).token_ids == expected
            with Client(stack.target, credentials=old) as late, pytest.raises(Unavailable):
                late.generate("x", max_new_tokens=4, timeout=20)
        # A pod that comes now is reached with the new certificates alone.
        bundle(tmp_path / "inside.pem", inside)
        stack._client_options["credentials"] = channel_credentials(outside)
        stack.add("verifier")
        stack.kill("verifier", 0)
        with Client(stack.target, credentials=channel_credentials(outside)) as after:
            assert after.generate("x", max_new_tokens=4).token_ids == expected


def test_a_name_in_the_certificates(tmp_path: Path) -> None:
    """`peer_name` is checked instead of the address: the right one works, a wrong one reaches nobody."""
    world = World(tmp_path)
    with world.stack({"peer_name": "pod.graftree"}) as stack:
        assert stack.targets
    wrong = world.stack({"peer_name": "other.graftree"}, start_seconds=5.0)
    with pytest.raises(Unavailable), wrong:
        pass


# Files.


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files, good and bad."""
    folder = tmp_path_factory.mktemp("files")
    root = authority()
    good, other = root.issue("a").write(folder / "good"), root.issue("b").write(folder / "other")
    old = root.issue("c", days=-1.0).write(folder / "old")
    rubbish = folder / "rubbish"
    rubbish.write_text("-----BEGIN NOTHING-----")
    return {
        "ca": bundle(folder / "ca.pem", root),
        "certificate": good["certificate"],
        "key": good["key"],
        "other key": other["key"],
        "old certificate": old["certificate"],
        "old key": old["key"],
        "rubbish": str(rubbish),
        "missing": str(folder / "missing"),
        "none": "",
    }


@pytest.mark.parametrize(
    ("certificate", "key", "ca", "named", "words"),
    [
        ("certificate", "none", "none", "tls_key", "together with tls_certificate"),
        ("none", "key", "none", "tls_certificate", "together with tls_key"),
        ("none", "none", "ca", "tls_certificate", "together with tls_client_ca"),
        ("missing", "key", "none", "tls_certificate", "can be read"),
        ("rubbish", "key", "none", "tls_certificate", "PEM certificates"),
        ("certificate", "rubbish", "none", "tls_key", "PEM private key"),
        ("certificate", "other key", "none", "tls_key", "first certificate in tls_certificate"),
        ("certificate", "key", "rubbish", "tls_client_ca", "PEM certificates"),
        ("old certificate", "old key", "none", "tls_certificate", "valid still"),
    ],
)
def test_wrong_files(some: dict[str, str], certificate: str, key: str, ca: str, named: str, words: str) -> None:
    """Each mistake is a start-up error that names its key."""
    with pytest.raises(ConfigError, match=words) as caught:
        ServerTls(TlsFiles(some[certificate], some[key], some[ca], NAMES))
    assert caught.value.key == named


def test_a_client_must_trust_somebody(some: dict[str, str]) -> None:
    """A certificate to show is no reason to believe the other end."""
    names = ("peer_certificate", "peer_key", "peer_ca")
    with pytest.raises(ConfigError, match="peer_ca"):
        ClientTls(TlsFiles(some["certificate"], some["key"], "", names))


def test_a_stack_says_which_key(world: World) -> None:
    """The error comes out of the start of a whole stack too."""
    stack = world.stack({"tls_key": str(world.folder / "nowhere")})
    with pytest.raises(ConfigError, match="tls_key"), stack:
        pass


def test_half_a_rotation_changes_nothing(tmp_path: Path) -> None:
    """Certificate without its key: the pair before stays in force, is said once, and both come together later."""
    root = authority()
    first, second = root.issue("a"), root.issue("a")
    paths = first.write(tmp_path / "pair")
    files = TlsFiles(paths["certificate"], paths["key"], "", NAMES)
    watched = WatchedFiles(files.paths, lambda: read(files))
    assert not watched.refresh()
    Path(paths["certificate"]).write_bytes(second.pem)
    assert not watched.refresh()
    assert not watched.refresh()
    assert (watched.value.certificate, watched.failures) == (first.pem, 2)
    Path(paths["key"]).write_bytes(second.key_pem)
    assert watched.refresh()
    assert (watched.value.certificate, watched.value.key) == (second.pem, second.key_pem)
    assert not watched.refresh()
    Path(paths["key"]).unlink()
    assert not watched.refresh()
    assert watched.value.certificate == second.pem


def test_the_end_of_validity_is_known(some: dict[str, str]) -> None:
    """An alert can warn of a certificate that runs out."""
    material = read(TlsFiles(some["certificate"], some["key"], some["ca"], NAMES))
    assert material.not_after == pytest.approx(time.time() + 86_400, abs=600)

"""Certificates made when a test needs them: authorities, servers and clients, and files of them."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Identity:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def issue(self, name: str, days: float = 1.0) -> Identity:
        """A certificate for `name` and 127.0.0.1, signed by this one."""
        return _make(name, self, authority=False, days=days)

    def write(self, folder: Path) -> dict[str, str]:
        """certificate and key as files; replaces those that are there, as a rotation does."""
        folder.mkdir(exist_ok=True)
        paths = {"certificate": folder / "tls.crt", "key": folder / "tls.key"}
        for path, content in zip(paths.values(), (self.pem, self.key_pem), strict=True):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.replace(path)
        return {name: str(path) for name, path in paths.items()}


def authority(name: str = "authority") -> Identity:
    """One that signs others."""
    return _make(name, None, authority=True, days=1.0)


def bundle(path: Path, *authorities: Identity) -> str:
    """A file with the certificates of authorities."""
    path.write_bytes(b"".join(each.pem for each in authorities))
    return str(path)


def channel_credentials(trusted: Identity, own: Identity | None = None) -> grpc.ChannelCredentials:
    """A client's."""
    pair = (own.key_pem, own.pem) if own is not None else (None, None)
    return grpc.ssl_channel_credentials(trusted.pem, *pair)


def _make(name: str, issuer: Identity | None, *, authority: bool, days: float) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]),
            critical=False,
        )
    )
    return Identity(builder.sign(issuer.key if issuer else key, hashes.SHA256()), key)

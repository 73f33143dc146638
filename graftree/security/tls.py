"""TLS of a pod's own port and of its connections to other pods, from PEM files that may be replaced while it runs.

A server looks at its files at each handshake, a client at each connection it opens; connections that are there go on.
With authorities for clients, TLS is mutual: who has no certificate of theirs is not let in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from graftree.errors import ConfigError
from graftree.security.files import WatchedFiles

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class TlsFiles:
    """Where the PEM files are; an empty path is none.

    Attributes:
        certificate, key: of this end, chain and private key.
        authorities: whose certificates the other end must have.
        names: configuration keys of the three, for errors.
    """

    certificate: str
    key: str
    authorities: str
    names: tuple[str, str, str]

    @property
    def paths(self) -> tuple[str, ...]:
        """Those there are."""
        return tuple(path for path in (self.certificate, self.key, self.authorities) if path)


@dataclass(frozen=True)
class TlsMaterial:
    """What the files hold; None where there is no such file.

    Attributes:
        not_after: seconds since the epoch until which this end's certificate is valid; 0 without one.
    """

    certificate: bytes | None
    key: bytes | None
    authorities: bytes | None
    not_after: float = 0.0


def read(files: TlsFiles) -> TlsMaterial:
    """Read and check.

    Raises:
        ConfigError: names the key: a file that is not there or no PEM, a certificate without its key or with
            another's.
    """
    of_certificate, of_key, of_authorities = files.names
    if bool(files.certificate) != bool(files.key):
        missing = of_key if files.certificate else of_certificate
        given = of_certificate if files.certificate else of_key
        raise ConfigError(missing, "", f"set together with {given}")
    authorities = _pem(of_authorities, files.authorities)
    if authorities is not None:
        _certificates(of_authorities, files.authorities, authorities)
    certificate, key = _pem(of_certificate, files.certificate), _pem(of_key, files.key)
    if certificate is None or key is None:
        return TlsMaterial(None, None, authorities)
    chain = _certificates(of_certificate, files.certificate, certificate)
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(of_key, files.key, "a PEM private key without a password") from None
    ours, theirs = (
        public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for public in (private.public_key(), chain[0].public_key())
    )
    if ours != theirs:
        raise ConfigError(of_key, files.key, f"the key of the first certificate in {of_certificate}")
    until: datetime = min(each.not_valid_after_utc for each in chain)
    if until < datetime.now(UTC):
        raise ConfigError(of_certificate, files.certificate, f"valid still; this one was until {until.isoformat()}")
    return TlsMaterial(certificate, key, authorities, until.timestamp())


def _pem(name: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(name, path, f"a file that can be read ({error.strerror or error})") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(name, path, f"at most {MAX_FILE_BYTES} bytes")
    return content


def _certificates(name: str, path: str, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ConfigError(name, path, "PEM certificates") from None


class ServerTls:
    """A server's side.

    Raises:
        ConfigError: as `read`; authorities without a certificate.
    """

    def __init__(self, files: TlsFiles) -> None:
        if files.authorities and not files.certificate:
            raise ConfigError(files.names[0], "", f"set together with {files.names[2]}")
        self.files = WatchedFiles(files.paths, lambda: read(files))

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`; follow the files."""
        first = self.files.value
        return grpc.dynamic_ssl_server_credentials(
            _configuration(first), self._fetch, require_client_authentication=first.authorities is not None
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        # Called by gRPC at each handshake; None = as before.
        return _configuration(self.files.value) if self.files.refresh() else None


class ClientTls:
    """A client's side: of connections to other pods.

    Args:
        name: what the servers' certificates are made out to, where that is not the address they are reached at.

    Raises:
        ConfigError: as `read`; a certificate without authorities: what it proves goes to nobody one trusts.
    """

    def __init__(self, files: TlsFiles, name: str = "") -> None:
        if not files.authorities:
            raise ConfigError(files.names[2], "", f"set together with {files.names[0]}")
        self.files = WatchedFiles(files.paths, lambda: read(files))
        self._name = name

    def channel(self, address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """A channel with what the files hold now."""
        self.files.refresh()
        material = self.files.value
        credentials = grpc.ssl_channel_credentials(material.authorities, material.key, material.certificate)
        override: list[tuple[str, str | int]] = [("grpc.ssl_target_name_override", self._name)] if self._name else []
        return grpc.aio.secure_channel(address, credentials, options=[*options, *override])


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], material.authorities)


def expiries(sides: Mapping[str, ServerTls | ClientTls | None]) -> dict[tuple[str, ...], float]:
    """(side,) -> end of its certificate's validity, seconds since the epoch; sides without one are left out."""
    ends = {side: tls.files.value.not_after for side, tls in sides.items() if tls is not None}
    return {(side,): end for side, end in ends.items() if end}

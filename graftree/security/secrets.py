"""Secrets that come from files, read when they are needed, so that they can be replaced while a pod runs."""

from __future__ import annotations

from pathlib import Path

from redis.credentials import CredentialProvider

from graftree.errors import ConfigError

MAX_SECRET_BYTES = 4096


def read_secret(key: str, path: str) -> str:
    """What a file holds, without the line's end.

    Args:
        key: the configuration key that `path` came from.

    Raises:
        ConfigError: names `key`: it cannot be read, or is empty, too long or no text.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
        secret = content.decode().rstrip("\r\n")
    except (OSError, UnicodeError) as error:
        raise ConfigError(key, path, f"a text file that can be read ({type(error).__name__})") from None
    if not secret or len(content) > MAX_SECRET_BYTES:
        raise ConfigError(key, path, f"a file with 1 to {MAX_SECRET_BYTES} bytes")
    return secret


class RedisCredentials(CredentialProvider):
    """User and password of Redis, read at each connection.

    Args:
        username: of an ACL user; empty = the default one.
        password_file: where the password is.
        key: the configuration key that `password_file` came from.

    Raises:
        ConfigError: names `key`.
    """

    def __init__(self, username: str, password_file: str, key: str = "redis_password_file") -> None:
        self._username, self._path, self._key = username, password_file, key
        self.get_credentials()

    @classmethod
    def given(cls, username: str, password_file: str, *, keys: str) -> RedisCredentials | None:
        """Those of a configuration, None where it names none.

        Args:
            keys: what the two configuration keys begin with: <keys>_username, <keys>_password_file.

        Raises:
            ConfigError: a user without a password, or a file that holds none.
        """
        if password_file:
            return cls(username, password_file, f"{keys}_password_file")
        if username:
            raise ConfigError(f"{keys}_password_file", "", f"set together with {keys}_username")
        return None

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """As redis-py wants them: (user, password), or (password,) for the default user."""
        password = read_secret(self._key, self._path)
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same; a small file is read at once."""
        return self.get_credentials()

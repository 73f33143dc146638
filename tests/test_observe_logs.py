"""Log lines: JSON with the ids of request and trace, and never a prompt, an answer or a secret."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog

from graftree import Client, LocalStack
from graftree.errors import GraftreeError
from graftree.observe import logs
from graftree.security.keys import digest, new_key

MODEL = "random:llama?layers=1&seed=3"
PROMPT = "zebra crossing at midnight"
TRACE = {"trace_endpoint": "file:/dev/null"}


@pytest.fixture
def fresh() -> Iterator[None]:
    """Logging is the process' own: put it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    before = structlog.get_config()
    was_configured = structlog.is_configured()
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before) if was_configured else structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def configured(level: str = "info", log_format: Literal["json", "console"] = "json") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level, log_format, context={"service": "router", "pod_id": "r-1"}, stream=stream)
    return stream


@pytest.mark.usefixtures("fresh")
def test_a_line() -> None:
    """One JSON object: time, level, event, where from, and what was said with it."""
    stream = configured()
    structlog.get_logger("x").info("pod linked", pod="v-1")
    structlog.get_logger("x").debug("too quiet")
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "pod linked", "level": "info", "pod": "v-1", "service": "router", "pod_id": "r-1"}


@pytest.mark.usefixtures("fresh")
async def test_ids_follow_a_request() -> None:
    """Lines of a request's tasks, and of those they start, carry its ids; other tasks' lines do not."""
    stream = configured()
    log = structlog.get_logger("x")

    async def deeper() -> None:
        log.info("deeper")

    async def request(number: int) -> None:
        logs.bind(request_id=f"q-{number}", trace_id="", tenant="acme")
        await asyncio.create_task(deeper())

    await asyncio.gather(asyncio.create_task(request(1)), asyncio.create_task(request(2)))
    log.info("outside")
    said = [(line["event"], line.get("request_id"), line.get("tenant")) for line in lines(stream)]
    assert sorted(said[:2]) == [("deeper", "q-1", "acme"), ("deeper", "q-2", "acme")]
    assert said[2] == ("outside", None, None)
    assert all("trace_id" not in line for line in lines(stream))


@pytest.mark.usefixtures("fresh")
def test_libraries_speak_json_too() -> None:
    """What grpc, redis and warnings say comes as the same lines."""
    stream = configured()
    logging.getLogger("redis").warning("lost %s", "connection")
    logging.getLogger("redis").info("too quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    first, second = lines(stream)
    assert (first["event"], first["logger"], first["level"], first["service"]) == (
        "lost connection",
        "redis",
        "warning",
        "router",
    )
    assert "old" in second["event"]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_exceptions_show_no_variables(log_format: Literal["json", "console"]) -> None:
    """A traceback says where, not what the variables held: they hold prompts."""
    stream = configured(log_format=log_format)

    def fail(prompt: str) -> None:
        raise GraftreeError(f"broken after {len(prompt)} characters")

    try:
        fail(PROMPT)
    except GraftreeError:
        structlog.get_logger("x").exception("it failed")
    text = stream.getvalue()
    assert "broken after 26 characters" in text
    assert "in fail" in text
    assert PROMPT not in text


@pytest.mark.usefixtures("fresh")
def test_secrets_are_struck_out() -> None:
    """Fields that hold secrets or texts, URLs with a password and bearer tokens do not come through."""
    stream = configured()
    structlog.get_logger("x").error(
        "connecting to redis://user:hunter2@host:1/0 failed",
        prompt=PROMPT,
        password="hunter2",
        header="authorization: Bearer hunter2",
        url="rediss://:hunter2@[::1]:6380/0",
        plain="http://host/path",
    )
    (line,) = lines(stream)
    assert "hunter2" not in stream.getvalue()
    assert PROMPT not in stream.getvalue()
    assert line["url"] == f"rediss://{logs.STRUCK_OUT}@[::1]:6380/0"
    assert line["plain"] == "http://host/path"


@pytest.mark.usefixtures("fresh")
def test_for_people() -> None:
    """console is text, with the same words."""
    stream = configured(log_format="console")
    structlog.get_logger("x").warning("pod quarantined", pod="s-1")
    assert "pod quarantined" in stream.getvalue()
    assert "s-1" in stream.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(stream.getvalue())


def test_a_run_logs_no_prompt_and_no_key(tmp_path: Path) -> None:
    """All lines that a stack's processes write at the lowest level, through answers, errors and a lost pod."""
    key = new_key()
    keys = tmp_path / "keys.json"
    entry = {"name": "alice", "tenant": "acme", "sha256": digest(key), "admin": True}
    keys.write_text(json.dumps({"keys": [entry]}))
    audit = tmp_path / "audit.jsonl"
    folder = tmp_path / "logs"
    loud = TRACE | {"log_level": "debug"}
    with LocalStack(
        MODEL,
        ["ngram"],
        verifiers=2,
        threads=1,
        router_options=loud | {"api_keys": str(keys), "audit_log": str(audit)},
        verifier_options=loud,
        speculator_options=loud,
        client_options={"api_key": key},
        log_directory=folder,
    ) as stack:
        with Client(stack.target, api_key=key) as client:
            result = client.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
            with pytest.raises(GraftreeError):
                client.generate(PROMPT, max_new_tokens=24, stop=[""])
            with pytest.raises(GraftreeError):
                client.generate(PROMPT * 20_000, max_new_tokens=24)
            with client.stream(PROMPT, max_new_tokens=100, ignore_eos=True) as stream:
                next(stream)
                stack.kill("verifier", 0)
                assert sum(len(chunk.token_ids) for chunk in stream) >= 98
        with Client(stack.target, api_key=key + "x") as client, pytest.raises(GraftreeError):
            client.generate(PROMPT, max_new_tokens=24)
    text = "".join(path.read_text() for path in sorted(folder.iterdir())) + audit.read_text()
    said = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(said) == len(text.splitlines())
    for forbidden in ("zebra", "midnight", result.text.strip(), key, key[3:20]):
        assert forbidden not in text
    assert {line["service"] for line in said if "service" in line} >= {"router", "verifier"}
    mine = [line for line in said if line.get("request_id") == result.request_id and line["event"] != "audit"]
    assert mine
    assert all(len(line["trace_id"]) == 32 and line["tenant"] == "acme" for line in mine)

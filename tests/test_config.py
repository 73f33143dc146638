"""Configuration: trial 25, bad configuration is a start-up error that names the key."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from graftree.config import RouterConfig, SpeculatorConfig, VerifierConfig, load, respell
from graftree.errors import ConfigError

TIERS = (RouterConfig, SpeculatorConfig, VerifierConfig)


@pytest.mark.parametrize(
    ("tier", "flag", "value"),
    [
        (RouterConfig, "step-timeout-seconds", "-1"),
        (RouterConfig, "step-timeout-seconds", "0"),
        (RouterConfig, "step-timeout-seconds", "1e18"),
        (RouterConfig, "step-timeout-seconds", "inf"),
        (RouterConfig, "draft-wait-ms", "nan"),
        (RouterConfig, "tree-budget", "-1"),
        (RouterConfig, "tree-depth", "0"),
        (RouterConfig, "port", "65536"),
        (RouterConfig, "max-requests", "many"),
        (RouterConfig, "log-level", "loud"),
        (RouterConfig, "pod-id", "two words"),
        (RouterConfig, "host", ""),
        (RouterConfig, "advertise", "x"),
        (RouterConfig, "advertise", "host:"),
        (RouterConfig, "advertise", "host:0"),
        (RouterConfig, "advertise", "host:65536"),
        (RouterConfig, "advertise", ":1"),
        (VerifierConfig, "block-size", "0"),
        (VerifierConfig, "dtype", "int3"),
        (VerifierConfig, "step-tokens", "0"),
        (SpeculatorConfig, "max-nodes", "0"),
        (SpeculatorConfig, "branching", "1.5"),
        (SpeculatorConfig, "drafter", ""),
    ],
)
def test_a_bad_value_names_its_key(tier: type[RouterConfig], flag: str, value: str) -> None:
    """Flag and variable alike: the error names the key as the user wrote it, the value and a limit."""
    variable = "GRAFTREE_" + flag.upper().replace("-", "_")
    for arguments, environ, key in (([f"--{flag}", value], {}, f"--{flag}"), ([], {variable: value}, variable)):
        with pytest.raises(ConfigError) as caught:
            load(tier, arguments, environ)
        assert caught.value.key == key
        assert caught.value.value == value
        assert caught.value.limit


def test_zero_means_what_the_help_says() -> None:
    """0 is allowed where it has a documented meaning."""
    config = load(RouterConfig, ["--tree-budget", "0", "--draft-wait-ms", "0", "--speculators-per-session", "0"], {})
    assert (config.tree_budget, config.draft_wait_ms, config.speculators_per_session) == (0, 0, 0)


@pytest.mark.parametrize("tier", TIERS)
def test_unknown_keys_are_refused(tier: type[RouterConfig]) -> None:
    """A misspelt flag or variable is an error, never ignored; other tiers' variables are no error."""
    with pytest.raises(ConfigError, match="GRAFTREE_TREE_BUGDET"):
        load(tier, [], {"GRAFTREE_TREE_BUGDET": "4"})
    with pytest.raises(ConfigError, match="--tree-bugdet"):
        load(tier, ["--tree-bugdet", "4"], {})
    load(tier, [], {"GRAFTREE_TREE_BUDGET": "4", "GRAFTREE_DRAFTER": "ngram", "GRAFTREE_CACHE": "/c", "OTHER": "x"})


def test_an_address_to_advertise() -> None:
    """Host names, IPv4 and bracketed IPv6 with a port are addresses; empty means host:port."""
    for value in ("", "verifier-0.verifiers:50051", "10.0.0.1:1", "[::1]:65535"):
        assert load(RouterConfig, ["--advertise", value], {}).advertise == value


def test_a_key_is_respelled_as_the_user_wrote_it() -> None:
    """An error found after loading names the flag or the variable that was given, else the bare key."""
    error = ConfigError("host", "nowhere", "an address of this machine")
    assert respell(RouterConfig, error, ["--host=nowhere"], {}).key == "--host"
    assert respell(RouterConfig, error, [], {"GRAFTREE_HOST": "nowhere"}).key == "GRAFTREE_HOST"
    assert respell(RouterConfig, error, [], {}).key == "host"


def test_flags_win_over_variables() -> None:
    """Precedence: flag, variable, default."""
    assert load(RouterConfig, ["--port", "1"], {"GRAFTREE_PORT": "2"}).port == 1
    assert load(RouterConfig, [], {"GRAFTREE_PORT": "2"}).port == 2
    assert load(RouterConfig, [], {}).port == 0


@pytest.mark.parametrize("tier", TIERS)
def test_every_key_says_what_it_does(tier: type[BaseModel]) -> None:
    """--help is complete: each field has a description."""
    assert all(field.description for field in tier.model_fields.values())


def test_configuration_is_frozen() -> None:
    """Read once: nothing changes it later."""
    with pytest.raises(ValueError, match="frozen"):
        load(RouterConfig, [], {}).port = 3  # type: ignore[misc]

"""`ChatTemplate`: a model's own Jinja template, run in a sandbox exactly as transformers runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graftree.errors import InvalidArgument


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja text.
        tokens: variables such as `bos_token` and `eos_token`.

    Raises:
        InvalidArgument: the template does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _Namespace
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgument("model", "chat template", f"a template that compiles: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation, ending where the assistant's answer begins.

        Args:
            messages: each with `role` and `content`.

        Raises:
            InvalidArgument: field `chat.messages`; the template refuses these messages, e.g. an unknown role.
        """
        plain = [{str(key): str(value) for key, value in message.items()} for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            roles = [message.get("role", "") for message in plain]
            limit = f"messages that the model's template takes: {error}"
            raise InvalidArgument("chat.messages", roles, limit) from error


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as transformers has it


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which is no part of a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose attributes cannot reach CPython's internals."""

    def __init__(*arguments: Any, **values: Any) -> None:
        self, *rest = arguments  # so that a value may be named `self`
        attributes = dict(*rest, **values)
        for name in attributes:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"underscore-prefixed attribute {name!r} on a namespace")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

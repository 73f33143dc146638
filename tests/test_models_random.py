"""Random models: deterministic weights, outputs worth testing with, layers that can be dropped."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from graftree.errors import InvalidArgument
from graftree.models.load import LoadedModel, load
from graftree.models.pull import pull
from graftree.models.uri import FAMILIES
from graftree.text.tokenizer import Tokenizer


def _greedy(loaded: LoadedModel, prompt: list[int], count: int, use_cache: bool = True) -> list[int]:
    output = loaded.model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, use_cache=use_cache
    )
    return output[0, len(prompt) :].tolist()


def _digest(loaded: LoadedModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(loaded.model.named_parameters()):
        digest.update(name.encode() + parameter.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_uri_gives_the_same_weights(family: str) -> None:
    """Weights depend on the URI alone: not on torch's generator, nor do they move it; another seed gives others."""
    torch.manual_seed(1)
    first = load(f"random:{family}")
    after_first = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after_first)
    assert _digest(load(f"random:{family}?seed=0")) == _digest(first)
    assert _digest(load(f"random:{family}?seed=1")) != _digest(first)
    assert not any(parameter.requires_grad for parameter in first.model.parameters())
    assert not first.model.training


def test_weights_are_pinned() -> None:
    """The noise is the documented one (Philox keyed by SHA-256): these values hold on every machine."""
    weight = load("random:llama").model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    key = int.from_bytes(hashlib.sha256(b"0:model.layers.0.self_attn.q_proj.weight").digest()[:16], "little")
    bits = _philox_first_word(key)
    unit = (bits & 0xFFFFFFFF) >> 8
    expected = (unit * 2.0**-23 - 1.0) * 3.0**0.5 * 1.5 / 8.0
    assert weight[0, 0].item() == pytest.approx(expected, rel=1e-6)


def _philox_first_word(key: int) -> int:
    """First 64-bit word of Philox4x64-10 (Salmon et al., SC 2011) at counter 1, in plain integers."""
    mask = (1 << 64) - 1
    counter, keys = [1, 0, 0, 0], [key & mask, key >> 64]
    for _ in range(10):
        low, high = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [(high >> 64) ^ counter[1] ^ keys[0], high & mask, (low >> 64) ^ counter[3] ^ keys[1], low & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return counter[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_output_is_worth_testing_with(family: str, seed: int) -> None:
    """Greedy output wanders and the distributions are neither flat nor one-hot."""
    loaded = load(f"random:{family}?seed={seed}")
    prompt = [72, 101, 108, 108, 111]
    output = _greedy(loaded, prompt, 64)
    assert len(set(output)) >= 12
    logits = loaded.model(torch.tensor([prompt + output])).logits[0].double()
    top = logits.softmax(-1).max(-1).values
    assert 0.1 < top.median().item() < 0.7
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    assert 1.5 < entropy < 4.5


def test_scale_sharpens() -> None:
    """`scale` multiplies the logits: 0 is uniform, more is more peaked."""
    ids = torch.arange(32)[None]
    plain, sharp, flat = (load(f"random:llama?scale={scale}").model(ids).logits for scale in (1, 2, 0))
    torch.testing.assert_close(sharp, 2 * plain)
    assert flat.abs().max().item() == 0.0


def test_shallower_models_share_the_first_layers() -> None:
    """A model of one layer is the two-layer model of the same seed with the second layer dropped."""
    ids = torch.arange(40)[None]
    one, cut = load("random:llama?layers=1"), load("random:llama?layers=2&keep=0")
    torch.testing.assert_close(one.model(ids).logits, cut.model(ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_layers_are_renumbered(family: str) -> None:
    """Dropping layers leaves a model whose KV cache indexes right: generation with and without a cache agree."""
    loaded = load(f"random:{family}?layers=4&keep=0,3")
    assert loaded.model.config.num_hidden_layers == 2
    assert _greedy(loaded, [1, 2, 3], 12) == _greedy(loaded, [1, 2, 3], 12, use_cache=False)
    whole = load(f"random:{family}?layers=4")
    assert loaded.spec.fingerprint != whole.spec.fingerprint
    assert loaded.spec.vocab_fingerprint == whole.spec.vocab_fingerprint


def test_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The refusal names the layer and the limit."""
    load("random:llama").model.save_pretrained(tmp_path)
    Tokenizer.load("random:llama").save(tmp_path)
    with pytest.raises(InvalidArgument, match="layers below 2"):
        load(f"directory:{tmp_path}?layers=0,2")
    assert load(f"directory:{tmp_path}?layers=1").model.config.num_hidden_layers == 1


def test_padding_changes_no_token() -> None:
    """Two models that differ in padding have one vocabulary, one greedy output, and never choose a padding id."""
    plain, padded = load("random:llama"), load("random:llama?padded=40")
    assert padded.spec.vocab_size == 552
    assert plain.spec.vocab_size == plain.spec.token_count == padded.spec.token_count == 512
    assert plain.spec.vocab_fingerprint == padded.spec.vocab_fingerprint
    assert plain.spec.fingerprint != padded.spec.fingerprint
    assert _greedy(plain, [1, 2, 3], 32) == _greedy(padded, [1, 2, 3], 32)


def test_a_permuted_vocabulary_is_the_same_model_relabelled() -> None:
    """`permute` moves the tokens' ids and the rows together: the same text, other ids, another fingerprint."""
    plain, permuted = load("random:llama"), load("random:llama?permute=1")
    one, other = Tokenizer.load("random:llama"), Tokenizer.load("random:llama?permute=1")
    assert plain.spec.vocab_fingerprint != permuted.spec.vocab_fingerprint
    assert other.vocab_fingerprint == permuted.spec.vocab_fingerprint
    assert Tokenizer.load("random:llama?permute=2").vocab_fingerprint != other.vocab_fingerprint
    first, second = one.encode("Once upon a time"), other.encode("Once upon a time")
    assert first != second
    assert one.decode(_greedy(plain, first, 24)) == other.decode(_greedy(permuted, second, 24))


@pytest.mark.parametrize(
    ("options", "expected"),
    [("", (257,)), ("?eos=none", ()), ("?eos=9,3", (3, 9)), ("?vocab=3", ()), ("?vocab=3&eos=2", (2,))],
)
def test_eos_option(options: str, expected: tuple[int, ...]) -> None:
    """EOS is the tokenizer's, or what the option says, on the model and on the tokenizer."""
    assert load(f"random:llama{options}").spec.eos_token_ids == expected
    assert Tokenizer.load(f"random:llama{options}").eos_token_ids == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_spec(family: str) -> None:
    """The limits are the URI's; a fingerprint tells URIs and dtypes apart."""
    loaded = load(f"random:{family}?vocab=300&context=77&hidden=32")
    assert (loaded.spec.vocab_size, loaded.spec.max_context) == (300, 77)
    assert loaded.spec.name == f"random:{family}?context=77&hidden=32&vocab=300"
    half = load(f"random:{family}?vocab=300&context=77&hidden=32", dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16
    assert half.spec.fingerprint != loaded.spec.fingerprint
    assert half.spec.vocab_fingerprint == loaded.spec.vocab_fingerprint


def test_half_precision_keeps_rotary_frequencies() -> None:
    """Buffers that are float32 in a model that was loaded stay float32: only parameters are cast."""
    half = load("random:llama", dtype="bfloat16").model
    assert half.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32


@pytest.mark.parametrize(("dtype", "device", "field"), [("int8", "cpu", "dtype"), ("float32", "tpu", "device")])
def test_wrong_dtype_or_device(dtype: str, device: str, field: str) -> None:
    """A dtype or device that is none is refused by name."""
    with pytest.raises(InvalidArgument) as caught:
        load("random:llama", dtype=dtype, device=device)
    assert caught.value.field == field


@pytest.mark.parametrize("family", FAMILIES)
def test_pulled_random_model_is_the_loaded_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pull` saves what `load` builds, and transformers reads it: the same logits, ids and chat prompt."""
    monkeypatch.setenv("GRAFTREE_CACHE", str(tmp_path))
    uri = f"random:{family}?padded=3"
    directory = pull(uri, progress=False)
    saved = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.arange(50)[None]
    torch.testing.assert_close(saved(ids).logits, load(uri).model(ids).logits)
    reference, own = PreTrainedTokenizerFast.from_pretrained(directory), Tokenizer.from_directory(directory)
    text = "naïve € 日本 <|eos|> x"
    assert own.encode(text) == reference(text).input_ids == Tokenizer.load(uri).encode(text)
    chat = [{"role": "user", "content": "hi"}]
    assert own.render_chat(chat) == reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert own.vocab_fingerprint == Tokenizer.load(uri).vocab_fingerprint
    assert own.eos_token_ids == (257,)

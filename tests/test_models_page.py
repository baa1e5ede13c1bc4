"""Models and what is proved of each, docs/models.md, generated from the markers of the tests that prove it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.tools import kind
from tests.config.composing import experiment
from tests.proofs import (
    COLUMNS,
    PLANNED,
    REPOSITORY,
    Proofs,
    axes_of,
    collected,
    family_of,
    held_to_what_ran,
    note,
    note_training,
    proves,
    published_presets,
)
from titan_exp.config.layout.resolved_layout import resolve_kernels
from titan_exp.config.schema.component import builtin_components
from titan_exp.models.build import build_model

PAGE = REPOSITORY / "docs" / "models.md"
HEADING = """\
# Models

Which models can you train, and what do our tests prove of each? To train one, set `model=` to one of the
[published shapes](#published-shapes), or to a small model such as `llama_laptop` or `qwen3_moe_debug`. If you want to
see all of them, type `titan-exp train --help`.

`make golden` writes this page from the markers of the tests (`tests/proofs.py`), so do not edit it.

## What the tests prove

`day` means that a test of `make test` proves it, and `night` that only one of `make night` does. If a cell is empty, no
test does. All of these ran on a CPU, with gloo between ranks. `make gpu` also has tests for what the last column names.
They have not run on a GPU yet.

- counts: presets whose total and active parameters a test checks, out of all published ones
- logits, gradients: equal to those of `transformers` from the same weights, for each parameter
- import, export: Hugging Face folders, read and written bitwise
- generate: greedy text with the cache equals that of `transformers` or that without the cache, and text on several
  ranks equals that of one device
- tp, cp, pp, ep: tensor, context, pipeline and expert parallelism, each with the curve and weights of one device
- recompute, compile: the same curve and weights with activation checkpointing, and with every block compiled into one
  graph (`fullgraph`, with `aot_eager`)
- fp8: an 8-bit recipe trains on several ranks as on one
- plan: predicted memory and FLOPs are those of ranks that run the model
"""
COUNTED = """
## Published shapes

Tests compare these numbers with the preset's spec. Active parameters are those of the experts that a token takes,
without the embedding table.
"""


def page(found: Proofs) -> str:
    counts = {(count.preset, count.kind): count.parameters for count in found.counts}
    lines = [HEADING, _row(["family", *COLUMNS, "tests for a GPU"]), "|---" * (len(COLUMNS) + 2) + "|"]
    for family in builtin_components("model"):
        proofs = [proof for proof in found.proofs if proof.family == family]
        presets = [preset for preset in published_presets() if family_of(preset) == family]
        done = sum((preset, "total") in counts and (preset, "active") in counts for preset in presets)
        cells = [f"{done} of {len(presets)}" if presets else ""]
        for column in COLUMNS[1:]:
            where = {proof.where for proof in proofs if proof.column == column}
            cells.append(next((word for word in ("day", "night") if word in where), ""))
        on_gpu = {proof.column for proof in proofs if proof.where == "GPU"}
        lines.append(_row([f"`{family}`", *cells, ", ".join(column for column in COLUMNS if column in on_gpu)]))
    lines += [COUNTED, _row(["preset", "family", "parameters", "active"]), "|---|---|--:|--:|"]
    for preset in published_presets():
        numbers = [f"{counts[preset, kind]:,}" if (preset, kind) in counts else "" for kind in ("total", "active")]
        lines.append(_row([f"`{preset}`", f"`{family_of(preset)}`", *numbers]))
    return "\n".join([*lines, ""])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def test_the_page_is_what_the_tests_declare(golden: Any, request: pytest.FixtureRequest, tmp_path: Path):
    golden(PAGE, page(collected(request.config, tmp_path)))


@pytest.mark.parametrize(
    ("declared", "ran"),
    [
        (("llama", "logits"), lambda: build_model(kind("llama3"), seq_len=8, attention_backend="math")),
        (("llama", "tp"), lambda: note_training(resolve_kernels(experiment("parallelism.tp=2")))),
        (("llama", "plan"), lambda: [note(experiment(), {part}) for part in PLANNED]),
    ],
)
def test_a_test_that_declares_more_than_it_did_fails(declared: tuple[str, str], ran: Callable[[], object]):
    item: Any = SimpleNamespace(iter_markers=lambda name: [pytest.mark.proves(*declared).mark])
    with held_to_what_ran(item):
        ran()
    with pytest.raises(AssertionError, match="declared and not run"), held_to_what_ran(item):
        note(experiment(), {"cp", "predicted"})


def test_a_case_declares_the_axes_of_its_words():
    assert axes_of("parallelism.tp=2 parallelism.cp=1 parallelism.dp_shard=2 quantization=mxfp8") == {"tp", "fp8"}
    assert axes_of("compile=blocks activation_checkpoint=full compile.backend=eager") == {"compile", "recompute"}
    assert proves("model=kimi_k2_1t parallelism.tp=2", "plan").args == ("deepseek", "plan")
    assert proves("parallelism.tp=2", "plan").args == ("llama", "plan")

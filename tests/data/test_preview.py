"""`data.preview` prints the batch of the training loader at that step."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.corpora import experiment, rows_of
from tests.data.stores import make, over
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.token_store import TokenSplit
from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.data.train_loader import TrainLoader, preview


def first_texts(run: Experiment, step: int) -> list[str]:
    """Beginning of each row of a step in the training loader."""
    loader = TrainLoader(
        run.data,
        run.training,
        run.experiment.seed,
        dp_rank=0,
        dp_degree=1,
        micro_batch_size=run.training.global_batch_size,
        pin_memory=False,
    )
    batch = [next(loader) for _ in range(step)][-1]
    loader.close()
    return [ByteTokenizer().decode(row[: [*row[:20], 256].index(256)]) for row in rows_of(batch)]


@pytest.mark.parametrize("step", [1, 3])
def test_preview_shows_the_rows_of_the_step(step: int, tmp_path: Path):
    store = make(tmp_path / "store")
    for run in (experiment(), over(store)):
        lines = list(preview(run.data, run.training, run.experiment.seed, step))
        rows = [line for line in lines if line.startswith("row ")]
        size = run.training.global_batch_size
        assert rows == [f"row {number}" for number in range((step - 1) * size, step * size)]
        for row, text in zip(rows, first_texts(run, step), strict=True):
            shown = lines[lines.index(row) + 2].strip()
            assert shown[1:].startswith(text)


def test_preview_of_a_batch_ramp(tmp_path: Path):
    """A step of the ramp has its own number of rows, after those of all steps before."""
    store = make(tmp_path / "store")
    for run in (experiment(), over(store)):
        size = run.training.global_batch_size
        training = replace(run.training, batch_ramp=((2, size // 4), (1, size // 2)))
        plain = [line for step in (1, 2) for line in preview(run.data, run.training, run.experiment.seed, step)]
        for step, first, rows in ((2, size // 4, size // 4), (3, size // 2, size // 2), (4, size, size)):
            lines = list(preview(run.data, training, run.experiment.seed, step))
            assert lines[0].startswith(f"step {step}: {rows} rows")
            assert [line for line in lines if line.startswith("row ")] == [f"row {first + row}" for row in range(rows)]
            assert set(lines[1:]) <= set(plain)


def test_preview_shows_boundaries_positions_and_missing_labels(tmp_path: Path):
    store = make(tmp_path / "store")
    run = over(store, seq_len=200, document_mask=True, reset_positions=True)
    lines = list(preview(run.data, run.training, run.experiment.seed, 2))
    assert "rows of 200 tokens" in lines[0]
    ended = [number for number, line in enumerate(lines) if line.endswith("⟨end of text⟩")]
    assert len(ended) > 24
    for number in ended:
        place = lines[number - 1].strip()
        last = int(place.split(",")[0].split("–")[1])
        assert place.endswith(f"no label: {last}")
    assert any("positions 0–" in line and "document 1" in line for line in lines)


def test_preview_of_a_store_reads_only_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, read = make(tmp_path / "store"), []
    original = TokenSplit.read
    monkeypatch.setattr(TokenSplit, "read", lambda self, *given: read.append(given[0]) or original(self, *given))
    run = over(store, prefetch=1)
    list(preview(run.data, run.training, run.experiment.seed, 10**9))
    assert len(read) <= 24 * 3


def test_long_texts_are_shortened_and_mixtures_show_the_source(tmp_path: Path):
    stores = [make(tmp_path / "a"), make(tmp_path / "b", options={"documents": 5, "reads": ""}, parts=1)]
    run = over(*stores, weights=(1.0, 1.0), seq_len=60)
    lines = list(preview(run.data, run.training, run.experiment.seed, 1))
    assert {line.rpartition(" ")[2] for line in lines if line.startswith("row")} == {"a", "b"}

from itertools import pairwise
from typing import Any

import pytest

from tests.data.corpora import OWN_STREAM, OwnTable, experiment, text
from titan_exp.config.data_files import unit_hash
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.source_check import validation_subset
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.ops.cross_entropy import IGNORE_INDEX

SEQ_LEN = 24


def ranks(run: Experiment, dp_degree: int, micro_batch_size: int) -> list[ValidationLoader]:
    return [
        ValidationLoader(
            run.data, run.training.seq_len, dp_rank=rank, dp_degree=dp_degree, micro_batch_size=micro_batch_size
        )
        for rank in range(dp_degree)
    ]


def predictions(run: Experiment, dp_degree: int, micro_batch_size: int) -> list[tuple[tuple[int, ...], int, int]]:
    """Every (input tokens so far in the row, label, position) of the split over all ranks, sorted."""
    found = []
    for loader in ranks(run, dp_degree, micro_batch_size):
        for batch in loader:
            assert batch.tokens.shape == (micro_batch_size, SEQ_LEN)
            assert batch.documents is None or not batch.documents[:, 0].any()
            for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
                found += [
                    (tuple(tokens[: at + 1]), label, at) for at, label in enumerate(labels) if label != IGNORE_INDEX
                ]
    return sorted(found)


def split_tokens(run: Experiment) -> list[int]:
    held_out = validation_subset(OwnTable(run.data, **run.data.options), run.data.validation_fraction)
    return [token for index in range(len(held_out)) for token in [*held_out[index].encode(), 256]]


@pytest.mark.parametrize("mask", [False, True])
def test_every_layout_reads_the_whole_split_once(mask: bool):
    run = experiment(document_mask=mask, reset_positions=mask)
    reference = predictions(run, 1, 1)
    tokens = split_tokens(run)
    expected = [token for before, token in pairwise(tokens) if not (mask and before == 256)]
    assert sorted(label for _, label, _ in reference) == sorted(expected)
    for dp_degree, micro_batch_size in [(1, 4), (2, 1), (2, 3), (4, 2), (8, 16)]:
        assert predictions(run, dp_degree, micro_batch_size) == reference


def test_every_rank_has_the_same_number_of_batches():
    for dp_degree, micro_batch_size in [(1, 1), (3, 2), (8, 4)]:
        loaders = ranks(experiment(), dp_degree, micro_batch_size)
        counts = {len(loader) for loader in loaders}
        assert len(counts) == 1
        assert [len(list(loader)) for loader in loaders] == [*counts] * dp_degree


def test_a_second_pass_is_equal_and_reads_nothing(monkeypatch: pytest.MonkeyPatch):
    (loader,) = ranks(experiment(), 1, 4)
    first = [batch.tokens.tolist() for batch in loader]
    monkeypatch.setattr(OwnTable, "__getitem__", None)
    assert [batch.tokens.tolist() for batch in loader] == first


def test_the_split_does_not_depend_on_the_seed():
    assert predictions(experiment(seed=0), 1, 4) == predictions(experiment(seed=5), 1, 4)


def test_a_split_with_a_single_label():
    run = experiment(options={"documents": 500}, validation_fraction=0.003)
    assert len(predictions(run, 4, 2)) == len(split_tokens(run)) - 1


def streamed_labels(run: Experiment) -> list[int]:
    return [label for _, label, _ in predictions(run, 2, 2)]


def test_a_stream_holds_out_by_text_hash_and_is_limited():
    run = experiment(source=OWN_STREAM, validation_fraction=0.2, validation_documents=1000)
    held_out = [document for document in map(text, range(9 * 13)) if unit_hash(document) < 0.2]
    assert len(held_out) > 4
    everything = [token for document in held_out for token in [*document.encode(), 256]]
    assert sorted(streamed_labels(run)) == sorted(everything[1:])
    run = experiment(source=OWN_STREAM, validation_fraction=0.2, validation_documents=2)
    expected = [token for document in held_out[:2] for token in [*document.encode(), 256]]
    assert sorted(streamed_labels(run)) == sorted(expected[1:])


def test_the_limit_counts_documents_with_text_in_every_layout():
    table = experiment(validation_fraction=0.3)
    texts = validation_subset(OwnTable(table.data), 0.3)
    first = texts[0]
    number = int(first[:3])
    run = experiment(validation_fraction=0.3, validation_documents=3, options={"empty": [number]})
    expected = [token for index in (1, 2, 3) for token in [*texts[index].encode(), 256]]
    reference = predictions(run, 1, 1)
    assert sorted(label for _, label, _ in reference) == sorted(expected[1:])
    for dp_degree, micro_batch_size in [(2, 3), (8, 1)]:
        assert predictions(run, dp_degree, micro_batch_size) == reference


def test_documents_beyond_the_limit_are_not_read(monkeypatch: pytest.MonkeyPatch):
    read = []
    monkeypatch.setattr(OwnTable, "__getitem__", lambda self, index: read.append(index) or text(index))
    (loader,) = ranks(experiment(validation_fraction=0.3, validation_documents=2), 1, 4)
    list(loader)
    assert len(set(read)) == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fraction of zero": ({"validation_fraction": 0.0}, r"data\.validation_fraction=0\.0[\s\S]*evaluation\.every=0"),
    "too small a fraction": (
        {"validation_fraction": 0.0001},
        r"none of the 40 documents[\s\S]*to hold out at least one",
    ),
    "no text": ({"options": {"empty": range(40)}}, "contain no text"),
    "empty stream": (
        {"source": OWN_STREAM, "options": {"sizes": (0, 0)}, "validation_documents": 9},
        "the stream contains no text",
    ),
    "a stream of few documents": (
        {"source": OWN_STREAM, "options": {"sizes": (3,)}, "validation_documents": 9, "validation_fraction": 0.001},
        "holds out none of the documents of the stream",
    ),
    "a stream without a limit": (
        {"source": OWN_STREAM},
        r"hold documents out of a stream[\s\S]*data\.validation_documents=1024",
    ),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_an_empty_split_is_refused_before_training(data: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        ranks(experiment(**data), 1, 1)

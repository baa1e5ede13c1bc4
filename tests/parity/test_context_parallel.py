"""Promise 1 for context parallelism: every method and degree, with data parallelism, gives the curve of one device."""

from pathlib import Path

import pytest

from tests.parity.runs import EVALUATE, LINES, PARAGRAPHS, Curve, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued

METHODS = ["ring", "allgather", "ulysses"]

EXPERIMENTS = {
    "plain": " ".join([*PARAGRAPHS, EVALUATE]),
    "documents": " ".join(LINES) + f" {EVALUATE}",
    "documents, positions through the row": " ".join(LINES) + " data.reset_positions=false",
    "positions reset, no mask": " ".join(LINES) + " data.document_mask=false",
    "tied": "model.tied_embeddings=true",
    "one kv head": "model.kv_heads=1",
    "no groups": "model.kv_heads=4",
    "two kv heads a rank": "model.heads=8 model.kv_heads=4",
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


def assert_same_evaluation(found: Curve, expected: Curve) -> None:
    """The validation split was evaluated at the same steps, over as many tokens, to the same loss."""
    assert [row.get("validation_tokens") for row in found.rows] == [
        row.get("validation_tokens") for row in expected.rows
    ]
    losses = [[row["validation_loss"] for row in curve.rows if "validation_loss" in row] for curve in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)


@pytest.mark.proves("llama", "layout")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "layout",
    [
        "parallelism.cp=2",
        "parallelism.cp=2 parallelism.dp_shard=2 training.micro_batch_size=1",
        "parallelism.cp=2 parallelism=ddp activation_checkpoint=full",
        "parallelism.cp=2 compile=blocks compile.backend=aot_eager activation_checkpoint=full",
        "parallelism.cp=2 parallelism=hsdp training.micro_batch_size=2",
        "parallelism.cp=4 model.kv_heads=4",
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, method, layout):
    expected = one_device("no groups" if "kv_heads" in layout else "plain")
    evaluated = [] if "kv_heads" in layout else EXPERIMENTS["plain"].split()
    found = train(tmp_path, f"parallelism.cp_method={method}", *layout.split(), *evaluated)
    assert_same_curve(found, expected)
    assert_same_evaluation(found, expected)


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("experiment", ["plain", "documents", "one kv head"])
def test_four_ranks_share_a_sequence_of_few_kv_heads(tmp_path: Path, one_device, method, experiment):
    four = ["parallelism.cp=4", f"parallelism.cp_method={method}"]
    found = train(tmp_path, *four, *EXPERIMENTS[experiment].split())
    assert_same_curve(found, one_device(experiment))
    assert_same_evaluation(found, one_device(experiment))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "experiment", ["documents", "documents, positions through the row", "positions reset, no mask", "tied"]
)
def test_nor_of_another_experiment(tmp_path: Path, one_device, method, experiment):
    two = ["parallelism.cp=2", "parallelism.dp_shard=2", f"parallelism.cp_method={method}"]
    found = train(tmp_path, *two, *EXPERIMENTS[experiment].split())
    assert_same_curve(found, one_device(experiment))
    assert_same_evaluation(found, one_device(experiment))


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("experiment", ["documents", pytest.param("no groups", marks=pytest.mark.night)])
def test_neighbours_exchange_heads_and_groups_of_them_keys(tmp_path: Path, one_device, method, experiment):
    mixed = ["parallelism.cp=4", "parallelism.cp_ulysses=2", f"parallelism.cp_method={method}"]
    found = train(tmp_path, *mixed, *EXPERIMENTS[experiment].split(), "activation_checkpoint=full")
    assert_same_curve(found, one_device(experiment))


def test_ulysses_with_two_kv_heads_on_a_rank(tmp_path: Path, one_device):
    """Heads are sent in groups, in order: with one of each on a rank, any order is right."""
    experiment = EXPERIMENTS["two kv heads a rank"].split()
    found = train(tmp_path, "parallelism.cp=2", "parallelism.cp_method=ulysses", *experiment)
    assert_same_curve(found, one_device("two kv heads a rank"))


@pytest.mark.parametrize("method", METHODS)
def test_documents_compiled(tmp_path: Path, one_device, method):
    compiled = ["parallelism.cp=2", f"parallelism.cp_method={method}", "compile=blocks", "compile.backend=aot_eager"]
    found = train(tmp_path, *compiled, *EXPERIMENTS["documents"].split())
    assert_same_curve(found, one_device("documents"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("parallelism.cp=2 parallelism.dp_shard=2", "parallelism.cp=2 parallelism.cp_method=ulysses"),
        ("", "parallelism.cp=4 parallelism.cp_method=allgather"),
        ("parallelism.cp=2 parallelism.cp_method=ulysses", "parallelism.dp_shard=2"),
    ],
)
def test_resumes_with_other_sequence_shards(tmp_path: Path, before, after):
    whole, changed = continued(tmp_path, before.split(), after.split())
    assert_continues(whole, changed)

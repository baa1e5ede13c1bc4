"""Window sampler: layout-invariant order, exact resume at any row, no unnecessary reads."""

import json
from contextlib import closing

import numpy as np
import pytest

from tests.data.corpora import Ranks, rows_of
from tests.data.stores import make, over
from titan_exp.config.data_files import Field, Manifest
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data import sample_store
from titan_exp.data.sources.base import MIXTURE
from titan_exp.data.token_store import STATE, ShuffledWindows, TokenSplit, build_store_sampler
from titan_exp.data.train_loader import TrainLoader

LAYOUTS = [(1, 8), (2, 4), (2, 1), (3, 8), (3, 2), (4, 2), (8, 3), (8, 1)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    folder = tmp_path_factory.mktemp("stores")
    return [make(folder / "a"), make(folder / "b", options={"documents": 35})]


@pytest.fixture(scope="module", params=["one store", "by size", "by weights"])
def run(request: pytest.FixtureRequest, stores: list[Manifest]) -> Experiment:
    return {
        "one store": over(stores[0]),
        "by size": over(*stores),
        "by weights": over(*stores, weights=(1.0, 3.0)),
    }[request.param]


def loader(run: Experiment, *, dp_rank: int = 0, dp_degree: int = 1, micro_batch_size: int = 24) -> TrainLoader:
    return TrainLoader(
        run.data,
        run.training,
        run.experiment.seed,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        micro_batch_size=micro_batch_size,
        pin_memory=False,
    )


def test_global_batches_are_the_same_rows_in_every_layout(run: Experiment):
    with Ranks(run, 1, 24) as ranks:
        reference = ranks.global_batches(8)
    assert len({tuple(batch) for batch in reference}) == 8
    for dp_degree, micro_batch_size in LAYOUTS:
        with Ranks(run, dp_degree, micro_batch_size) as ranks:
            assert ranks.global_batches(8) == reference, f"dp={dp_degree}, micro-batches of {micro_batch_size}"


def test_a_resume_under_other_dp_degrees_skips_and_repeats_nothing(run: Experiment):
    with Ranks(run, 1, 24) as ranks:
        reference = ranks.global_batches(19)
    state, found = None, []
    for dp_degree, micro_batch_size, batches in [(1, 8, 1), (4, 2, 4), (3, 4, 3), (8, 1, 4), (2, 12, 2), (1, 4, 5)]:
        with Ranks(run, dp_degree, micro_batch_size, state) as ranks:
            found += ranks.global_batches(batches)
            state = json.loads(json.dumps(ranks.state()))
    assert found == reference


def test_a_resume_with_a_batch_size_that_does_not_divide_the_rows_before(stores: list[Manifest]):
    with Ranks(over(stores[0], batch=8), 1, 8) as ranks:
        reference = ranks.rows(8)
    state, found = None, []
    for dp_degree, batch, batches in [(4, 8, 5), (3, 12, 1), (3, 3, 1), (5, 5, 1), (4, 4, 1)]:
        with Ranks(over(stores[0], batch=batch), dp_degree, batch // dp_degree, state) as ranks:
            found += ranks.rows(batches)
            state = ranks.state()
    assert found == reference


def test_a_checkpoint_with_rounded_shares_goes_on_in_its_order(
    stores: list[Manifest], recwarn: pytest.WarningsRecorder
):
    run = over(*stores, weights=(123.457, 891.011))
    rounded = build_store_sampler(run.data, 24, run.experiment.seed, dp_rank=0, dp_degree=1, rounded=True)
    assert MIXTURE not in rounded.corpus
    rows, differing = rounded.open({STATE: {"rows": 65_000}}), []
    with closing(loader(run)) as present, closing(loader(run)) as resumed:
        resumed.load_state_dict({"corpus": rounded.corpus, STATE: {"rows": 65_000}})
        assert "rounded" in str(recwarn.list[-1].message)
        assert resumed.corpus == rounded.corpus
        present.skip(65_000)
        for _ in range(30):
            window = np.empty(25, dtype=np.int64)
            expected = []
            for _ in range(24):
                rows(window)
                expected.append(window[:-1].tolist())
            assert next(resumed).tokens.tolist() == expected
            differing.append(next(present).tokens.tolist() != expected)
    assert any(differing)
    with closing(loader(run)) as present, closing(loader(run)) as resumed:
        next(present)
        resumed.load_state_dict(present.state_dict())
        assert resumed.corpus[MIXTURE] == "exact"


def test_an_epoch_is_a_permutation_of_all_windows(stores: list[Manifest]):
    windows = ShuffledWindows(stores[0], 24, 0, 0)
    split = TokenSplit(stores[0], "train")
    everything = np.empty(len(split), dtype=np.int64)
    split.read(0, everything)
    orders, beginnings = [], set()
    for epoch in range(4):
        rows = np.empty((windows.rows, 25), dtype=np.int64)
        for number, row in enumerate(rows):
            windows.read(epoch * windows.rows + number, row)
        (begin,) = [
            begin
            for begin in range(len(everything) - 24 * windows.rows)
            if sorted(map(tuple, rows.tolist()))
            == sorted(tuple(everything[at : at + 25].tolist()) for at in _places(begin, windows.rows))
        ]
        beginnings.add(begin)
        orders.append(rows.tolist())
    assert orders[0] != orders[1] != orders[2]
    assert len(beginnings) > 1, "what is left out is left out elsewhere"


def _places(begin: int, count: int) -> list[int]:
    return [begin + number * 24 for number in range(count)]


def test_seeking_reads_no_earlier_tokens(run: Experiment, monkeypatch: pytest.MonkeyPatch):
    mapped, read = [], []
    original_map, original_read = sample_store.map_field, TokenSplit.read

    def map_field(manifest: Manifest, name: str, field: Field) -> np.ndarray:
        mapped.append(name)
        return original_map(manifest, name, field)

    def read_(self: TokenSplit, begin: int, window: np.ndarray) -> list[int]:
        read.append(begin)
        return original_read(self, begin, window)

    monkeypatch.setattr(sample_store, "map_field", map_field)
    monkeypatch.setattr(TokenSplit, "read", read_)
    for rows in (0, 24 * 10**12):
        trainer = loader(over_prefetching_one(run))
        state = trainer.state_dict()
        assert state["store"] == {"rows": 0}
        trainer.load_state_dict({**state, "store": {"rows": rows}})
        assert (mapped, read) == ([], []), "opening a store reads its manifest and no more"
        next(trainer)
        trainer.close()
        assert trainer.state_dict()["store"] == {"rows": rows + 24}
        assert 24 <= len(read) <= 24 * 4  # the batch, and those prepared ahead
        mapped.clear()
        read.clear()


def over_prefetching_one(run: Experiment) -> Experiment:
    from dataclasses import replace

    return replace(run, data=replace(run.data, prefetch=1))


def test_row_order_depends_on_the_seed_and_the_store(stores: list[Manifest], monkeypatch: pytest.MonkeyPatch):
    firsts = []
    for seed in (0, 1):
        trainer = loader(over(stores[0], seed=seed))
        firsts.append(rows_of(next(trainer)))
        trainer.close()
    assert firsts[0] != firsts[1]
    begins: list[list[int]] = []
    for number in (0, 1):
        windows, found = ShuffledWindows(stores[0], 24, 0, number), []
        monkeypatch.setattr(TokenSplit, "read", lambda self, begin, window, found=found: found.append(begin))
        for index in range(10):
            windows.read(index, np.empty(25, dtype=np.int64))
        begins.append(np.diff(found).tolist())
    assert begins[0] != begins[1]


def test_masks_and_positions_follow_documents_across_shards(stores: list[Manifest]):
    trainer = loader(over(stores[0], document_mask=True, reset_positions=True, seq_len=200))
    batch = next(trainer)
    trainer.close()
    assert batch.documents is not None
    assert batch.positions is not None
    ends = batch.tokens == 256
    assert ends.any(dim=1).all(), "each row has several documents"
    assert (batch.documents[:, 1:] - batch.documents[:, :-1] == ends[:, :-1]).all()
    assert (batch.positions[:, 1:][ends[:, :-1]] == 0).all()
    assert (batch.labels[ends] == -100).all()
    assert (batch.labels[~ends] >= 0).all()


def test_a_document_at_the_window_start_is_not_a_document_start(stores: list[Manifest]):
    split = TokenSplit(stores[0], "train")
    shards = stores[0].splits["train"]
    firsts = np.cumsum([0, *(shard.numbers["tokens"] for shard in shards)]).tolist()
    begins = np.concatenate(
        [
            np.fromfile(stores[0].path / f"{shard.name}.documents", "<i8") + first
            for shard, first in zip(shards, firsts, strict=False)
        ]
    )
    for begin in begins[:-3].tolist():
        window = np.empty(60, dtype=np.int64)
        starts = split.read(begin, window)
        assert starts == [at - begin for at in begins.tolist() if begin < at < begin + 60]
        assert all(window[start - 1] == 256 for start in starts)


def test_epochs_and_sources_of_a_mixture(stores: list[Manifest]):
    trainer = loader(over(*stores, weights=(1.0, 3.0)))
    sources = [trainer.source_name(row) for row in range(96)]
    assert (sources.count("a"), sources.count("b")) == (24, 72)
    for _ in range(4):
        next(trainer)
    row = trainer.epoch_metrics()
    trainer.close()
    windows = [(store.tokens["train"] - 1) // 24 for store in stores]
    assert row == {"epoch": 96 / sum(windows), "epoch/a": 24 / windows[0], "epoch/b": 72 / windows[1]}


def test_a_mixture_by_size_finishes_all_epochs_together(stores: list[Manifest]):
    trainer = loader(over(*stores))
    for _ in range(12):
        next(trainer)
    row = trainer.epoch_metrics()
    trainer.close()
    assert row["epoch/a"] == pytest.approx(row["epoch/b"], rel=0.1)


def test_a_state_of_another_store_or_order_is_refused(stores: list[Manifest]):
    here = loader(over(stores[0]))
    state = here.state_dict()
    here.close()
    for key, run in {
        "data.paths": over(stores[1]),
        "data.weights": over(stores[0], weights=(2.0,)),
        "experiment.seed": over(stores[0], seed=1),
        "training.seq_len": over(stores[0], seq_len=25),
    }.items():
        other = loader(run)
        with pytest.raises(UserError, match=f"other data[\\s\\S]*{key}="):
            other.load_state_dict(state)
        other.close()
    again = loader(over(stores[0]), dp_degree=8, micro_batch_size=3)
    with pytest.raises(UserError, match="no position in a token store"):
        again.load_state_dict({"corpus": state["corpus"]})
    again.close()


def test_a_store_smaller_than_a_row_is_refused(stores: list[Manifest]):
    with pytest.raises(UserError, match="one row takes 100001"):
        loader(over(stores[0], seq_len=100_000))

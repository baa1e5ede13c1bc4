import json
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from tests.data.corpora import BROKEN, OWN_STREAM, OwnTable, Ranks, experiment, rows_of, write_files
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.source_check import validation_subset
from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.data.train_loader import TrainLoader
from titan_exp.ops.cross_entropy import IGNORE_INDEX

CORPORA = {
    "table": experiment(),
    "fewer documents than shards": experiment(options={"documents": 3}, validation_fraction=0.0),
    "one document": experiment(options={"documents": 1}, validation_fraction=0.0),
    "stream": experiment(source=OWN_STREAM),
    "stream of one part": experiment(source=OWN_STREAM, options={"sizes": (70,)}),
    "batch no multiple of the shards": experiment(batch=24, virtual_shards=16),
}
LAYOUTS = [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (8, 1)]
KINDS = ("python_stdlib", "text files", "lines of a file", "a stream")
"""Every kind of source that is tokenized while training."""
pytestmark = pytest.mark.filterwarnings("ignore:data.virtual_shards=8, but the stream has 1 ")
every_corpus = pytest.mark.parametrize("run", CORPORA.values(), ids=CORPORA)


def loader(run: Experiment, *, dp_rank: int = 0, dp_degree: int = 1, micro_batch_size: int = 8) -> TrainLoader:
    return TrainLoader(
        run.data,
        run.training,
        run.experiment.seed,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        micro_batch_size=micro_batch_size,
        pin_memory=False,
    )


@every_corpus
def test_global_batches_are_the_same_rows_in_every_layout(run: Experiment):
    with Ranks(run, 1, run.training.global_batch_size) as ranks:
        reference = ranks.global_batches(12)
    for dp_degree, micro_batch_size in LAYOUTS:
        with Ranks(run, dp_degree, micro_batch_size) as ranks:
            assert ranks.global_batches(12) == reference, f"dp={dp_degree}, micro-batches of {micro_batch_size}"


@every_corpus
def test_a_resume_under_other_dp_degrees_skips_and_repeats_nothing(run: Experiment):
    with Ranks(run, 1, run.training.global_batch_size) as ranks:
        reference = ranks.global_batches(18)
    state, found = None, []
    layouts = [(1, 8, 1), (4, 2, 4), (2, 1, 3), (8, 1, 4), (1, 4, 6)]
    for dp_degree, micro_batch_size, batches in layouts:
        with Ranks(run, dp_degree, micro_batch_size, state) as ranks:
            found += ranks.global_batches(batches)
            state = json.loads(json.dumps(ranks.state()))
    assert found == reference


@pytest.mark.parametrize(
    ("source", "dp_degree"),
    [*(("table", degree) for degree in (2, 3, 5, 6, 12, 24, 128)), *(("stream", degree) for degree in (3, 6, 12, 16))],
)
def test_dp_degrees_need_not_divide_the_virtual_shards(source: str, dp_degree: int):
    """64 shards, the default, of documents at hand; 8 of a stream, each of which has threads."""
    sources: dict[str, dict[str, Any]] = {
        "table": {"virtual_shards": 64, "options": {"documents": 100}},
        "stream": {"source": OWN_STREAM},
    }
    for batch in (dp_degree, 3 * dp_degree):
        run = experiment(batch=batch, **sources[source])
        with Ranks(run, 1, batch) as ranks:
            reference = ranks.rows(6)
        with Ranks(run, dp_degree, 1) as ranks:
            found = ranks.rows(2)
            state = ranks.state()
        assert found == reference[: 2 * batch]
        with Ranks(run, dp_degree, batch // dp_degree, state) as ranks:
            assert ranks.rows(4) == reference[2 * batch :]
            assert set(ranks.state()) == set(state)


@every_corpus
def test_a_resume_under_dp_degrees_that_do_not_divide_the_shards(run: Experiment):
    with Ranks(run, 1, run.training.global_batch_size) as ranks:
        reference = ranks.rows(12 * 24 // run.training.global_batch_size)
    run = replace(run, training=replace(run.training, global_batch_size=24))
    state, found = None, []
    for dp_degree, batches in [(4, 2), (3, 1), (8, 2), (6, 1), (24, 3), (1, 1), (12, 2)]:
        with Ranks(run, dp_degree, 24 // dp_degree, state) as ranks:
            found += ranks.rows(batches)
            state = ranks.state()
    assert found == reference


@pytest.mark.parametrize("data", [{}, {"source": OWN_STREAM}], ids=["table", "stream"])
def test_a_resume_with_a_batch_size_that_does_not_divide_the_rows_before(data: dict[str, Any]):
    """After 40 rows three ranks take the rows 40, 41 and 42."""
    with Ranks(experiment(**data), 1, 8) as ranks:
        reference = ranks.rows(15)
    state, found = None, []
    for dp_degree, batch, batches in [(4, 8, 5), (3, 12, 1), (3, 12, 1), (5, 5, 2), (8, 8, 1), (7, 7, 4), (2, 10, 1)]:
        with Ranks(experiment(batch=batch, **data), dp_degree, batch // dp_degree, state) as ranks:
            found += ranks.rows(batches)
            state = ranks.state()
    assert found == reference


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Experiment]:
    """In 24 virtual shards, which 3 ranks can share as well."""
    folder = write_files(tmp_path_factory.mktemp("order") / "files", 40)
    lines = folder.with_name("lines.txt")
    lines.write_text("\n".join(file.read_text() for file in sorted(folder.iterdir())))
    whole = {"virtual_shards": 24, "batch": 24}
    return {
        "python_stdlib": experiment(source="python_stdlib", **whole),
        "text files": experiment(source="text", paths=(str(folder),), **whole),
        "lines of a file": experiment(source="text", paths=(str(lines),), document="line", **whole),
        "a stream": experiment(source=OWN_STREAM, options={"sizes": (5,) * 24}, **whole),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_1_2_3_4_and_8_ranks_and_resumes_across_them_read_the_same_rows(kind: str, kinds: dict[str, Experiment]):
    run = kinds[kind]
    with Ranks(run, 1, 24) as ranks:
        reference = ranks.global_batches(12)
    assert len({tuple(batch) for batch in reference}) == 12
    for dp_degree in (2, 3, 4, 8):
        with Ranks(run, dp_degree, 24 // dp_degree) as ranks:
            assert ranks.global_batches(6) == reference[:6], f"dp={dp_degree}"
    state, found = None, []
    for dp_degree, batches in [(1, 1), (8, 2), (3, 3), (2, 1), (4, 2), (3, 1), (1, 2)]:
        with Ranks(run, dp_degree, 24 // dp_degree, state) as ranks:
            found += ranks.global_batches(batches)
            state = json.loads(json.dumps(ranks.state()))
    assert found == reference


def test_shared_parts_are_warned_about():
    said = "so the run reads each of them 3 times. To read it once, in another order, use data.virtual_shards=3 or less"
    with pytest.warns(UserWarning, match=said) as found:
        loader(experiment(source=OWN_STREAM, options={"sizes": (20, 20, 20)})).close()
    assert "data.streaming" not in str(found[0].message), "it changes nothing about a stream of the user's own"


def test_row_j_comes_from_shard_j_mod_v_and_belongs_to_rank_j_mod_dp():
    run = experiment(batch=12, virtual_shards=8)
    with Ranks(run, 1, 12) as ranks:
        rows = [row for _ in range(4) for row in rows_of(next(ranks.loaders[0]))]
    for dp_degree in (2, 4):
        with Ranks(run, dp_degree, 3) as ranks:
            for rank, own in enumerate(ranks.loaders):
                found = [row for _ in range(48 // dp_degree // 3) for row in rows_of(next(own))]
                assert found == rows[rank::dp_degree]
    # A shard's rows follow each other in its stream: each begins with the token that ended the one before.
    assert all(row[-1] == following[0] for row, following in zip(rows, rows[8:], strict=False))


def test_the_state_is_the_consumed_position_whatever_is_prefetched():
    run = experiment(prefetch=6)
    ahead, reference = loader(run), loader(run)
    states, batches = [], []
    for _ in range(10):
        states.append(json.loads(json.dumps(ahead.state_dict())))
        batches.append(rows_of(next(ahead)))
    for state, batch in zip(states, batches, strict=True):
        reference.load_state_dict(state)
        assert reference.state_dict() == state
        assert rows_of(next(reference)) == batch
    ahead.close()
    reference.close()


def test_the_seed_orders_the_data_and_the_layout_of_validation_does_not():
    first, again, other = (loader(experiment(seed=seed)) for seed in (0, 0, 1))
    batches = [[rows_of(batch) for batch in islice(stream, 3)] for stream in (first, again, other)]
    assert batches[0] == batches[1] != batches[2]
    for stream in (first, again, other):
        stream.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_documents_are_never_trained_on(seed: int):
    run = experiment(seed=seed, validation_fraction=0.3)
    held_out = validation_subset(OwnTable(run.data), 0.3)
    numbers = {held_out[index][:4] for index in range(len(held_out))}
    trainer = loader(run)
    rows = [ByteTokenizer().decode(row) for batch in islice(trainer, 150) for row in rows_of(batch)]
    assert trainer.epochs() > 2
    trainer.close()
    # The first and the last word of a row may be cut.
    found = {word[:4] for row in rows for word in row.split()[1:-1]}
    assert len(numbers) > 5
    assert len(found) == 40 - len(numbers)
    assert found.isdisjoint(numbers)


def test_epochs_are_documents_read():
    run = experiment(validation_fraction=0.0)
    source = OwnTable(run.data)
    tokens = sum(len(source[index]) + 1 for index in range(40))
    trainer = loader(run)
    assert trainer.epochs() == 0
    steps = round(3 * tokens / (8 * run.training.seq_len))
    for _ in range(steps):
        next(trainer)
    assert trainer.epochs() == pytest.approx(3, rel=0.25)
    trainer.close()


def test_masks_and_positions_as_configured():
    plain, masked = loader(experiment()), loader(experiment(document_mask=True, reset_positions=True))
    without, batch = next(plain), next(masked)
    assert without.documents is None
    assert without.positions is None
    assert batch.tokens.tolist() == without.tokens.tolist()
    for _ in range(5):
        assert batch.documents is not None
        assert batch.positions is not None
        ends = batch.tokens == 256
        assert (batch.labels[ends] == IGNORE_INDEX).all()
        assert (batch.labels[~ends] != IGNORE_INDEX).all()
        assert (batch.documents[:, 1:] - batch.documents[:, :-1] == ends[:, :-1]).all()
        assert (batch.positions[:, 1:][ends[:, :-1]] == 0).all()
        batch = next(masked)
    plain.close()
    masked.close()


def test_a_state_of_another_corpus_is_refused():
    here = loader(experiment())
    state = here.state_dict()
    same = loader(experiment(), dp_degree=2, dp_rank=1, micro_batch_size=1)
    assert same.fingerprint == here.fingerprint
    changes = {
        "data.source": experiment(options={"documents": 41}),
        "data.virtual_shards": experiment(virtual_shards=16),
        "data.validation_fraction": experiment(validation_fraction=0.2),
        "experiment.seed": experiment(seed=1),
    }
    for key, run in changes.items():
        other = loader(run)
        assert other.fingerprint != here.fingerprint
        with pytest.raises(UserError, match=f"other data[\\s\\S]*{key}="):
            other.load_state_dict(state)


def test_an_incomplete_or_torn_state_is_refused():
    with Ranks(experiment(), 2, 4) as ranks:
        ranks.global_batches(3)
        half, whole = ranks.loaders[0].state_dict(), ranks.state()
    other = loader(experiment())
    with pytest.raises(UserError, match="4 of 8 virtual shards"):
        other.load_state_dict(half)
    whole["5"] = {**whole["5"], "rows": whole["5"]["rows"] + 1}
    with pytest.raises(UserError, match="contradict each other"):
        other.load_state_dict(whole)
    with pytest.raises(UserError, match="no state of the data"):
        other.load_state_dict({})


def test_sizes_that_the_rules_refuse_fail_an_assertion():
    with pytest.raises(AssertionError):
        loader(experiment(), dp_degree=3, micro_batch_size=1)
    with pytest.raises(AssertionError):
        loader(experiment(), micro_batch_size=3)


def test_an_exception_of_the_source_reaches_the_consumer():
    broken = loader(experiment(source=BROKEN))
    with pytest.raises(FileNotFoundError, match="gone"):
        next(broken)
    broken.close()


@pytest.mark.parametrize("run", [experiment(), experiment(source=OWN_STREAM)], ids=["table", "stream"])
def test_close_ends_the_threads_and_keeps_the_state(run: Experiment):
    before = threading.active_count()
    trainer = loader(run)
    next(trainer)
    state = trainer.state_dict()
    trainer.close()
    trainer.close()
    assert threading.active_count() == before
    assert trainer.state_dict() == state
    with pytest.raises(RuntimeError, match="closed"):
        next(trainer)


def test_a_dropped_loader_ends_its_threads():
    before = threading.active_count()
    for run in (experiment(), experiment(source=OWN_STREAM)):
        next(loader(run))
    assert threading.active_count() == before


@pytest.mark.parametrize("source", ["OWN_TABLE", "OWN_STREAM"])
@pytest.mark.parametrize(
    "end",
    [
        "pass",
        *(pytest.param(end, marks=pytest.mark.night) for end in ("raise SystemExit(7)", "raise ValueError('mine')")),
    ],
)
def test_the_interpreter_exits_with_the_loader_still_open(source: str, end: str):
    program = f"""
from tests.data.corpora import {source}, experiment
from titan_exp.data.train_loader import TrainLoader
run = experiment(source={source})
layout = dict(dp_rank=0, dp_degree=1, micro_batch_size=8, pin_memory=False)
trainer = TrainLoader(run.data, run.training, run.experiment.seed, **layout)
next(trainer)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == {"pass": 0, "raise SystemExit(7)": 7}.get(end, 1)
    assert done.stderr.strip().splitlines()[-1:] == (["ValueError: mine"] if "mine" in end else [])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_pinned_batches_hold_the_same_rows():
    plain = loader(experiment(document_mask=True, reset_positions=True))
    run = experiment(document_mask=True, reset_positions=True)
    pinned = TrainLoader(
        run.data, run.training, run.experiment.seed, dp_rank=0, dp_degree=1, micro_batch_size=8, pin_memory=True
    )
    for _ in range(5):
        batch, expected = next(pinned), next(plain)
        assert batch.documents is not None
        assert batch.tokens.is_pinned()
        assert batch.documents.is_pinned()
        assert rows_of(batch.to("cuda").to("cpu")) == rows_of(expected)
    pinned.close()
    plain.close()


def test_files_on_disk_give_the_same_rows_from_anywhere(tmp_path, monkeypatch: pytest.MonkeyPatch):
    folder = write_files(tmp_path / "files", 20)
    absolute = loader(experiment(source="text", paths=(str(folder),)))
    monkeypatch.chdir(tmp_path)
    relative = loader(experiment(source="text", paths=("files",)))
    assert relative.fingerprint == absolute.fingerprint
    assert rows_of(next(relative)) == rows_of(next(absolute))
    absolute.close()
    relative.close()

"""Texts, which are tokenized once: an epoch reads each token once, in every layout; the store follows text and
tokenizer, and survives deaths, other processes and places that cannot be written."""

import json
import multiprocessing
import os
import random
import resource
import signal
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from tests.data.corpora import Ranks, Rows, experiment, rows_of, write_files
from tests.data.store_sources import TEXTS
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data import token_store, validation_loader
from titan_exp.data.source_check import training_subset
from titan_exp.data.sources.base import build_source
from titan_exp.data.tokenizers import write_tokenizer
from titan_exp.data.train_loader import TrainLoader
from titan_exp.data.validation_loader import ValidationLoader

SEQ_LEN = 64
FORMER_STATE = {
    "corpus": {
        "data.source": "text: 40 files, 5552 bytes, 8aa8c5e63bbb38f4",
        "data.content": "40 files, 5552 bytes, content ca54b13c2aea0f51a6bbdd5ed8e18ab1",
        "data.tokenizer": "bytes",
        "data.validation_fraction": 0.1,
        "data.virtual_shards": 8,
        "experiment.seed": 0,
    },
    **{str(shard): {"rows": 6, "offset": 144, "epoch": 0, "document": 0} for shard in (2, 3, 5, 7)},
    "0": {"rows": 6, "offset": 87, "epoch": 0, "document": 1},
    "1": {"rows": 6, "offset": 71, "epoch": 0, "document": 1},
    "4": {"rows": 6, "offset": 39, "epoch": 0, "document": 1},
    "6": {"rows": 6, "offset": 119, "epoch": 0, "document": 1},
}
"""State after 48 rows of `write_files(folder, 40)`, as it was saved before texts had stores."""
FORMER_ROWS = "4c82d716a595b1b1"
"""Digest of the 48 rows that it read next."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the stores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "titan_exp" / "tokens"


def stores(cache: Path) -> list[Path]:
    return [path.parents[1] for path in cache.glob("*/store/manifest.json")]


def write_random(folder: Path, sizes: list[int]) -> Path:
    """Write a file of hexadecimal digits for each size: no two rows of it are equal."""
    folder.mkdir()
    digits = random.Random(0)
    for number, size in enumerate(sizes):
        (folder / f"{number:04d}.txt").write_text(f"{digits.getrandbits(4 * size):0{size}x}")
    return folder


def text_run(folder: Path, **keys: Any) -> Experiment:
    data = {"source": "text", "paths": (str(folder),), "validation_fraction": 0.0, **keys}
    return experiment(seq_len=SEQ_LEN, **data)


SIZES = {
    "few files of unequal length": [100] * 63 + [60_000],
    "a thousand lines": [random.Random(number).randrange(1, 80) for number in range(1000)],
    "one file": [20_000],
}
LAYOUTS = [(1, 8), (4, 2), (2, 1), (4, 1), (1, 2)]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_an_epoch_reads_each_token_once_in_every_layout_and_over_resumes(sizes: list[int], tmp_path: Path):
    folder = write_random(tmp_path / "text", sizes)
    if len(sizes) == 1000:
        lines = "\n".join(path.read_text() for path in sorted(folder.iterdir()))
        folder = folder.with_suffix(".txt")
        folder.write_text(lines)
    document = "file" if folder.is_dir() else "line"
    run = text_run(folder, document=document, validation_fraction=0.0 if len(sizes) == 1 else 0.1)
    source = build_source(run.data)
    trained = training_subset(source, run.data.validation_fraction)  # type: ignore[arg-type]
    tokens = [token for number in range(len(trained)) for token in (*trained[number].encode(), 256)]
    batches = -(-len(tokens) // (8 * SEQ_LEN))
    rows, state = list[tuple[int, ...]](), None
    for piece, (dp_degree, micro_batch_size) in enumerate(LAYOUTS, 1):
        with Ranks(run, dp_degree, micro_batch_size, state) as ranks:
            rows += ranks.rows(2 * batches * piece // len(LAYOUTS) - len(rows) // 8)
            state = json.loads(json.dumps(ranks.state()))
    with Ranks(run, 1, 8) as one:
        assert one.rows(2 * batches) == rows
        epochs = one.loaders[0].epochs()
    per_epoch = len(tokens) // SEQ_LEN - (len(tokens) % SEQ_LEN == 0)
    assert epochs == pytest.approx(2 * batches * 8 / per_epoch)
    assert per_epoch == pytest.approx(len(tokens) / SEQ_LEN, abs=1)
    first, second = rows[:per_epoch], rows[per_epoch : 2 * per_epoch]
    assert first != second
    for epoch in (first, second):
        counts = predictions(epoch, tokens)
        assert set(counts.values()) == {1}, "no token is read twice"
        assert len(tokens) - len(counts) <= SEQ_LEN + 1, "less than a row is left out"


def predictions(rows: Rows, tokens: list[int]) -> Counter[int]:
    """Number of predictions of each token of the text, by its index."""
    length, places = SEQ_LEN + 1, Counter[int]()
    begins = {tuple(tokens[begin : begin + length]): begin for begin in range(len(tokens) - SEQ_LEN)}
    assert len(begins) == len(tokens) - SEQ_LEN
    for row in rows:
        places.update(range(begins[row] + 1, begins[row] + length))
    return places


@pytest.mark.parametrize("sizes", [[5, 9], [30], [1, 1, 1]], ids=str)
def test_a_text_shorter_than_a_row_is_read_over_and_over(sizes: list[int], tmp_path: Path):
    run = text_run(write_random(tmp_path / "text", sizes), reset_positions=True)
    source = build_source(run.data)
    tokens = [token for number in range(len(sizes)) for token in (*source[number].encode(), 256)]  # type: ignore[index]
    with Ranks(run, 2, 4) as ranks:
        rows = ranks.rows(2)
        assert ranks.loaders[0].epochs() == pytest.approx(16 * SEQ_LEN / len(tokens))
    assert [rows[0][0], *(token for row in rows for token in row[1:])] == (tokens * 1100)[: 16 * SEQ_LEN + 1]
    batch = next(loader(run))
    ends = batch.tokens == 256
    assert (batch.positions[:, 1:][ends[:, :-1]] == 0).all()
    assert (batch.positions[:, 1:][~ends[:, :-1]] > 0).all()


def loader(run: Experiment) -> TrainLoader:
    return TrainLoader(run.data, run.training, 0, dp_rank=0, dp_degree=1, micro_batch_size=8, pin_memory=False)


def test_a_checkpoint_of_the_former_order_goes_on_in_it(tmp_path: Path):
    run = experiment(source="text", paths=(str(write_files(tmp_path / "files", 40)),))
    with pytest.warns(UserWarning, match="continues in that order"):
        ranks = Ranks(run, 2, 4, FORMER_STATE)
    with ranks:
        found = [ranks.rows(1) for _ in range(6)]
    assert blake2b(json.dumps(found).encode(), digest_size=8).hexdigest() == FORMER_ROWS
    healed = loader(run)
    with pytest.warns(UserWarning, match="continues in that order"):
        healed.seek(FORMER_STATE)  # from another replica group
    assert rows_of(next(healed)) == found[0]
    healed.close()
    with Ranks(experiment(source="text", paths=run.data.paths, streaming=True), 1, 8, FORMER_STATE) as ranks:
        assert ranks.rows(1) == found[0]


def test_a_checkpoint_of_windows_does_not_go_on_in_virtual_shards(tmp_path: Path):
    folder = write_files(tmp_path / "files", 40)
    state = loader(text_run(folder)).state_dict()
    with pytest.raises(UserError, match=r"data\.streaming=true[\s\S]*data\.streaming=false"):
        loader(text_run(folder, streaming=True)).load_state_dict(state)


def test_a_store_follows_text_tokenizer_and_split_and_not_the_place(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_files(tmp_path / "files", 40)
    monkeypatch.chdir(tmp_path)
    for keys in ({}, {"paths": ("files",)}, {"virtual_shards": 3, "document_mask": True}):
        loader(text_run(folder, **keys))
        assert len(stores(cache)) == 1
    write_tokenizer("bytes", tmp_path, end_of_text=None, context=8)
    for count, (key, value) in enumerate(
        {"validation_fraction": 0.2, "document": "line", "tokenizer": str(tmp_path)}.items(), 2
    ):
        loader(text_run(folder, **{key: value}))
        assert len(stores(cache)) == count
    folder.rename(tmp_path / "moved")
    loader(text_run(tmp_path / "moved"))
    assert len(stores(cache)) == 4
    changed = tmp_path / "moved" / "003.txt"
    changed.write_text(changed.read_text().replace("003", "303"))
    loader(text_run(tmp_path / "moved"))
    assert len(stores(cache)) == 5


def test_a_change_during_the_writing_is_noticed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    folder, write = write_files(tmp_path / "files", 40), token_store.write_store

    def write_and_edit(*arguments: Any) -> None:
        write(*arguments)
        (folder / "003.txt").write_text("shorter")

    with monkeypatch.context() as patched:
        patched.setattr(token_store, "write_store", write_and_edit)
        with pytest.raises(UserError, match="text has changed"):
            loader(text_run(folder))
    assert stores(cache) == []
    assert not list(cache.glob("*/unfinished"))


def test_a_damaged_store_is_written_again(tmp_path: Path, cache: Path):
    run = text_run(write_files(tmp_path / "files", 40))
    rows = rows_of(next(loader(run)))
    (store,) = stores(cache)
    for damage in ("train-00000-0000.tokens", "manifest.json"):
        with (store / "store" / damage).open("r+b") as file:
            file.truncate(100)
        assert rows_of(next(loader(run))) == rows


def _open(run: Experiment, results: Any) -> None:
    results.put(rows_of(next(loader(run))))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_tokenize_once_and_a_killed_one_is_continued(tmp_path: Path, cache: Path):
    """Four ranks start together; the one that writes is killed in the middle, and another takes over."""
    reads = tmp_path / "reads"
    options = {"documents": 200, "reads": str(reads), "at": 101, "once": str(tmp_path / "once")}
    run = experiment(source=TEXTS, options=options, seq_len=SEQ_LEN)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_open, args=(run, results)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in range(3)]
    for rank in ranks:
        rank.join()
    assert sorted(rank.exitcode or 0 for rank in ranks) == [-signal.SIGKILL, 0, 0, 0]
    assert found[0] == found[1] == found[2]
    (store,) = stores(cache)
    assert sorted(path.name for path in store.iterdir()) == ["lock", "store"]
    # 2, 101 and 151 are none of the 64 that each rank reads to estimate the size.
    counts = Counter(reads.read_text().split())
    assert (counts["2"], counts["101"], counts["151"]) == (2, 2, 1)


def test_text_in_parts_is_tokenized_by_several_processes(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    run = text_run(write_files(tmp_path / "files", 40))
    rows = rows_of(next(loader(run)))
    monkeypatch.setattr(token_store, "PART_BYTES", 2000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert rows_of(next(loader(run))) == rows
    assert sorted(len(list(store.glob("store/train-*.tokens"))) for store in stores(cache)) == [1, 3]


def test_without_a_place_in_the_cache_this_machines_temporary_folder_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = text_run(write_files(tmp_path / "files", 40))
    rows = rows_of(next(loader(run)))
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(token_store.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert rows_of(next(loader(run))) == rows
    assert "Not a directory" in caplog.text
    (tmp_path / "scratch").symlink_to("not_mounted/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "scratch"))  # fails above the place
    assert rows_of(next(loader(run))) == rows
    own = tmp_path / "tmp" / f"titan_exp-{os.getuid()}"
    assert own.stat().st_mode & 0o777 == 0o700
    assert len(stores(own / "tokens")) == 1
    own.chmod(0o777)  # as if another user had made it
    with pytest.raises(UserError, match=r"there is no folder to write the tokens[\s\S]*data\.streaming=true"):
        loader(run)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    own.chmod(0o700)
    assert rows_of(next(loader(run))) == rows
    assert rows_of(next(loader(text_run(tmp_path / "files", streaming=True))))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, cache: Path):
    """A limit on the size of files fails a write as a full disk does."""
    run = text_run(write_random(tmp_path / "files", [60_000]))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_open_on_a_full_disk, args=(run, str(tmp_path), results))
    process.start()
    message = results.get()
    process.join()
    assert message.count("File too large") == 2
    assert "data.streaming=true" in message
    assert [path.name for path in cache.glob("*/*")] == ["lock"]


def _open_on_a_full_disk(run: Experiment, temporary: str, results: Any) -> None:
    token_store.tempfile.tempdir = temporary
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        loader(run)
    except UserError as error:
        results.put(str(error))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_files(tmp_path / "files", 40)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"000\.txt: Permission denied"):
        loader(text_run(folder))


def test_a_large_text_and_a_source_without_a_fingerprint_are_read_in_virtual_shards(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(token_store.data_files, "LARGEST_TEXT", 5000)
    own = experiment()
    for run, remedy in (
        (text_run(write_files(tmp_path / "files", 40)), "Make a store with titan-exp tokenize"),
        (own, f"Give {own.data.source} a fingerprint"),
    ):
        opened = loader(run)
        assert "data.virtual_shards" in opened.corpus
        assert "an epoch is not an exact pass" in opened.guarantee
        assert remedy in opened.guarantee
    assert stores(cache) == []


def test_validation_documents_are_those_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_files(tmp_path / "files", 40)
    for limit in (None, 3):
        run = text_run(folder, validation_fraction=0.3, validation_documents=limit, document_mask=True)
        shape: dict[str, Any] = {"dp_rank": 1, "dp_degree": 2, "micro_batch_size": 3}
        tokenized, stored = (
            [(batch.tokens.tolist(), batch.labels.tolist()) for batch in ValidationLoader(data, SEQ_LEN, **shape)]
            for data in (text_run(folder, **{**vars_of(run), "streaming": True}).data, opened(run).data)
        )
        assert tokenized == stored
    monkeypatch.setattr("titan_exp.data.validation_loader._tokenize", None)
    assert len(ValidationLoader(run.data, SEQ_LEN, **shape))


def vars_of(run: Experiment) -> dict[str, Any]:
    keys = ("validation_fraction", "validation_documents", "document_mask")
    return {key: getattr(run.data, key) for key in keys}


def opened(run: Experiment) -> Experiment:
    loader(run).close()
    return run


def test_a_text_without_documents_to_train_on_is_refused(tmp_path: Path):
    folder = write_files(tmp_path / "files", 3)
    with pytest.raises(UserError, match="none of the 3 documents to train on"):
        loader(text_run(folder, validation_fraction=0.999999))
    with pytest.raises(UserError, match="all of its 3 documents are empty"):
        loader(experiment(source=f"{__name__}.NoText", validation_fraction=0.0))


class NoText:
    """Three documents without text."""

    fingerprint = "nothing"

    def __init__(self, config: object) -> None:
        pass

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        return ""


def set_of(run: Experiment) -> ValidationLoader:
    return ValidationLoader(run.data, SEQ_LEN, dp_rank=0, dp_degree=1, micro_batch_size=4, all_documents=True)


def test_all_documents_of_a_set_are_tokenized_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_random(tmp_path / "text", [100] * 30 + [3000])
    run = text_run(folder, validation_fraction=0.2)
    first = [batch.tokens.tolist() for batch in set_of(run)]
    tokens = [token for path in sorted(folder.iterdir()) for token in (*path.read_bytes(), 256)]
    assert [token for batch in first for row in batch for token in row][: len(tokens) - 1] == tokens[:-1]
    assert len(stores(cache)) == 1
    monkeypatch.setattr("titan_exp.data.validation_loader.encode_document", None)
    monkeypatch.setattr("titan_exp.data.token_store.write_store", None)
    assert [batch.tokens.tolist() for batch in set_of(run)] == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    (folder / "0000.txt").write_text("changed")
    assert [batch.tokens.tolist() for batch in set_of(run)] != first


def test_a_part_of_a_text_is_tokenized_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # 0.3 s
    """A limited set and a held-out one, until text, limit, split or tokenizer change, or what is kept is damaged."""
    folder, encode = write_random(tmp_path / "text", [100] * 30), validation_loader.encode_document
    write_tokenizer("bytes", tmp_path, end_of_text=None, context=8)
    calls = list[int]()
    monkeypatch.setattr(validation_loader, "encode_document", lambda *given: calls.append(1) or encode(*given))

    def tokens(all_documents: bool = True, **keys: Any) -> tuple[list, int]:
        """Rows, and the number of documents that were tokenized for them."""
        calls.clear()
        shape: dict[str, Any] = {"dp_rank": 0, "dp_degree": 1, "micro_batch_size": 4, "all_documents": all_documents}
        loader = ValidationLoader(text_run(folder, **keys).data, SEQ_LEN, **shape)
        return [batch.tokens.tolist() for batch in loader], len(calls)

    first = tokens(validation_documents=3)
    assert first[1] == 3
    assert tokens(validation_documents=3) == (first[0], 0)
    assert tokens(validation_documents=4)[1] == 4
    assert tokens(validation_documents=3, tokenizer=str(tmp_path))[1] == 3
    assert tokens(validation_documents=3, validation_fraction=0.5, all_documents=False)[1] == 3
    assert tokens(validation_documents=3, validation_fraction=0.5, all_documents=False)[1] == 0
    assert tokens(validation_documents=3, validation_fraction=0.9, all_documents=False)[1] == 3
    for kept in cache.glob("*.npz"):
        kept.write_bytes(kept.read_bytes()[:-40])
    assert tokens(validation_documents=3) == first
    (folder / "0029.txt").write_text("changed")
    assert tokens(validation_documents=3) == first, "another text, whose first documents are the same"
    (folder / "0000.txt").write_text("changed")
    assert tokens(validation_documents=3)[0] != first[0]
    monkeypatch.setattr(token_store, "_places", lambda *, make=False: iter(()))
    assert tokens(validation_documents=2)[1] == tokens(validation_documents=2)[1] == 2
    assert tokens()[1] == 30

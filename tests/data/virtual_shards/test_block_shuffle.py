import json
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import pytest

from tests.data.corpora import OwnStream, experiment, text
from titan_exp.config.data_files import unit_hash
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.data.virtual_shards import BlockShuffledStream, DaemonThreadPool, EpochShuffle, StreamSpec

CONFIG = experiment().data
MANY, FEW = (9,) * 20, (50, 30)


@pytest.fixture
def pool() -> Iterator[DaemonThreadPool]:
    pool = DaemonThreadPool(2)
    yield pool
    pool.close()


def streams(
    pool: DaemonThreadPool,
    sizes: Sequence[int],
    *,
    shards: int = 8,
    seed: int = 0,
    buffer: int = 4,
    held_out: float = 0.0,
) -> list[BlockShuffledStream]:
    source = OwnStream(CONFIG, sizes=sizes)
    order = EpochShuffle(source.parts, seed)
    corpus = StreamSpec(source, ByteTokenizer(), order, seed, shards, buffer, held_out)
    return [BlockShuffledStream(corpus, pool, shard) for shard in range(shards)]


def read(stream: BlockShuffledStream, *, epoch: int) -> list[str]:
    found = []
    while stream.position()["epoch"] == epoch:
        found.append(bytes(stream.tokens()[:-1].astype(np.uint8)).decode())
        stream.advance()
    return found


@pytest.mark.parametrize("sizes", [MANY, FEW], ids=["many parts", "few parts"])
def test_each_epoch_of_all_shards_is_every_document_once(pool: DaemonThreadPool, sizes: Sequence[int]):
    everything = sorted(text(number) for number in range(sum(sizes)))
    shards = streams(pool, sizes)
    first = [read(stream, epoch=0) for stream in shards]
    second = [read(stream, epoch=1) for stream in shards]
    assert sorted(chain(*first)) == everything
    assert sorted(chain(*second)) == everything
    assert first != second


def test_documents_are_shuffled_within_blocks_by_the_seed(pool: DaemonThreadPool):
    once, again, other = (read(streams(pool, (40,), shards=1, seed=seed)[0], epoch=0) for seed in (0, 0, 1))
    assert once == again != other
    unshuffled = [text(number) for number in range(40)]
    assert once != unshuffled
    assert all(set(once[at : at + 4]) == set(unshuffled[at : at + 4]) for at in range(0, 40, 4))
    orders = {tuple(unshuffled.index(document) - at for document in once[at : at + 4]) for at in range(0, 40, 4)}
    assert len(orders) > 3


@pytest.mark.parametrize("sizes", [MANY, FEW, (3,)], ids=["many parts", "few parts", "too few documents"])
def test_seek_continues_exactly_from_any_document(pool: DaemonThreadPool, sizes: Sequence[int]):
    walked = streams(pool, sizes)[5]
    documents, positions = [], []
    for _ in range(60):
        positions.append(json.loads(json.dumps(walked.position())))
        documents.append(walked.tokens().tolist())
        walked.advance()
    assert positions[-1]["epoch"] > 0
    for done in range(0, 60, 7):
        sought = streams(pool, sizes)[5]
        sought.seek(positions[done])
        for document in documents[done:]:
            assert sought.tokens().tolist() == document
            sought.advance()


def test_a_shard_without_a_turn_takes_the_whole_part(pool: DaemonThreadPool):
    shards = streams(pool, (3,))
    assert [len(read(stream, epoch=0)) for stream in shards] == [1, 1, 1, 3, 3, 3, 3, 3]
    assert set(read(shards[7], epoch=1)) == {text(0), text(1), text(2)}


def test_held_out_documents_are_never_read(pool: DaemonThreadPool):
    found = [document for stream in streams(pool, MANY, held_out=0.2) for document in read(stream, epoch=0)]
    assert sorted(found) == sorted(document for document in map(text, range(180)) if unit_hash(document) >= 0.2)
    assert len(found) < 170


def test_empty_parts_are_skipped_and_an_empty_corpus_is_refused(pool: DaemonThreadPool):
    found = [document for stream in streams(pool, (0, 5, 0, 5), shards=2) for document in read(stream, epoch=0)]
    assert sorted(found) == [text(number) for number in range(10)]
    with pytest.raises(UserError, match="no text to train on"):
        streams(pool, (0, 0))[0].tokens()


def test_the_first_blocks_of_all_shards_are_read_in_the_background(pool: DaemonThreadPool):
    shards = streams(pool, MANY)
    for stream in shards:
        stream.prefetch()
    for stream in shards:
        assert stream._next is not None
        stream._next.result(timeout=10)


def test_epochs_count_parts(pool: DaemonThreadPool):
    stream = streams(pool, MANY)[0]
    assert stream.epochs({}) == 0
    assert stream.epochs({"epoch": 1, "part": 0}) == 1
    assert stream.epochs({"epoch": 1, "part": 2}) == pytest.approx(1 + 2 / 3)

import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from tests.data.corpora import OwnTable, experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.data.virtual_shards import EpochShuffle, IndexedStream, TokenizedDocuments

CONFIG = experiment().data


def streams(source, shards: int, seed: int = 0) -> list[IndexedStream]:
    documents = TokenizedDocuments(source, ByteTokenizer())
    order = EpochShuffle(len(source), seed)
    return [IndexedStream(documents, order, shard=shard, shards=shards) for shard in range(shards)]


def read(stream: IndexedStream, *, epoch: int) -> list[bytes]:
    """Documents of the stream's current epoch, which must be `epoch`."""
    found = []
    while stream.position()["epoch"] == epoch:
        tokens = stream.tokens()
        assert tokens[-1] == 256
        found.append(bytes(tokens[:-1].astype(np.uint8)))
        stream.advance()
    return found


def test_each_epoch_of_all_shards_is_a_new_permutation_of_all_documents():
    source = OwnTable(CONFIG, documents=43)
    everything = sorted(source[index].encode() for index in range(43))
    shards = streams(source, 8)
    first = [read(stream, epoch=0) for stream in shards]
    second = [read(stream, epoch=1) for stream in shards]
    assert {len(documents) for documents in first} == {5, 6}
    assert sorted(chain(*first)) == everything
    assert sorted(chain(*second)) == everything
    assert all(set(one) != set(two) for one, two in zip(first, second, strict=True))


def test_the_seed_changes_the_order_and_nothing_else_does():
    source = OwnTable(CONFIG, documents=43)
    once, again, other = (read(streams(source, 8, seed)[3], epoch=0) for seed in (0, 0, 1))
    assert once == again != other


@pytest.mark.parametrize("documents", [1, 3, 8])
def test_with_fewer_documents_than_shards_the_shards_start_spread_out(documents: int):
    source = OwnTable(CONFIG, documents=documents + 16)  # the documents are long where the number is
    source._texts = source._texts[16:]
    shards = streams(source, 8)
    starts = [(bytes(stream.tokens()[:-1]), stream.start) for stream in shards]
    assert len(set(starts)) == 8
    # As many shards begin in one document as in another, give or take one.
    counts = Counter(text for text, _ in starts).values()
    assert len(counts) == documents
    assert max(counts) - min(counts) <= 1
    assert all(0 <= start < 1 for _, start in starts)
    if documents < 8:
        assert all(len(read(stream, epoch=0)) == documents for stream in shards)


def test_seek_reaches_any_position_by_reading_one_document():
    source = OwnTable(CONFIG, documents=1000)
    walked, sought = streams(source, 8)[5], streams(source, 8)[5]
    for _ in range(300):
        walked.advance()
    position = json.loads(json.dumps(walked.position()))
    assert position == {"epoch": 2, "document": 50}
    source.reads.clear()
    sought.seek(position)
    assert sought.tokens().tolist() == walked.tokens().tolist()
    assert len(source.reads) == 1
    sought.seek(None)
    assert sought.position() == {"epoch": 0, "document": 0}


def test_empty_documents_are_skipped():
    source = OwnTable(CONFIG, documents=20, empty=range(0, 20, 2))
    found = [document for stream in streams(source, 4) for document in read(stream, epoch=0)]
    assert sorted(found) == sorted(source[index].encode() for index in range(1, 20, 2))


def test_a_corpus_of_empty_documents_is_refused():
    with pytest.raises(UserError, match="no text"):
        streams(OwnTable(CONFIG, documents=3, empty=range(3)), 4)[0].tokens()


def test_a_document_in_use_by_several_shards_is_read_once():
    source = OwnTable(CONFIG, documents=1)
    shards = streams(source, 8)
    for stream in shards:
        stream.tokens()
    assert source.reads == [0]


def test_epochs_count_documents_of_the_whole_corpus():
    shards = streams(OwnTable(CONFIG, documents=40), 8)
    assert shards[0].epochs({}) == 0
    assert shards[0].epochs({"epoch": 2, "document": 0}) == 2
    assert shards[0].epochs({"epoch": 2, "document": 1}) == pytest.approx(2.2)
    # One document read by each of 8 shards is 8 passes over a corpus of one.
    assert streams(OwnTable(CONFIG, documents=1), 8)[0].epochs({"epoch": 1, "document": 0}) == 8

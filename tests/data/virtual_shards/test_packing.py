import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.data.corpora import OwnTable, experiment, text
from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.data.virtual_shards import EpochShuffle, IndexedStream, PackedStream, TokenizedDocuments

CONFIG = experiment().data
SEQ_LEN = 50
BYTES = ByteTokenizer()


class Counted(ByteTokenizer):
    """Byte tokenizer that counts encoded documents."""

    encoded = 0

    def encode(self, text: str) -> np.ndarray:
        self.encoded += 1
        return super().encode(text)


def stream(*, documents: int = 30, shards: int = 4, shard: int = 1, tokenizer: ByteTokenizer = BYTES) -> IndexedStream:
    source = TokenizedDocuments(OwnTable(CONFIG, documents=documents), tokenizer)
    return IndexedStream(source, EpochShuffle(documents, 0), shard=shard, shards=shards)


def expected(tokens: int, **which: Any) -> list[int]:
    """First tokens of a shard, from its documents."""
    walked, found = stream(**which), []
    skipped = int(len(walked.tokens()) * walked.start)
    while len(found) < tokens + skipped:
        found += walked.tokens().tolist()
        walked.advance()
    return found[skipped : tokens + skipped]


def rows(packed: PackedStream, count: int) -> list[list[int]]:
    windows = np.zeros((count, SEQ_LEN + 1), dtype=np.int64)
    for window in windows:
        packed.next_row(window)
    return windows.tolist()


@pytest.mark.parametrize("which", [{}, {"documents": 1, "shards": 3, "shard": 2}, {"documents": 2, "shards": 6}])
def test_every_token_is_predicted_once_in_order(which: dict[str, Any]):
    found = rows(PackedStream(stream(**which), SEQ_LEN), 40)
    tokens = expected(40 * SEQ_LEN + 1, **which)
    assert [found[0][0], *(token for row in found for token in row[1:])] == tokens
    assert all(row[-1] == following[0] for row, following in pairwise(found))


def test_document_starts():
    packed, window = PackedStream(stream(), 200), np.zeros(201, dtype=np.int64)
    several = 0
    for _ in range(60):
        starts = packed.next_row(window)
        assert starts == [end + 1 for end in np.flatnonzero(window[:-1] == 256)]
        several += len(starts) > 1
    assert several, "no row held two starts, so the test shows little"


def test_state_after_any_row_continues_exactly():
    reference = rows(PackedStream(stream(), SEQ_LEN), 40)
    packed = PackedStream(stream(), SEQ_LEN)
    for done in range(40):
        resumed = PackedStream(stream(), SEQ_LEN)
        resumed.load_state_dict(json.loads(json.dumps(packed.state_dict())))
        assert rows(resumed, 40 - done) == reference[done:]
        assert rows(packed, 1) == [reference[done]]


@pytest.mark.parametrize("which", [{}, {"documents": 1, "shards": 3, "shard": 2}, {"documents": 2, "shards": 6}])
@pytest.mark.parametrize("seq_len", [1, 7, 50, 400])
def test_a_skipped_row_leaves_the_state_of_a_read_one(which: dict[str, Any], seq_len: int):
    read, skipped = PackedStream(stream(**which), seq_len), PackedStream(stream(**which), seq_len)
    window = np.zeros(seq_len + 1, dtype=np.int64)
    for _ in range(40):
        read.next_row(window)
        skipped.skip_row()
        assert skipped.state_dict() == read.state_dict()


def test_the_state_before_the_first_row_can_be_restored():
    packed = PackedStream(stream(documents=1, shards=3, shard=2), SEQ_LEN)
    assert packed.state_dict() == {"rows": 0}
    first = rows(packed, 5)
    packed.load_state_dict({"rows": 0})
    assert rows(packed, 5) == first


def test_rows_of_one_document_encode_it_once():
    tokenizer = Counted()
    packed = PackedStream(stream(documents=1, shards=1, shard=0, tokenizer=tokenizer), 5)
    window = np.zeros(6, dtype=np.int64)
    for _ in range(len(text(0)) // 5):
        packed.next_row(window)
    assert tokenizer.encoded == 1
    assert packed.state_dict()["epoch"] == 0

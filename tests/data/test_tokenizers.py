import numpy as np

from tests.data.corpora import experiment
from titan_exp.data.tokenizers import ByteTokenizer, build_tokenizer


def test_bytes_round_trip():
    tokenizer = build_tokenizer(experiment(tokenizer="bytes").data)
    text = "plain, ünïcödé, 漢字, \0, 🙂\n"
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids.tolist()) == text
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)


def test_ids_hold_the_end_of_text_without_wrapping():
    ids = ByteTokenizer().encode("a")
    assert np.append(ids, np.asarray(256, ids.dtype)).tolist() == [97, 256]


def test_invalid_ids_decode_to_nothing_or_a_replacement():
    assert ByteTokenizer().decode([104, 105, 256, 300, 0xE6]) == "hi\ufffd"
    assert ByteTokenizer().encode("\ud800").tolist() == [63]

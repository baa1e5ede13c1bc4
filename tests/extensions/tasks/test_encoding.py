"""Token rows: the border of context and continuation, cut contexts, windows of documents, refused items."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from titan_exp.extensions.tasks.encoding import EncodedTask, Row, encode
from titan_exp.extensions.tasks.formats import Item, Kind, Task

BYTES = ByteTokenizer()
END = BYTES.end_of_text
PAIRS = [("A", "B"), ("AB", "C"), ("Ġ", "y"), ("e", "Ġ"), ("eĠ", "d")]
"""Merges of the tokenizer below: `A` and `B` of a border become one token."""


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """Byte-level BPE whose tokens cross words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*letters, *("".join(pair) for pair in PAIRS), "</s>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=PAIRS))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return HuggingFaceTokenizer(str(path))


class Begun(ByteTokenizer):
    """Byte tokenizer with a token for the beginning of a text."""

    begin_of_text = 300


def task(
    *choices: tuple[str, str],
    convention: Any = "whole",
    kind: Kind = "choice",
    delimiter: str = "",
    neutral: str | None = None,
) -> Task:
    return Task("t", kind, (Item(choices, (0,), neutral),), 0.5, "acc", convention, delimiter, "file")


def parts(row: Row, tokenizer: Any = BYTES) -> tuple[list[int] | str, str]:
    """Context and targets, as text after the tokens that are none."""
    context = tokenizer.decode(row.tokens[: row.first])
    special = [int(one) for one in row.tokens[: row.first] if one >= END]
    return ([*special, context] if special else context), tokenizer.decode(row.tokens[row.first :])  # type: ignore


def words(tokenizer: HuggingFaceTokenizer, tokens: np.ndarray) -> list[str]:
    return [tokenizer.decode([one]) for one in tokens]


def test_the_space_of_the_border_is_scored():
    found = encode(task(("Q: ", "a"), ("Q:", " bc"), delimiter=" "), BYTES, 64)
    assert [parts(row) for row in found.rows] == [("Q:", " a"), ("Q:", " bc")]
    assert found.characters.tolist() == [[1, 2]]
    assert found.scored_bytes.tolist() == found.tokens.tolist() == [[2, 3]]
    apart = encode(task(("Q: ", "a"), ("Q:", " bc"), convention="apart"), BYTES, 64)
    assert [parts(row) for row in apart.rows] == [("Q: ", "a"), ("Q:", " bc")]


def test_a_merge_across_the_border(merging: HuggingFaceTokenizer):
    """`whole` takes from the whole text what lies beyond the context's number of tokens, as lm-eval; `apart` keeps both
    texts."""
    whole = encode(task(("xA", "BCD"), ("xA", "yz")), merging, 64)
    assert [words(merging, row.tokens) for row in whole.rows] == [["x", "A", "D"], ["x", "A", "y", "z"]]
    assert [row.first for row in whole.rows] == [2, 2]
    apart = encode(task(("xA", "BCD"), ("xA", "yz"), convention="apart"), merging, 64)
    assert [words(merging, row.tokens) for row in apart.rows] == [["x", "A", "B", "C", "D"], ["x", "A", "y", "z"]]
    common = encode(task(("xA", "BCD"), ("xA", "yz"), convention="common"), merging, 64)
    assert [words(merging, row.tokens[row.first :]) for row in common.rows] == [["ABC", "D"], ["A", "y", "z"]]
    assert common.scored_bytes.tolist() == [[4, 3]]


def test_a_space_that_merges_with_either_side(merging: HuggingFaceTokenizer):
    """The trailing space goes to the continuation, and ` y` is one token; apart, `e ` is one."""
    for convention, expected in (("whole", ["e", " y"]), ("apart", ["e ", "y"])):
        (row,) = encode(task(("e ", "y"), kind="continuation", convention=convention), merging, 64).rows
        assert (words(merging, row.tokens), row.first) == (expected, 1)


def test_an_empty_context_has_one_prefix_token():
    (row,) = encode(task(("", "a"), kind="continuation"), BYTES, 64).rows
    assert (row.tokens.tolist(), row.first) == ([END, ord("a")], 1)
    (row,) = encode(task((" ", "a"), kind="continuation"), BYTES, 64).rows
    assert (row.tokens.tolist(), row.first) == ([END, ord(" "), ord("a")], 1)
    (row,) = encode(task(("", "a"), kind="continuation"), Begun(), 64).rows
    assert row.tokens.tolist() == [300, ord("a")]


def test_the_beginning_of_a_text():
    """OLMo and CORE put it before every row, lm-eval before none that has a context."""
    firsts = {}
    for convention in ("whole", "apart", "common"):
        for tokenizer in (BYTES, Begun()):
            found = encode(task(("x", "a"), ("x", "b"), convention=convention), tokenizer, 64)
            firsts[convention, type(tokenizer).__name__] = int(found.rows[0].tokens[0])
    assert firsts == {
        ("whole", "ByteTokenizer"): ord("x"),
        ("whole", "Begun"): ord("x"),
        ("apart", "ByteTokenizer"): ord("x"),
        ("apart", "Begun"): 300,
        ("common", "ByteTokenizer"): END,
        ("common", "Begun"): 300,
    }


def test_common_tokens_are_context():
    found = encode(task(("Q", " the cat"), ("Q", " the dog"), convention="common", delimiter=" "), BYTES, 64)
    assert [parts(row) for row in found.rows] == [([END, "Q the "], "cat"), ([END, "Q the "], "dog")]
    assert found.bytes.tolist() == [[3, 3]]
    found = encode(task(("the cat", " ran"), ("the cow", " ran"), convention="common", delimiter=" "), BYTES, 64)
    assert [parts(row) for row in found.rows] == [([END, "the cat"], " ran"), ([END, "the cow"], " ran")]
    assert (found.bytes.tolist(), found.scored_bytes.tolist()) == ([[3, 3]], [[4, 4]])
    found = encode(task(("a b", " \n c"), convention="common", kind="continuation"), BYTES, 64)
    assert [parts(row) for row in found.rows] == [([END, "a b"], " \n c")]


def test_contexts_are_cut_from_the_left_and_continuations_never():
    found = encode(task(("abcdef", "gh"), ("ef", "gh"), neutral="xxxxxx"), BYTES, 4)
    assert [parts(row) for row in found.rows] == [("def", "gh"), ("ef", "gh")]
    assert [parts(row) for row in found.neutral] == [("xxx", "gh")] * 2
    assert found.truncated == 3
    assert [parts(row) for row in encode(task(("ab", "cdef")), BYTES, 4).rows] == [("b", "cdef")]
    with pytest.raises(UserError, match=r"item 1 \(\): its choice 1 has 5 tokens, and the model reads 4"):
        encode(task(("ab", "cdefg")), BYTES, 4)


def windows(text: str, max_tokens: int) -> list[tuple[list[int], list[int]]]:
    found = encode(task(("", text), kind="rolling"), BYTES, max_tokens)
    assert found.windows.tolist() == [[len(found.rows)]]
    return [(row.tokens[: row.first].tolist(), row.tokens[row.first :].tolist()) for row in found.rows]


def test_windows_are_those_of_the_harness():
    """As `make_disjoint_window(get_rolling_token_windows(tokens, END, 3, 1))` of lm-eval 0.4.13."""
    assert windows("\0\1\2\3\4\5\6\7", 3) == [([END], [0, 1, 2]), ([2], [3, 4, 5]), ([4, 5], [6, 7])]
    assert windows("\0\1\2\3\4\5", 3) == [([END], [0, 1, 2]), ([2], [3, 4, 5])]
    assert windows("\0\1", 3) == [([END], [0, 1])]


@pytest.mark.parametrize("length", range(1, 24))
def test_every_token_of_a_document_is_scored_once(length: int):
    text = "".join(map(chr, range(length)))
    found = windows(text, 5)
    assert [token for _, targets in found for token in targets] == list(range(length))
    assert all(context and len(context) + len(targets) <= 6 for context, targets in found)


REFUSED = {
    "no answer": (task(("Q", " "), ("Q", " a"), delimiter=" "), "its choice 1 is empty"),
    "no token": (task(("Q", "a"), ("Q", "")), "its choice 2 has no tokens of its own"),
    "an equal choice": (task(("Q", " a"), ("Q", " a"), convention="common"), "its choice 1 has no tokens of its own"),
    "a prefix": (task(("Q", " ab"), ("Q", " a"), convention="common"), "its choice 2 has no tokens of its own"),
    "an empty document": (task(("", ""), kind="rolling"), "its choice 1 is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_items_that_cannot_be_scored_are_refused(name: str):
    refused, reason = REFUSED[name]
    with pytest.raises(UserError, match=f"t has no item that can be scored; item 1 \\(\\): {reason}"):
        encode(refused, BYTES, 64)


def test_a_token_across_the_border_is_refused_where_nanochat_asserts(merging: HuggingFaceTokenizer):
    with pytest.raises(UserError, match="a token reaches from its context"):
        encode(task(("xA", "BCD"), convention="common", kind="continuation"), merging, 64)


def test_refused_items_leave_the_others_in_place():
    items = (
        Item((("Q", " a"), ("Q", " b"), ("Q", " c")), (0,), "N", id="first"),
        Item((("Q", " a"), ("Q", " ")), (0,), "N", id="second"),
        Item((("Q", " é0"), ("Q", " de")), (1,), "N", id="third"),
    )
    found = encode(Task("t", "choice", items, 0.5, "acc", "whole", " ", "file"), BYTES, 64)
    assert found.refused == ("item 2 (second): its choice 2 is empty",)
    assert [item.id for item in found.items] == ["first", "third"]
    assert [(row.item, row.choice) for row in found.rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [(row.item, row.choice) for row in found.neutral] == [(row.item, row.choice) for row in found.rows]
    assert array(found, "windows") == [[1, 1, 1], [1, 1, 0]]
    assert array(found, "characters") == [[1, 1, 1], [2, 2, 0]]
    assert array(found, "bytes") == [[1, 1, 1], [3, 2, 0]]
    assert array(found, "scored_bytes") == array(found, "tokens") == [[2, 2, 2], [4, 3, 0]]
    assert {row.tokens.dtype for row in found.rows} == {np.dtype(np.int32)}


def array(found: EncodedTask, name: str) -> list[list[int]]:
    return getattr(found, name).tolist()

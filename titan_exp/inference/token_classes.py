"""Token classes by their text in context: line breaks, indentation, keywords, word starts, digits, brackets."""

import keyword
import re
from collections.abc import Sequence

import numpy as np

from titan_exp.data.tokenizers.base import Tokenizer

PATTERNS = {
    "line breaks": r"[\r\n]+",
    "indentation": r"(?<=\n)[ \t]+",
    "spaces": r"\s+",
    "keywords": rf"(?<!\w)(?:{'|'.join(keyword.kwlist)})(?!\w)",
    "capital letters": r"[A-Z]+",
    "word starts": r"(?<![^\W\d_])[^\W\d_]",
    "letters inside words": r"[^\W\d_]",
    "digits": r"\d+",
    "underscores": r"_+",
    "brackets": r"[()\[\]{}]",
    "quotes": r"[\"'`]",
    "operators": r"[-+*/%=<>!&|^~@]",
    "punctuation": r"[.,:;?#$\\]",
    "other characters": r"(?s:.)",
}
"""Regular expression of each class; the first that matches counts."""

CLASSES = (*PATTERNS, "ends of text")
"""Names of the classes, in the plural."""

_CODE = re.compile(r"^[ \t]*(?:def|class) \w+.*:[ \t]*$", re.MULTILINE)


class TokenClassifier:
    """Classifies tokens by their text; a token of several characters has the class of its first that is no space.

    Keywords are Python's, and only in rows that have Python's definitions: English has the words too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self._texts: dict[int, str] = {}
        self._patterns = {code: _compiled(code=code) for code in (False, True)}

    def text(self, token: int) -> str:
        """Text of one token; empty for the end of text."""
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]

    def classify(self, tokens: Sequence[int]) -> np.ndarray:
        """Index in `CLASSES` of each token of a row, int64 [tokens]."""
        texts = [self.text(token) for token in tokens]
        row = "".join(texts)
        classes = self._classify_text(row)
        lengths = np.array([len(text) for text in texts])
        # Place of the first character that is no space, or of the last one.
        lead = np.array([min(len(text) - len(text.lstrip(" ")), len(text) - 1) for text in texts])
        places = np.cumsum(lengths) - lengths + np.maximum(lead, 0)
        if not row:
            return np.full(len(texts), CLASSES.index("ends of text"))
        found = classes[np.minimum(places, len(row) - 1)]
        return np.where(lengths == 0, CLASSES.index("ends of text"), found)

    def _classify_text(self, text: str) -> np.ndarray:
        classes = np.zeros(len(text), dtype=np.int64)
        for match in self._patterns[_CODE.search(text) is not None].finditer(text):
            assert match.lastindex is not None, "every pattern is a group"
            classes[match.start() : match.end()] = match.lastindex - 1
        return classes


def _compiled(*, code: bool) -> re.Pattern[str]:
    """All patterns as alternatives, a group each; without `code` that of keywords matches nothing."""
    return re.compile(
        "|".join(f"({'(?!)' if name == 'keywords' and not code else pattern})" for name, pattern in PATTERNS.items())
    )

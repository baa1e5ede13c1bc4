"""Hugging Face tokenizer: `tokenizer.json`, and the end-of-text token from `tokenizer_config.json`."""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.data_files import tokenizer_file
from titan_exp.config.paths.foreign_file import read_object

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "[EOS]")
"""End-of-text names of published tokenizers, in order of preference."""


class HuggingFaceTokenizer:
    """Tokenizer from the file `path`, or from `tokenizer.json` in the folder `path`.

    Special tokens in text are encoded as plain text. Raises UserError if the file cannot be read or has no known
    end-of-text token.
    """

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        file = tokenizer_file(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            remedy = "data.tokenizer=bytes, or the path of a tokenizer.json or of the folder that holds one"
            raise _refusal(path, f"{file} cannot be read as a tokenizer ({error})", remedy) from error
        # A saved truncation length would silently cut documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[self._end_of_text_name(path, file, vocabulary)]
        digest = blake2b(file.read_bytes() + str(self.end_of_text).encode(), digest_size=8)
        self.fingerprint = f"tokenizer.json {digest.hexdigest()}"
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.int32

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, uint16 or int32 [tokens], without added special tokens."""
        try:
            return self._encode(text)
        except (TypeError, UnicodeEncodeError):  # a lone surrogate, possible in JSON but not in UTF-8
            return self._encode(text.encode("utf-8", errors="replace").decode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, without special tokens and ids beyond the vocabulary."""
        return self._tokenizer.decode([int(token) for token in ids if int(token) < self.vocab_size])

    def _encode(self, text: str) -> np.ndarray:
        # A batch of one: unlike `encode`, it releases the GIL.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype)

    def _end_of_text_name(self, path: str, file: Path, vocabulary: dict[str, int]) -> str:
        declared = _declared_end_of_text(file.with_name("tokenizer_config.json"))
        if declared is not None and declared in vocabulary:
            return declared
        for name in END_OF_TEXT_NAMES:
            if name in vocabulary:
                return name
        specials = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        raise _refusal(
            path,
            "no end-of-text token is known: "
            + (f"tokenizer_config.json names {declared!r}, which it lacks" if declared else "none is declared")
            + f"; its special tokens are {', '.join(specials) or 'none'}",
            'put {"eos_token": "NAME"} with one of them into a tokenizer_config.json beside the tokenizer',
        )


def _declared_end_of_text(file: Path) -> str | None:
    try:
        declared: Any = read_object(file).get("eos_token")
    except UserError:
        return None
    if isinstance(declared, dict):
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None


def _refusal(path: str, reason: str, remedy: str) -> UserError:
    return UserError("The tokenizer cannot be used.", [Violation("data.tokenizer", path, reason, remedy)])

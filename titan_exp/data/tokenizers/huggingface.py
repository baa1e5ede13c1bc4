"""A Hugging Face `tokenizer.json`, run by the `tokenizers` library, with its end-of-text token found beside it."""

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.data_files import tokenizer_file

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "[EOS]")
"""Names under which published tokenizers keep their end-of-text token, tried in this order."""


class HuggingFaceTokenizer:
    """The tokenizer in the file `path`, or in `tokenizer.json` of the folder `path`.

    Text never turns into special tokens: a document that contains the characters of one is encoded as plain text.
    Raises UserError where the file is missing or unreadable, or where no end-of-text token can be told.
    """

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        file = tokenizer_file(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            remedy = "data.tokenizer=bytes, or the path of a tokenizer.json or of the folder that holds one"
            raise _refusal(path, f"{file} cannot be read as a tokenizer ({error})", remedy) from error
        # A saved truncation or padding length would cut documents without a word.
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
        except (TypeError, UnicodeEncodeError):  # a lone surrogate, which JSON can hold and UTF-8 cannot
            return self._encode(text.encode("utf-8", errors="replace").decode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out; ids that the vocabulary lacks stand for no text."""
        return self._tokenizer.decode([int(number) for number in ids if int(number) < self.vocab_size])

    def _encode(self, text: str) -> np.ndarray:
        # A batch of one: unlike `encode`, it leaves the interpreter to the training thread meanwhile.
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
        declared: Any = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(declared, dict):
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None


def _refusal(path: str, reason: str, remedy: str) -> UserError:
    return UserError("The tokenizer cannot be used.", [Violation("data.tokenizer", path, reason, remedy)])

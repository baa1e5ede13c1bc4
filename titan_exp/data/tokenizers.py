"""Tokenizers: bytes, or Hugging Face's tokenizer.json."""

import json
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titan_exp.config.data_files import END_OF_TEXT, byte_words, read_manifest, tokenizer_file, tokenizer_path
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.foreign_file import read_object
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import BYTES_VOCABULARY


class Tokenizer(Protocol):
    """Tokenizer interface of the data loaders and `generate`."""

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id of the end-of-text (EOS) token, appended to every document."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of vocabulary and merges."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as ids [tokens], in an integer dtype wide enough for the vocabulary, without EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; invalid UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self) -> np.ndarray:
        """Number of bytes of text that each id stands for, int64 [vocab_size]; 0 for special tokens."""
        ...


def encode_document(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Encode `text` with EOS, [length + 1]. Raises UserError if your source returns anything but text."""
    if not isinstance(text, str):
        raise UserError(f"data.source: a document has the type {type(text).__name__}, and documents must be str.")
    tokens = tokenizer.encode(text)
    return np.append(tokens, np.asarray(tokenizer.end_of_text, dtype=tokens.dtype))


class ByteTokenizer:
    """Byte tokenizer: UTF-8 bytes are ids 0 to 255, end-of-text is 256."""

    vocab_size = BYTES_VOCABULARY
    end_of_text = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as the ids of its UTF-8 bytes, uint16 [bytes]. Lone surrogates become `?`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; ids above 255 (end-of-text, vocabulary padding) are skipped."""
        return bytes(token for token in map(int, ids) if token < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """One byte for each id below 256."""
        return (np.arange(self.vocab_size) < 256).astype(np.int64)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
)


def write_tokenizer(tokenizer: str, folder: Path, *, end_of_text: str | None, context: int) -> list[str]:
    """Write a tokenizer's files into a folder, for `transformers.AutoTokenizer`; returns their names. `tokenizer` is
    `bytes`, or the path of a tokenizer.json or of a folder, which may have none. `end_of_text` names the end-of-text
    token if tokenizer_config.json does not; `context` is the maximum sequence length in tokens."""
    if tokenizer == "bytes":
        _write_byte_tokenizer(folder / "tokenizer.json")
        end_of_text = END_OF_TEXT
    else:
        file = tokenizer_file(tokenizer)
        for name in TOKENIZER_FILES:
            if file.with_name(name).is_file():
                shutil.copyfile(file.with_name(name), folder / name)
        if file.is_file() and file.name not in TOKENIZER_FILES:
            shutil.copyfile(file, folder / "tokenizer.json")
    config_file = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file() and not config_file.is_file():
        values: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        }
        if end_of_text is not None:
            values |= {"bos_token": end_of_text, "eos_token": end_of_text}
        config_file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _write_byte_tokenizer(path: Path) -> None:
    """Write the byte tokenizer as a byte-level BPE vocabulary without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: number for word, number in byte_words().items() if word != END_OF_TEXT}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert tokenizer.token_to_id(END_OF_TEXT) == ByteTokenizer.end_of_text
    tokenizer.save(str(path))


END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "[EOS]")
"""End-of-text names of published tokenizers, in order of preference."""


class HuggingFaceTokenizer:
    """Tokenizer from the file `path`, or from `tokenizer.json` in the folder `path`. Special tokens in text are encoded
    as plain text. Raises UserError if the file cannot be read or has no known end-of-text token."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        file = tokenizer_file(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            remedy = "use data.tokenizer=bytes, or give the path of a tokenizer.json or of the folder that holds one"
            raise _refusal(path, f"Hugging Face's tokenizers cannot read {file} ({error})", remedy) from error
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
        """Encode `text` as ids, uint16 or int32 [tokens], without added special tokens."""
        try:
            return self._encode(text)
        except (TypeError, UnicodeEncodeError):  # a lone surrogate, possible in JSON but not in UTF-8
            return self._encode(text.encode("utf-8", errors="replace").decode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; special tokens and ids beyond the vocabulary are skipped."""
        return self._tokenizer.decode([int(token) for token in ids if int(token) < self.vocab_size])

    def token_bytes(self) -> np.ndarray:
        """Number of bytes by id: in a byte-level vocabulary every character of a word is one, others spell `<0x0A>`."""
        described = json.loads(self._tokenizer.to_str())
        parts = [described[name] or {} for name in ("pre_tokenizer", "decoder")]
        parts += [one for part in parts for one in (*part.get("pretokenizers", ()), *part.get("decoders", ()))]
        byte_level = "ByteLevel" in [part.get("type") for part in parts]
        found = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        for word, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if number in added:
                found[number] = 0 if added[number].special else len(word.encode())
            elif byte_level or re.fullmatch("<0x[0-9A-F]{2}>", word):
                found[number] = len(word) if byte_level else 1
            else:
                found[number] = len(word.replace("▁", " ").encode())
        return found

    def _encode(self, text: str) -> np.ndarray:
        # A batch of one: unlike `encode`, it releases the GIL.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype)

    def _end_of_text_name(self, path: str, file: Path, vocabulary: dict[str, int]) -> str:
        declared: Any = None
        with suppress(UserError):
            declared = read_object(file.with_name("tokenizer_config.json")).get("eos_token")
        declared = declared.get("content") if isinstance(declared, dict) else declared
        declared = declared if isinstance(declared, str) else None
        if declared is not None and declared in vocabulary:
            return declared
        if (known := next(filter(vocabulary.__contains__, END_OF_TEXT_NAMES), None)) is not None:
            return known
        specials = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        raise _refusal(
            path,
            "this tokenizer has no end-of-text token: "
            + (f"tokenizer_config.json names {declared!r}, which it lacks" if declared else "it declares none")
            + f", and its special tokens are {', '.join(specials) or 'none'}",
            'put {"eos_token": "NAME"} with one of them into a tokenizer_config.json beside the tokenizer',
        )


def _refusal(path: str, reason: str, remedy: str) -> UserError:
    return UserError("Cannot use this tokenizer.", [Violation("data.tokenizer", path, reason, remedy)])


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Build the tokenizer of `data.tokenizer`. Raises UserError if it cannot be loaded."""
    if config.tokenizer != "store":
        return ByteTokenizer() if config.tokenizer == "bytes" else HuggingFaceTokenizer(config.tokenizer)
    # All stores of a mixture share it.
    tokenizer = build_tokenizer(replace(config, tokenizer=tokenizer_path(config)))
    expected = read_manifest(config.paths[0]).tokenizer
    if tokenizer.fingerprint != expected:
        reason = f"its tokenizer.json ({tokenizer.fingerprint}) is not the one that built the store ({expected})"
        violation = Violation("data.paths", config.paths[0], reason, "restore that file, or rebuild the store")
        raise UserError("The token store is damaged.", [violation])
    return tokenizer

"""A tokenizer's files: found beside weights, copied, and the byte tokenizer written as a `tokenizer.json`."""

import json
import shutil
from pathlib import Path
from typing import Any

from titan_exp.config.paths.data_files import tokenizer_file
from titan_exp.data.tokenizers.base import ByteTokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
)
"""Files that a tokenizer may consist of."""

END_OF_TEXT = "<|endoftext|>"
"""What the byte tokenizer's end of a text is called in its file."""


def write_tokenizer(tokenizer: str, folder: Path, *, end_of_text: str | None, context: int) -> list[str]:
    """Put a tokenizer's files into a folder, so that `transformers.AutoTokenizer` finds them; returns their names.

    Args:
        tokenizer: `bytes`, or the path of a tokenizer.json or of the folder of a tokenizer; a folder may hold none.
        folder: where to.
        end_of_text: name of the token that ends a document, where no tokenizer_config.json says it.
        context: longest sequence in tokens.
    """
    if tokenizer == "bytes":
        _bytes_as_json(folder / "tokenizer.json")
        end_of_text = END_OF_TEXT
    else:
        file = tokenizer_file(tokenizer)
        for name in TOKENIZER_FILES:
            if file.with_name(name).is_file():
                shutil.copyfile(file.with_name(name), folder / name)
        if file.is_file() and file.name not in TOKENIZER_FILES:
            shutil.copyfile(file, folder / "tokenizer.json")
    described = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file() and not described.is_file():
        values: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        }
        if end_of_text is not None:
            values |= {"bos_token": end_of_text, "eos_token": end_of_text}
        described.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _bytes_as_json(path: Path) -> None:
    """The byte tokenizer in the words of `tokenizers`: a byte-level vocabulary without any merge."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert tokenizer.token_to_id(END_OF_TEXT) == ByteTokenizer.end_of_text
    tokenizer.save(str(path))


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]

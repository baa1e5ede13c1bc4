"""Tokenizer files for export with weights, and the byte tokenizer as a `tokenizer.json`."""

import json
import shutil
from pathlib import Path
from typing import Any

from titan_exp.config.paths.data_files import END_OF_TEXT, byte_words, tokenizer_file
from titan_exp.data.tokenizers.byte_tokenizer import ByteTokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
)


def write_tokenizer(tokenizer: str, folder: Path, *, end_of_text: str | None, context: int) -> list[str]:
    """Write a tokenizer's files for `transformers.AutoTokenizer` into a folder; returns their names.

    `tokenizer` is `bytes`, or the path of a tokenizer.json or of a folder, which may have none. `end_of_text` names the
    end-of-text token if tokenizer_config.json does not; `context` is the maximum sequence length in tokens.
    """
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

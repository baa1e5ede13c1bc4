"""Files of a repository, a checkpoint or a store, damaged at random: each reader names what is wrong, or reads it."""

import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.tools import exported
from tests.config.composing import experiment
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.config.checkpoint_files import INDEX, missing_part, parse_checksums, parse_index
from titan_exp.config.data_files import read_manifest, tokenizer_words
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.resolve import UnreadableSourceError
from titan_exp.models.convert.hf_config import (
    config_json,
    from_json,
    repository_lines,
    special_tokens_of,
    to_huggingface,
    to_json,
)
from titan_exp.models.spec.lookup import family_violations, model_spec
from titan_exp.rules.weights import given_weights

SECONDS = 10.0
"""Longest time to read one damaged file, the import of transformers included."""


def deep(depth: int) -> Any:
    return [deep(depth - 1)] if depth else []


VALUES = (
    *("", "7", "\x1b[31m", None, True, [], {}, [1, 2, 3], {"a": 1}, -1, 0, 1, 0.5),
    *(10**7, 10**12, 10**30, 1e308, deep(80)),
)
"""Values in place of another."""

CONTENTS = (
    *(b"", b"{", b"null", b"[]", b"7", b'"text"', b"\xff\xfe\x00"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 9999),
)
"""Contents in place of a file's."""


@dataclass(frozen=True)
class Reader:
    """Reader of a file, with a valid one."""

    content: dict[str, Any]
    read: Callable[[Path], object]
    name: str = "file.json"
    count: int = 100


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a value in nested dictionaries and lists, less long ones' tails."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(inner)[:60]:
        yield (*path, key)
        yield from places(part, (*path, key))


def damaged(content: dict[str, Any], count: int, seed: int) -> Iterator[bytes]:
    """The file with a key left out, or another value at a place, or at two."""
    draw, found = random.Random(seed), list(places(content))
    for number in range(count):
        made = copy.deepcopy(content)
        for *way, last in draw.sample(found, min(1 + number % 2, len(found))):
            at: Any = made
            try:
                for key in way:
                    at = at[key]
                if draw.random() < 0.15:
                    del at[last]
                else:
                    at[last] = copy.deepcopy(draw.choice(VALUES))
            except (KeyError, IndexError, TypeError):
                continue  # the other place held it
        yield json.dumps(made).encode()


def described(preset: str) -> Reader:
    """`config.json` of a preset, by all that reads one."""
    ours = experiment(f"model={preset}").model

    def read(path: Path) -> None:
        values = config_json(path.parent)
        list(repository_lines(values, "name"))
        special_tokens_of(values)
        given = given_weights("RUN", path.parent, ours)
        assert given is not None
        assert not isinstance(given.model, dict)
        if not list(family_violations(given.model)):  # type: ignore[arg-type]
            model_spec(given.model)  # type: ignore[arg-type]

    return Reader(to_huggingface(ours, dtype="float32", special_tokens={"eos_token_id": 1}), read, "config.json", 25)


def model_json(path: Path) -> None:
    from titan_exp.config.foreign_file import read_object

    model, _ = from_json(read_object(path), path, trust=True)
    list(family_violations(model))


SHARD = {"name": "train-0000", "tokens": 9, "documents": 2, "checksums": {"tokens": "0", "documents": "0"}}
STORE = {
    "format": "titan_exp token store",
    "version": 1,
    "source": "text",
    "tokenizer": {"fingerprint": "bytes", "vocab_size": 257},
    "token_bytes": 2,
    "fingerprint": "0",
    "splits": {"train": [SHARD], "validation": [SHARD]},
    "files": {"tokenizer.json": "0"},
}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": [{"id": 2, "content": "<eos>"}]}
WHOLE = json.loads(json.dumps(to_json(experiment("model=deepseek_debug").model, {"eos_token_id": 1})))
CHECKSUMS = {"files": {".metadata": {"size": 3, "crc32": "0123abcd"}}}
LISTED = {"metadata": {}, "weight_map": {"a.weight": "model-1.safetensors"}}

PRESETS = ("llama_debug", "qwen3_moe_debug", "deepseek_debug", "gpt_oss_debug", "llama4_debug")
READERS = {
    **{preset: described(preset) for preset in PRESETS},
    "model.json": Reader(WHOLE, model_json),
    "checksums": Reader(CHECKSUMS, lambda path: parse_checksums(path.read_bytes())),
    "index": Reader(LISTED, lambda path: parse_index(path.read_bytes(), INDEX)),
    "tokenizer": Reader(TOKENIZER, lambda path: tokenizer_words(str(path))),
    "token store": Reader(STORE, lambda path: list(read_manifest(path.parent).damaged()), "manifest.json"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str):
    assert_read_or_refused(READERS[name], tmp_path, seed=len(name))


def assert_read_or_refused(reader: Reader, tmp_path: Path, seed: int) -> None:
    path = tmp_path / reader.name
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    path.write_text(json.dumps(reader.content))
    reader.read(path)
    for content in (*CONTENTS, *damaged(reader.content, reader.count, seed=seed)):
        path.write_bytes(content)
        begin = time.process_time()
        with suppress(UserError, UnreadableSourceError):
            reader.read(path)
        assert time.process_time() - begin < SECONDS, content[:500]


@pytest.mark.parametrize("form", ["huggingface", "llama", "torchtune"])
def test_a_damaged_folder_is_opened_or_refused(tmp_path: Path, form: str):
    folder = exported("llama3_1", form, tmp_path / "export")
    name = {"huggingface": "config.json", "llama": "params.json", "torchtune": "model.json"}[form]
    if form == "llama":
        (folder / "model.json").unlink()
    whole = json.loads((folder / name).read_text())
    for content in damaged(whole, 30, seed=1):
        (folder / name).write_bytes(content)
        with suppress(UserError):
            open_checkpoint(folder)


def test_headers_of_safetensors_are_foreign_too(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    for header in (
        *CONTENTS,
        b'{"a": 1}',
        b'{"a": {"data_offsets": ["x", "y"]}}',
        b'{"a": {"data_offsets": [0, 1e400]}}',
    ):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        assert missing_part(tmp_path) is not None or header == b"{}"
    file.write_bytes((2**63).to_bytes(8, "little"))
    assert missing_part(tmp_path) is not None

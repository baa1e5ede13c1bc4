import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from tests.data.corpora import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.python_stdlib import PythonStdlibSource
from titan_exp.data.tokenizers import HuggingFaceTokenizer, build_tokenizer

SAMPLE = "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # ünïcödé\n"


def trained(specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    source = PythonStdlibSource()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source[index] for index in range(20)), trainer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer trained on real text, saved with the truncation and padding of some fine-tuning."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = trained(["<pad>", "<|endoftext|>"])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_round_trip_from_the_folder_and_from_the_file(folder: Path):
    by_folder = build_tokenizer(experiment(tokenizer=str(folder)).data)
    by_file = build_tokenizer(experiment(tokenizer=str(folder / "tokenizer.json")).data)
    ids = by_folder.encode(SAMPLE)
    assert ids.tolist() == by_file.encode(SAMPLE).tolist()
    assert 16 < len(ids) < len(SAMPLE.encode())  # neither truncated nor padded, and shorter than bytes
    assert by_folder.decode(ids.tolist()) == SAMPLE
    assert (by_folder.vocab_size, by_folder.end_of_text) == (400, 1)
    assert by_folder.fingerprint == by_file.fingerprint


def test_special_tokens_in_text_are_encoded_as_text(folder: Path):
    tokenizer = HuggingFaceTokenizer(str(folder))
    ids = tokenizer.encode("say <|endoftext|> aloud")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode([*ids.tolist(), tokenizer.end_of_text]) == "say <|endoftext|> aloud"


def test_lone_surrogates_and_unknown_ids(folder: Path):
    tokenizer = HuggingFaceTokenizer(str(folder))
    assert tokenizer.decode([*tokenizer.encode("a\ud800b"), 5000]) == "a?b"


@pytest.mark.parametrize("declared", ["<done>", {"content": "<done>"}])
def test_the_declared_end_of_text_wins(tmp_path: Path, declared: object):
    trained(["</s>", "<done>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
    assert HuggingFaceTokenizer(str(tmp_path)).end_of_text == 1


def test_the_end_of_text_is_part_of_the_fingerprint(tmp_path: Path):
    trained(["</s>", "<done>"]).save(str(tmp_path / "tokenizer.json"))
    before = HuggingFaceTokenizer(str(tmp_path)).fingerprint
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<done>"}')
    assert HuggingFaceTokenizer(str(tmp_path)).fingerprint != before


def test_a_missing_end_of_text_is_refused_with_the_special_tokens(tmp_path: Path):
    trained(["<first>", "<second>"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"<first>, <second>[\s\S]*eos_token"):
        HuggingFaceTokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<absent>"}')
    with pytest.raises(UserError, match="<absent>"):
        HuggingFaceTokenizer(str(tmp_path))


def test_an_invalid_tokenizer_file_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizers cannot read"):
        HuggingFaceTokenizer(str(tmp_path))
    with pytest.raises(UserError, match=r"data\.tokenizer=bytes"):
        HuggingFaceTokenizer(str(tmp_path / "absent"))


@pytest.mark.parametrize("text", ["plain words and  spaces", "é über — 漢字 🙂\n\tx", ""])
def test_bytes_of_tokens_are_those_of_the_text(folder: Path, text: str):
    byte_level = HuggingFaceTokenizer(str(folder))
    assert byte_level.token_bytes()[byte_level.encode(text)].sum() == len(text.encode())
    assert byte_level.token_bytes()[byte_level.end_of_text] == 0

"""Detection of damaged token stores."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.stores import make, over
from titan_exp.cli.tokenize import check_store
from titan_exp.config.data_files import MANIFEST, Manifest, read_manifest
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.token_store import TokenSplit
from titan_exp.data.train_loader import TrainLoader
from titan_exp.rules.data import stores_are_complete


@pytest.fixture
def store(tmp_path: Path) -> Manifest:
    return make(tmp_path / "store")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("ending", ["tokens", "documents"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_verification_finds_a_flipped_bit(split: str, ending: str, store: Manifest, capsys: pytest.CaptureFixture[str]):
    assert check_store(str(store.path)) == 0
    assert "all checksums match" in capsys.readouterr().out
    name = f"{store.splits[split][-1].name}.{ending}"
    flip(store.path / name)
    with pytest.raises(UserError, match=f"{name}: the content of this file has changed"):
        check_store(str(store.path))


def test_truncated_or_missing_files_are_refused(store: Manifest):
    first, second = (store.path / f"{shard.name}.tokens" for shard in store.splits["train"][:2])
    first.write_bytes(first.read_bytes()[:-2])
    second.unlink()
    size = store.splits["train"][0].numbers["tokens"] * 2
    run = over(store)
    (violation,) = stores_are_complete(run.data)
    assert f"{first.name}: this file has {size - 2:,} bytes instead of {size:,}" in violation.reason
    assert f"{second.name}: this file is missing" in violation.reason
    with pytest.raises(UserError, match="is damaged"):
        check_store(str(store.path))
    with pytest.raises(UserError, match=f"damaged[\\s\\S]*{first.name}"):
        TokenSplit(store, "train").read(0, np.empty(8, dtype=np.int64))
    loader = TrainLoader(
        run.data, run.training, run.experiment.seed, dp_rank=0, dp_degree=1, micro_batch_size=24, pin_memory=False
    )
    with pytest.raises(UserError, match="damaged"):
        next(loader)
    loader.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("{}", "not that of a token store"),
        ('{"format": "titan_exp token store", "version": 2}', "has format 2"),
        ('{"format": "titan_exp token store", "version": 1}', "is damaged: tokenizer is nothing"),
    ],
)
def test_an_invalid_manifest_is_refused(text: str, says: str, store: Manifest):
    (store.path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=says):
        read_manifest(store.path)
    with pytest.raises(UserError, match="no such folder"):
        read_manifest(store.path / "nowhere")
    (store.path / MANIFEST).unlink()
    with pytest.raises(UserError, match="it is not a token store"):
        read_manifest(store.path)

import bz2
import gzip
import json
import lzma
import socket
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.corpora import Ranks, experiment, text
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.sources import huggingface
from titan_exp.data.sources.base import build_source, build_validation_source, fingerprint
from titan_exp.data.sources.huggingface import HuggingFaceStream, HuggingFaceTable, build, violations
from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.data.validation_loader import ValidationLoader

FILES, ROWS = 3, 20
TEXTS = [text(number) for number in range(FILES * ROWS)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same rows as parquet (several row groups) and as JSON lines, and a folder with splits."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(FILES):
        rows = TEXTS[number * ROWS : (number + 1) * ROWS]
        table = pa.table({"number": list(range(ROWS)), "text": rows})
        pyarrow.parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=7)
        lines = (json.dumps({"number": row, "text": each}) for row, each in enumerate(rows))
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines))
    (folder / "splits").mkdir()
    for split, number in (("train", 0), ("test", 1)):
        (folder / "splits" / f"{split}.jsonl").write_text((folder / f"part-{number}.jsonl").read_text())
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    yield
    datasets.enable_progress_bars()


def local(corpus: Path, kind: str, **data: Any) -> Experiment:
    files = (str(corpus / f"part-*.{'jsonl' if kind == 'json' else kind}"),)
    return experiment(**{"source": "huggingface", "dataset": kind, "data_files": files, **data})


pytestmark = pytest.mark.filterwarnings("ignore:data.virtual_shards=8, but the stream has")
kinds = pytest.mark.parametrize("kind", ["parquet", "json"])


@kinds
def test_a_table_has_every_row(corpus: Path, kind: str):
    run = local(corpus, kind)
    source = build_source(run.data)
    assert isinstance(source, HuggingFaceTable)
    assert [source[index] for index in range(len(source))] == TEXTS
    assert build_validation_source(run.data) is None


@kinds
def test_a_stream_has_one_part_per_file_and_resumes_at_any_row(corpus: Path, kind: str):
    source = build_source(local(corpus, kind, streaming=True).data)
    assert isinstance(source, HuggingFaceStream)
    assert source.parts == FILES
    for part in range(FILES):
        expected = TEXTS[part * ROWS : (part + 1) * ROWS]
        reader = source.open(part, None)
        for done in range(ROWS):
            assert next(reader) == expected[done]
            state = json.loads(json.dumps(reader.state_dict()))
            assert list(source.open(part, state)) == expected[done + 1 :]
        assert next(reader, None) is None


@kinds
@pytest.mark.parametrize("streaming", [False, True])
def test_layouts_and_resumes_give_the_same_rows(corpus: Path, kind: str, streaming: bool):
    run = local(corpus, kind, streaming=streaming)
    with Ranks(run, 1, 8) as ranks:
        reference = ranks.global_batches(12)
    with Ranks(run, 2, 2) as ranks:
        found = ranks.global_batches(7)
        state = json.loads(json.dumps(ranks.state()))
    with Ranks(run, 4, 1, state) as ranks:
        assert found + ranks.global_batches(5) == reference


@pytest.mark.parametrize("streaming", [False, True])
def test_a_validation_split_replaces_held_out_documents(corpus: Path, streaming: bool):
    run = experiment(
        source="huggingface",
        dataset=str(corpus / "splits"),
        validation_split="test",
        validation_fraction=0.5,
        streaming=streaming,
    )
    validation = ValidationLoader(run.data, run.training.seq_len, dp_rank=0, dp_degree=1, micro_batch_size=4)
    labels = sum(int((batch.labels >= 0).sum()) for batch in validation)
    assert labels == sum(len(document) + 1 for document in TEXTS[ROWS : 2 * ROWS]) - 1
    with Ranks(run, 1, 8) as ranks:
        rows = [row for batch in ranks.global_batches(60) for row in batch]
        assert ranks.loaders[0].epochs() > 1
    # The first and the last word of a row may be cut.
    found = {word[:4] for row in rows for word in ByteTokenizer().decode(row).split()[1:-1]}
    assert found == {f"{number:03d}/" for number in range(ROWS)}
    few = replace(run, data=replace(run.data, validation_documents=2))
    validation = ValidationLoader(few.data, few.training.seq_len, dp_rank=0, dp_degree=1, micro_batch_size=4)
    labels = sum(int((batch.labels >= 0).sum()) for batch in validation)
    assert labels == sum(len(document) + 1 for document in TEXTS[ROWS : ROWS + 2]) - 1


def test_the_fingerprint_follows_content_not_location(corpus: Path, tmp_path: Path):
    def told(folder: Path, **data: Any) -> str:
        config = experiment(
            source="huggingface", dataset="json", data_files=(str(folder / "part-0.jsonl"),), **data
        ).data
        return fingerprint(build_source(config), config)

    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "part-0.jsonl").write_text((corpus / "part-0.jsonl").read_text())
    for streaming in (False, True):
        before = told(corpus, streaming=streaming)
        assert told(tmp_path / "moved", streaming=streaming) == before
        (tmp_path / "moved" / "part-0.jsonl").write_text((corpus / "part-1.jsonl").read_text())
        assert told(tmp_path / "moved", streaming=streaming) != before
        (tmp_path / "moved" / "part-0.jsonl").write_text((corpus / "part-0.jsonl").read_text())


def test_rows_without_text_are_empty_documents(tmp_path: Path):
    pyarrow.parquet.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "x.parquet")
    config = experiment(source="huggingface", dataset="parquet", data_files=(str(tmp_path / "x.parquet"),)).data
    source = build(config)
    assert isinstance(source, HuggingFaceTable)
    assert [source[index] for index in range(3)] == ["a", "", "b"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "column": ({"text_column": "content"}, r"data\.text_column=content[\s\S]*one of number, text"),
    "column of numbers": ({"text_column": "number"}, r"data\.text_column=number: this column holds int"),
    "split": ({"split": "tain"}, r"data\.split=tain"),
    "files": ({"data_files": ("absent.jsonl",)}, "absent"),
    "no name": ({"dataset": None}, r"data\.dataset=allenai/c4"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_settings_are_reported(corpus: Path, streaming: bool, data: dict[str, Any], message: str):
    config = replace(local(corpus, "json", streaming=streaming).data, **data)
    with pytest.raises(UserError, match=message):
        build_source(config)


@pytest.mark.parametrize(
    ("text", "message"), [("", "there are no rows"), ('{"text": "cut', "ArrowInvalid: JSON parse error")]
)
def test_unreadable_files_are_named(tmp_path: Path, text: str, message: str):
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    config = experiment(source="huggingface", dataset="json", data_files=(str(file),)).data
    with pytest.raises(UserError, match=rf"data\.data_files=\S*x\.jsonl\S*: {message}"):
        build(config)


def write_compressed(file: Path, content: bytes) -> None:
    """Write at most 255 bytes, compressed as the suffix says."""
    block = (len(content) << 3 | 1).to_bytes(3, "little")  # one raw block, the last
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x.jsonl", content)
    else:
        file.write_bytes(
            {
                ".gz": gzip.compress,
                ".bz2": bz2.compress,
                ".xz": lzma.compress,
                ".lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
                ".zst": lambda data: b"\x28\xb5\x2f\xfd\x20" + bytes([len(data)]) + block + data,
                ".lz4": lambda data: b"\x04\x22\x4d\x18" + data,
            }[file.suffix](content)
        )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zip", ".zst", ".lz4", ".lzma"])
def test_compressed_files_are_read_or_refused_before_the_launch(tmp_path: Path, suffix: str, streaming: bool):
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / f"x.jsonl{suffix}"
    write_compressed(file, b'{"text": "one"}\n{"text": "two"}\n')
    package = {".zst": "zstandard", ".lz4": "lz4"}.get(suffix, "")
    for keys in ({"dataset": "json", "data_files": (str(file.parent / "x*"),)}, {"dataset": str(file.parent)}):
        data: dict[str, Any] = {"source": "huggingface", "streaming": streaming, "validation_fraction": 0.0, **keys}
        run = experiment(**data)
        found = [violation for violation in violations(run.data) if str(violation.value) == str(file)]
        if suffix == ".lzma":
            assert "does not read .lzma" in found[0].reason
        elif package and find_spec(package) is None:
            assert found[0].remedy.startswith(f"type pip install {package}")
            with pytest.raises(UserError, match=f"pip install {package}"):  # as of files of the hub
                build_source(run.data)
        elif suffix != ".lz4":
            assert found == []
            source = build_source(run.data)
            assert isinstance(source, HuggingFaceStream | HuggingFaceTable)
            texts = source.open(0, None) if isinstance(source, HuggingFaceStream) else map(source.__getitem__, (0, 1))
            assert list(texts) == ["one", "two"]


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hub that accepts connections and never answers, as behind a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
        monkeypatch.setattr(huggingface, "_HUB_TIMEOUT_SECONDS", 0.2)
        yield


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("silent_server")
@pytest.mark.parametrize("streaming", [False, True])
def test_an_unreachable_hub_fails_fast_with_a_remedy(streaming: bool):
    config = experiment(source="huggingface", dataset="nobody/nothing", streaming=streaming).data
    with pytest.raises(UserError, match=r"does not answer[\s\S]*HF_HOME[\s\S]*data_files[\s\S]*data=python_stdlib"):
        build_source(config)


def test_local_files_need_no_network(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_: asked.append(host))
    assert not huggingface._needs_hub(local(corpus, "json").data)
    assert not huggingface._needs_hub(replace(local(corpus, "json").data, dataset=str(corpus)))
    assert huggingface._needs_hub(experiment(dataset="allenai/c4").data)
    for streaming in (False, True):
        build_source(local(corpus, "parquet", streaming=streaming).data)
        build_source(local(corpus, "parquet", streaming=streaming, dataset=str(corpus / "splits"), data_files=()).data)
    assert not asked
    assert not datasets.config.HF_HUB_OFFLINE


def test_no_progress_bars_without_a_terminal(corpus: Path, capfd: pytest.CaptureFixture[str]):
    build_source(local(corpus, "json").data)
    assert capfd.readouterr().err == ""

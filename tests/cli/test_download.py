"""Downloads from a small hub on this machine, and from none."""

import http.server
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from titan_exp.cli.main import main

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights " * 1000,
    "original/consolidated.00.pth": b"pickles",
    "original/params.json": b"{}",
    "README.md": b"words",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Fake hub with the endpoints that `huggingface_hub` uses."""

    tokens: ClassVar[list[str | None]] = []
    gets: ClassVar[list[str]] = []
    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.tokens.append(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        self.paths.append(path)
        if "gated" in path and self.headers.get("Authorization") != "Bearer hf_right":
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "nowhere" in path:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            name = path.partition(f"/resolve/{SHA}/")[2]
            self.gets.extend([name] if self.command == "GET" else [])
            content = b'{"model_type": "unheard"}' if "strange" in path else FILES[name]
            self._answer(200, content, {"ETag": f'"{abs(hash(name))}"', "X-Repo-Commit": SHA})
        elif "/tree/" in path:
            entries = [{"type": "file", "path": name, "size": len(data), "oid": SHA} for name, data in FILES.items()]
            self._answer(200, json.dumps(entries).encode(), {})
        else:
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(200, json.dumps({"id": "some/model", "sha": SHA, "siblings": siblings}).encode(), {})

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.tokens, Hub.gets, Hub.paths = [], [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def download(folder: Path, endpoint: str, *words: str, token: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), "HF_TOKEN": token}
    environment |= {"PYTHONPATH": os.getcwd(), "NO_PROXY": "*"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "titan_exp", "download", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def fetched(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in files if ".cache" not in path.parts}


def test_weights_come_with_configuration_and_tokenizer(tmp_path: Path, hub: str):
    done = download(tmp_path, hub, "some/model", "files=weights", token="hf_right")
    assert done.returncode == 0, done.stderr
    assert fetched(tmp_path / "downloads" / "model") == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "original/params.json",
    }
    assert (tmp_path / "downloads/model/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "Bearer hf_right" in Hub.tokens
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_right" in path.read_bytes()]
    assert kept == []
    assert "hf_right" not in done.stdout + done.stderr
    assert "cannot be converted: config.json has no vocab_size" in done.stdout


def test_a_data_set_has_a_folder_of_its_own(tmp_path: Path, hub: str):
    done = download(tmp_path, hub, "some/suite", "files=dataset")
    assert done.returncode == 0, done.stderr
    assert fetched(tmp_path / "downloads" / "datasets" / "some" / "suite") == FILES.keys()
    assert done.stdout.startswith("downloads/datasets/some/suite: 6 files")
    assert len(done.stdout.splitlines()) == 1
    kinds = {path.split("/")[2] for path in Hub.paths if path.startswith("/api/")}
    assert "datasets" in kinds
    assert "models" not in kinds


def test_an_archive_is_unpacked(tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch, capsys):  # 0.1 s
    """A damaged one, or none, is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("suite/core.yaml", "icl_tasks: []")
        archive.writestr("../outside", "words")
    for name, content in {"suite.zip": packed.getvalue(), "cut.zip": packed.getvalue()[:-9]}.items():
        monkeypatch.setitem(FILES, name, content)
    url = f"{hub}/resolve/{SHA}"
    assert main(["download", f"{url}/suite.zip"]) == 0
    assert (tmp_path / "downloads/suite/suite/core.yaml").read_text() == "icl_tasks: []"
    assert not (tmp_path / "downloads" / "outside").exists()
    assert capsys.readouterr().out.startswith("downloads/suite: 2 files")
    for name, said in (("cut.zip", "is no complete zip archive"), ("nowhere/x.zip", "Not Found")):
        assert main(["download", f"{url}/{name}", "target=other"]) == 2
        assert said in capsys.readouterr().err
    assert list((tmp_path / "other").iterdir()) == []


def test_the_files_of_a_package_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """As pip finds it, here in a folder."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with zipfile.ZipFile("some_tasks-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_tasks/core.yaml", "icl_tasks: []")
        wheel.writestr("some_tasks-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-tasks\nVersion: 1.0\n")
        wheel.writestr("some_tasks-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr("some_tasks-1.0.dist-info/RECORD", "")
    assert main(["download", "pip:some-tasks==1.0", "target=here"]) == 0
    assert capsys.readouterr().out.startswith("here: 4 files")
    assert (tmp_path / "here" / "some_tasks" / "core.yaml").is_file()
    assert main(["download", "pip:other-tasks==1.0"]) == 2
    assert "pip could not download other-tasks==1.0: " in capsys.readouterr().err
    assert main(["download", "pip:-r=file"]) == 2


def test_existing_files_are_not_downloaded_again(tmp_path: Path, hub: str):
    assert download(tmp_path, hub, "some/model", "files=tokenizer", "target=here").returncode == 0
    assert fetched(tmp_path / "here") == {"tokenizer.json"}
    Hub.gets.clear()
    assert download(tmp_path, hub, "some/model", "files=config", "target=here").returncode == 0
    assert download(tmp_path, hub, "some/model", "files=tokenizer", "target=here").returncode == 0
    assert sorted(Hub.gets) == ["config.json", "original/params.json"]


@pytest.mark.parametrize(
    ("repo", "token", "says"),
    [
        ("some/gated", "", "gated. Set the environment variable HF_TOKEN"),
        ("some/gated", "hf_wrong", "The token in HF_TOKEN has no access"),
        ("some/nowhere", "", "not on the hub, or is private"),
        pytest.param(
            *("some/strange", ""),
            "do not download some/strange. To do it anyway, use files=all. config.json: model_type is",
            marks=pytest.mark.night,
        ),
        ("model", "", "model is not OWNER/NAME"),
    ],
)
def test_unavailable_repositories_are_reported(repo: str, token: str, says: str, tmp_path: Path, hub: str):
    done = download(tmp_path, hub, repo, token=token)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert fetched(tmp_path / "downloads") <= {"strange/config.json"}


@pytest.mark.night
def test_a_configuration_of_no_family_is_refused(tmp_path: Path, hub: str):
    done = download(tmp_path, hub, "some/strange", "files=config")
    assert done.returncode == 2
    assert "model_type is 'unheard'. Our families read 'deepseek_v3', " in done.stderr


def test_without_network(tmp_path: Path):
    """Also where a folder of the name is there already, which says nothing about what it holds."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    done = download(tmp_path, "http://127.0.0.1:9", "some/model", "target=here")
    assert done.returncode == 2
    assert "the hub does not answer" in done.stderr
    assert "Traceback" not in done.stderr

"""Remote checkpoints: completeness, retention, restoring, and failures of the store."""

import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.s3_server import S3Server, forget_stores
from tests.checkpoint.saving import trained
from titan_exp.checkpoint.background_upload import RemoteRun
from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.run_plan import plan_run
from titan_exp.rules import violations

pytestmark = pytest.mark.usefixtures("one_rank")
RUN = "bucket/runs/first/abc"


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return "s3://bucket/runs"
    return f"file://{tmp_path / 'share'}"


@pytest.fixture(autouse=True)
def ended(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assert that no test leaves a thread behind."""
    made: list[Checkpointer] = []
    original = Checkpointer.__init__

    def init(self: Checkpointer, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Checkpointer, "__init__", init)
    yield
    for upload in made:
        upload.close()


def remote_run(url: str) -> RemoteRun:
    return RemoteRun(url, "first", "abc")


def started(tmp_path: Path, url: str, **settings: Any) -> Checkpointer:
    """Checkpointer of a starting run with its folder in `tmp_path`."""
    config = replace(to_experiment(compose(["checkpoint=sync"])).checkpoint, every=10, **settings)
    tmp_path.mkdir(exist_ok=True)
    one = Checkpointer(config, tmp_path / "checkpoints", remote=remote_run(url))
    one.latest()
    return one


def save(saver: Checkpointer, *steps: int) -> None:
    """Save steps, each uploaded before the next."""
    model, optimizer = trained()
    for step in steps:
        saver.save(step, [model], optimizer, {}, {"step": step})
        until(lambda: not uploads(saver).steps_in_use())


def uploads(saver: Checkpointer) -> Any:
    return saver._uploader


def until(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_uploads_follow_retention_and_are_restored(tmp_path, url, caplog):
    caplog.set_level(logging.INFO, logger="titan_exp")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.yaml").write_text("of: the run\n")
    saver = started(tmp_path / "here", url, keep=2, keep_every=20)
    save(saver, 10, 20, 30, 40, 50)
    saver.finish_uploads(stopped=False)
    remote = remote_run(url)
    assert remote.complete_steps() == remote.listed_steps() == saver.folder.complete_steps() == [20, 40, 50]
    assert remote.folder.read("config.yaml") == b"of: the run\n"
    assert saver.pop_timings()["checkpoint_upload"] > 0

    elsewhere = started(tmp_path / "elsewhere", url)
    assert elsewhere.folder.complete_steps() == [50]
    for file in saver.folder.path_of(50).iterdir():
        assert (elsewhere.folder.path_of(50) / file.name).read_bytes() == file.read_bytes()
    assert f"downloading the checkpoint of step 50 from {remote.url}" in caplog.text
    assert started(tmp_path / "here", url).latest() == 50, "and nothing is fetched that is here"
    assert caplog.text.count("downloading") == 1


def test_partial_upload_is_ignored(tmp_path, url):
    saver = started(tmp_path / "here", url, keep=9)
    save(saver, 10, 20)
    saver.finish_uploads(stopped=False)
    remote = remote_run(url)
    text = remote.folder.read("step-00000020/checksums.json")
    assert text is not None
    for torn in (None, text[:-3], b"", b"{}", b'{"files": {"../x": {"size": 1, "crc32": "0"}}}'):
        remote.folder.remove("step-00000020/checksums.json")
        if torn is not None:
            remote.folder.write("step-00000020/checksums.json", torn)
        assert remote.complete_steps() == [10]
    shutil.rmtree(tmp_path / "here")
    again = started(tmp_path / "here", url, keep=9)
    assert again.folder.complete_steps() == [10]
    save(again, 30)
    assert remote.listed_steps() == [10, 30], "stale files of an older step go with the next upload"


def test_checkpoint_being_replaced_is_incomplete(tmp_path, url):
    saver = started(tmp_path / "here", url)
    save(saver, 10)
    remote = remote_run(url)
    model, optimizer = trained(seed=3)
    other = Checkpointer(to_experiment(compose(["checkpoint=sync"])).checkpoint, tmp_path / "other")
    other.save(10, [model], optimizer, {}, {})
    never = lambda: False  # noqa: E731
    remote.upload_shard(10, saver.folder.path_of(10), 1, 2, never)
    assert remote.complete_steps() == [10], "it is the same one"
    remote.upload_shard(10, other.folder.path_of(10), 1, 2, never)
    assert remote.complete_steps() == []
    remote.upload_shard(10, other.folder.path_of(10), 0, 2, never)
    assert remote.complete_steps() == []
    remote.publish(10, other.folder.path_of(10))
    assert remote.has_same(10, other.folder.path_of(10))


def test_missing_uploads_are_sent_by_the_next_start(tmp_path, url):
    config = replace(to_experiment(compose(["checkpoint=sync"])).checkpoint, keep=9)
    model, optimizer = trained()
    for step in (10, 20, 30):
        Checkpointer(config, tmp_path / "checkpoints").save(step, [model], optimizer, {}, {})
    saver = started(tmp_path, url, keep=9, keep_every=10)
    saver.finish_uploads(stopped=False)
    assert remote_run(url).complete_steps()[-1] == 30
    again = started(tmp_path, url, keep=9, keep_every=10)
    save(again, 40)
    until(lambda: remote_run(url).complete_steps() == [10, 20, 30, 40])


@pytest.mark.parametrize(
    ("url", "damage"), [("file", "flip"), ("s3", "flip"), ("file", "shorten"), ("s3", "remove")], indirect=["url"]
)
def test_damaged_remote_checkpoint_falls_back_to_an_older_one(tmp_path, url, caplog, damage):
    save(started(tmp_path / "here", url, keep=9), 10, 20)
    remote, name = remote_run(url), "step-00000020/__0_0.distcp"
    content = bytearray(remote.folder.read(name) or b"")
    content[len(content) // 2] ^= 4
    if damage == "remove":
        remote.folder.remove(name)
    else:
        remote.folder.write(name, bytes(content if damage == "flip" else content[:-1]))
    there = started(tmp_path / "there", url)
    assert there.folder.complete_steps() == [10]
    assert "the checkpoint of step 20" in caplog.text
    assert "is damaged: __0_0.distcp" in caplog.text
    assert remote.complete_steps() == [10]
    assert "checksums.damaged.json" in remote.folder.listing("step-00000020").files, "it stays to be looked at"
    # Where the run goes through that step again, it is whole again.
    save(there, 20)
    assert remote.complete_steps() == [10, 20]
    assert "checksums.damaged.json" not in remote.folder.listing("step-00000020").files
    assert started(tmp_path / "third", url).folder.complete_steps() == [20]


def test_damaged_local_checkpoint_is_restored_from_remote(tmp_path, url, caplog):
    saver = started(tmp_path, url, keep=9)
    save(saver, 10, 20)
    file = saver.folder.path_of(20) / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    again = started(tmp_path, url, keep=9)
    assert again.folder.complete_steps() == [10, 20]
    assert file.read_bytes() == whole
    assert "the local checkpoint of step 20 is damaged" in caplog.text


def test_interrupted_download_resumes(tmp_path, s3):
    save(started(tmp_path / "here", "s3://bucket/runs"), 10)
    wanted = tmp_path / "there/checkpoints/step-00000010.fetching"
    wanted.mkdir(parents=True)
    shutil.copy(tmp_path / "here/checkpoints/step-00000010/__0_0.distcp", wanted)
    asked: list[str] = []
    s3.seen = lambda method, path: asked.append(f"{method} {path}")
    assert started(tmp_path / "there", "s3://bucket/runs").folder.complete_steps() == [10]
    assert f"GET /{RUN}/step-00000010/.metadata" in asked
    assert not [request for request in asked if "GET" in request and "__0_0.distcp" in request], "that was here already"
    assert not wanted.exists()


def test_unreachable_store_fails_no_run(tmp_path, s3, caplog, monkeypatch):
    monkeypatch.setattr("titan_exp.checkpoint.remote_folder.ATTEMPTS", 1)
    saver = started(tmp_path / "here", "s3://bucket/runs", keep_every=10)
    save(saver, 10)
    s3.close()
    save(saver, 20)
    assert caplog.text.count("could not upload the checkpoint of step 20") == 1
    assert "does not answer" in caplog.text
    warning = saver.warning() or ""
    assert re.search(r"since .* no upload to s3://bucket/runs/first/abc succeeds .*does not", warning)
    assert saver.folder.complete_steps() == [10, 20]

    # A start that has a checkpoint goes on with it; one that has none would begin anew without need.
    caplog.clear()
    assert started(tmp_path / "here", "s3://bucket/runs").folder.complete_steps() == [10, 20]
    assert "continuing from the local checkpoint of step 20" in caplog.text
    with pytest.raises(UserError, match=r"(?s)does not answer.*checkpoint\.remote=null"):
        started(tmp_path / "there", "s3://bucket/runs")

    s3.open()
    save(saver, 30)
    until(lambda: remote_run("s3://bucket/runs").complete_steps() == [10, 20, 30])
    until(lambda: saver.warning() is None)


class Gate:
    """Holds uploads of one step in the middle, after the first file."""

    def __init__(self, server: S3Server, step: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._name, self._puts = f"step-{step:08d}", 0
        server.seen = self._seen

    def _seen(self, method: str, path: str) -> None:
        if method == "PUT" and self._name in path:
            self._puts += 1
            if self._puts == 2:
                self.reached.set()
                self.opened.wait(30)


def test_slow_uploads_skip_waiting_steps_and_keep_files_in_use(tmp_path, s3, caplog):
    saver = started(tmp_path, "s3://bucket/runs", keep=1)
    gate = Gate(s3, 10)
    model, optimizer = trained()
    saver.save(10, [model], optimizer, {}, {})
    assert gate.reached.wait(30)
    for step in (20, 30):
        saver.save(step, [model], optimizer, {}, {})
    assert "we skip the checkpoint of step 20 for that of step 30" in caplog.text
    assert saver.folder.complete_steps() == [10, 30], "10 is being read"
    assert remote_run("s3://bucket/runs").complete_steps() == []
    gate.opened.set()
    saver.finish_uploads(stopped=False)
    assert remote_run("s3://bucket/runs").complete_steps() == [30]
    assert saver.folder.complete_steps() == [30]


def test_wait_for_uploads_is_bounded(tmp_path, s3, caplog):
    saver = started(tmp_path, "s3://bucket/runs", remote_wait_minutes=0.3 / 60)
    gate = Gate(s3, 10)
    model, optimizer = trained()
    saver.save(10, [model], optimizer, {}, {})
    assert gate.reached.wait(30)
    release = threading.Timer(1.0, gate.opened.set)
    release.start()
    saver.finish_uploads(stopped=False)
    release.join()
    assert "the upload of step 10" in caplog.text
    assert "we cancel it" in caplog.text
    assert remote_run("s3://bucket/runs").complete_steps() == []
    assert saver.folder.complete_steps() == [10]


def test_permanent_errors_are_raised_at_start(tmp_path, s3, monkeypatch):
    with pytest.raises(UserError, match="no such bucket"):
        started(tmp_path, "s3://nowhere-to-be-found/runs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    forget_stores()
    with pytest.raises(UserError, match=r"no credentials.*AWS_ACCESS_KEY_ID"):
        started(tmp_path, "s3://bucket/runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to it.*checkpoint\.remote=null"):
        started(tmp_path, f"file://{tmp_path / 'file'}")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/runs", "not a URL"),
        ("s3x://bucket", "knows no protocol s3x"),
        ("gs://bucket", "pip install gcsfs"),
        ("memory://runs", "ends with the process"),
        ("simplecache::s3://bucket", "chains"),
        ("s3://bucket?token=abc", "may be a credential"),
        ("s3://me:secret@bucket/runs", "may be a credential"),
    ],
)
def test_invalid_urls_are_refused(url, words):
    for key in ("remote", "initial"):
        if key == "initial" and words in ("not a URL", "chains"):
            continue
        experiment = to_experiment(compose([]))
        experiment = replace(experiment, checkpoint=replace(experiment.checkpoint, **{key: url}))
        (found,) = violations(experiment)
        assert found.field == f"checkpoint.{key}"
        assert words in f"{found.reason} {found.remedy}"
        assert "secret" not in str(found)
        assert "abc" not in str(found)


def test_a_url_with_a_password_is_a_credential(tmp_path):
    asked = [f"paths.runs={tmp_path}", "checkpoint.remote='s3://me:secret0123@bucket/runs'"]
    with pytest.raises(UserError, match="credentials") as raised:
        plan_run(to_experiment(compose(asked)), asked)
    assert "secret0123" not in str(raised.value)


def test_remote_is_not_in_the_run_id(tmp_path):
    ids = {
        plan_run(to_experiment(compose([f"paths.runs={tmp_path}", *more]))).run_id
        for more in ([], ["checkpoint.remote=file:///mnt/share"])
    }
    assert len(ids) == 1

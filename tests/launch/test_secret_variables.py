"""Secret variables are recorded as typed, and read only where the user's code is called."""

import json
from pathlib import Path

import pytest

from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import load_experiment, to_experiment, to_yaml
from titan_exp.config.secrets import concealed, is_secret_variable, require_variables, revealed
from titan_exp.launch.git import mask_override
from titan_exp.launch.run_plan import plan_run, run_id

VALUE = "hunter2-of-the-tests"
SOURCE = """\
from pathlib import Path
from titan_exp.data.sources.base import RandomAccessSource
class Corpus(RandomAccessSource):
    def __init__(self, config, token, copies=1):
        Path({file!r}).write_text(token)
        print("token", token)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return "a text of some words " * 40
"""


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUS_TOKEN", VALUE)
    monkeypatch.setenv("COPIES_KEY", "3")
    monkeypatch.setenv("PLAIN", "plain")


def options(**values: str) -> Experiment:
    typed = [f"+data.options.{name}='{value}'" for name, value in values.items()]
    return to_experiment(compose(["model=llama_debug", "data.source=json.JSONDecoder", *typed]))


@pytest.mark.parametrize(
    ("typed", "recorded", "read"),
    [
        ("${oc.env:CORPUS_TOKEN}", "${oc.env:CORPUS_TOKEN}", VALUE),
        ("Bearer ${oc.env:CORPUS_TOKEN}", "Bearer ${oc.env:CORPUS_TOKEN}", f"Bearer {VALUE}"),
        ("${oc.decode:${oc.env:COPIES_KEY}}", "${oc.decode:${oc.env:COPIES_KEY}}", 3),
        ("${oc.env:NO_SUCH_TOKEN,null}", "${oc.env:NO_SUCH_TOKEN,null}", None),
        ("${oc.env:NO_SUCH_TOKEN,public}", "${oc.env:NO_SUCH_TOKEN,public}", "public"),
        ("${oc.env:PLAIN}", "plain", "plain"),
        (
            "${data.source}/${oc.env:CORPUS_TOKEN}",
            "json.JSONDecoder/${oc.env:CORPUS_TOKEN}",
            f"json.JSONDecoder/{VALUE}",
        ),
    ],
)
def test_recorded_as_typed(typed: str, recorded: str, read: object, tmp_path: Path):
    experiment = options(x=typed)
    assert experiment.data.options["x"] == recorded
    (tmp_path / "config.yaml").write_text(to_yaml(experiment))
    again = load_experiment(tmp_path / "config.yaml", trust=True)
    assert again == experiment
    assert revealed(again.data, "data").options["x"] == read


def test_lists_and_references_to_secrets():
    typed = ["+data.options.a='${oc.env:CORPUS_TOKEN}'", "+data.options.b=['x','${data.options.a}']"]
    data = to_experiment(compose(typed)).data
    assert data.options["b"] == ["x", "${oc.env:CORPUS_TOKEN}"]
    assert revealed(data, "data").options["b"] == ["x", VALUE]


def test_the_run_id_does_not_depend_on_the_value(monkeypatch: pytest.MonkeyPatch):
    before = run_id(options(token="${oc.env:CORPUS_TOKEN}"))
    monkeypatch.setenv("CORPUS_TOKEN", "another")
    assert run_id(options(token="${oc.env:CORPUS_TOKEN}")) == before


def test_messages_conceal_what_was_read():
    revealed(options(token="${oc.env:CORPUS_TOKEN}").data, "data")
    assert concealed(f"401 for {VALUE}") == "401 for ${oc.env:CORPUS_TOKEN}"


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch):
    experiment = options(token="${oc.env:CORPUS_TOKEN}")
    assert require_variables(experiment) == {"CORPUS_TOKEN"}
    monkeypatch.delenv("CORPUS_TOKEN")
    with pytest.raises(UserError, match=r"data.options.token=.*no environment variable CORPUS_TOKEN"):
        require_variables(experiment)


@pytest.mark.parametrize(
    "typed",
    [
        "data.paths=['${oc.env:CORPUS_TOKEN}']",
        "optimizer.lr=${oc.env:CORPUS_TOKEN}",
        "data.tokenizer=${oc.env:CORPUS_TOKEN}",
    ],
)
def test_other_keys_refuse_secrets(typed: str):
    with pytest.raises(UserError, match="says that its value is secret") as caught:
        plan_run(to_experiment(compose([typed])))
    assert VALUE not in str(caught.value)


def test_the_composed_configuration_shows_it_as_typed(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--cfg", "job", "--resolve", "+data.options.token='x${oc.env:CORPUS_TOKEN}'"]) == 0
    said = capsys.readouterr().out
    assert "token: x${oc.env:CORPUS_TOKEN}" in said
    assert VALUE not in said


@pytest.mark.parametrize(
    "typed",
    [
        "+data.options.token=${oc.env:HF_TOKEN}",
        "+data.options.token='${oc.env:HF_TOKEN}'",
        "+a.url='s3://${oc.env:A_KEY}:${oc.env:B_KEY}@x'",
    ],
)
def test_overrides_hold_interpolations(typed: str):
    assert mask_override(typed, {"HF_TOKEN": VALUE}) == typed


def test_nothing_of_a_real_run_holds_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "secret_corpus.py").write_text(SOURCE.format(file=str(tmp_path / "seen")))
    monkeypatch.chdir(tmp_path)
    typed = "+data.options.token=${oc.env:CORPUS_TOKEN}"
    words = ["model=llama_debug", "data.source=secret_corpus.Corpus", "training.steps=2", "training.seq_len=64"]
    labels = ["experiment.notes='see ${oc.env:CORPUS_TOKEN}'", "tracking=all", "tracking.wandb_mode=offline"]
    assert main(["train", *words, *labels, typed, "cluster.device=cpu", "experiment.name=x"]) == 0
    assert (tmp_path / "seen").read_text() == VALUE
    (folder,) = (path for path in (tmp_path / "runs" / "x").iterdir() if (path / "config.yaml").is_file())
    assert json.dumps(typed) in (folder / "overrides.yaml").read_text()
    found = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and VALUE.encode() in path.read_bytes()]
    assert found == []
    assert "token ${oc.env:CORPUS_TOKEN}" in "".join(path.read_text() for path in folder.rglob("rank-00000.log"))


LEAK = """\
import json, logging, os, sys, warnings, threading
from titan_exp.data.sources.base import RandomAccessSource
SECRETS = [value for name, value in os.environ.items() if name in {names!r}]
class Corpus(RandomAccessSource):
    def __init__(self, config, token="none"):
        for secret in [*SECRETS, token]:
            print("printed", secret, json.dumps(secret), file=sys.stderr)
            logging.getLogger("theirs").warning("logged %s", secret)
            warnings.warn(f"warned of {{secret}}")
        thread = threading.Thread(target=self.fail)
        thread.start()
        thread.join()
        if "RANK" in os.environ or token != "none":
            self.fail()
    def fail(self):
        raise RuntimeError("denied:\\n" + " ".join([*SECRETS, os.environ["CORPUS_TOKEN"]]))
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return "a text of some words " * 40
"""
CHECKED = """\
import torch
class Sgd(torch.optim.SGD):
    def __init__(self, params, lr=1.0, token=""):
        raise RuntimeError(f"denied: {token}")
"""
UNREAD = {
    "MYAPIKEY": "plain-but-secret-value",
    "DB_PWD": "correcthorsebatterystaple",
    "PGPASS": "Tr0ub4dor&3",
    "SERVICE_CREDS": 'quo"ted\\back9',
    "ANY_URL": "postgres://joe:pa55word-of-joe@db/x",
    "ANY_NAME": "hf_" + "aBcDeFgHiJkLmNoPqRsT",
}
"""Secrets that no configuration reads, by variable."""


def leaks(text: str) -> list[str]:
    values = [*UNREAD.values(), "pa55word-of-joe", VALUE]
    return [value for value in values if value in text or json.dumps(value)[1:-1] in text]


def test_secrets_that_no_configuration_reads_are_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "leaking_corpus.py").write_text(LEAK.format(names=[*UNREAD, "CORPUS_TOKEN"]))
    monkeypatch.chdir(tmp_path)
    for name, value in UNREAD.items():
        monkeypatch.setenv(name, value)
    words = ["model=llama_debug", "data.source=leaking_corpus.Corpus", "training.steps=2", "plan.gate=off"]
    assert main(["train", *words, "cluster.device=cpu", "experiment.name=x", "tracking.wandb_mode=offline"]) == 1
    assert main(["show", "x"]) == 0
    assert main(["logs", "x"]) == 0
    said = "".join(capfd.readouterr())
    assert "denied" in said
    assert leaks(said) == []
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {path.name: leaks(path.read_bytes().decode(errors="replace")) for path in files} == {
        path.name: [] for path in files
    }
    (folder,) = (path for path in (tmp_path / "runs" / "x").iterdir() if (path / "config.yaml").is_file())
    log = "".join(path.read_text() for path in folder.rglob("rank-00000.log"))
    for text in ("printed ${oc.env:MYAPIKEY}", "logged ${oc.env:DB_PWD}", "warned of ${oc.env:PGPASS}", "joe:${oc.env"):
        assert text in log
    for path in (folder / "state.json", folder / "attempts.jsonl"):
        assert "denied" in path.read_text()


def test_the_check_of_your_own_code_conceals_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "checked_optimizer.py").write_text(CHECKED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORPUS_TOKEN", "sesame")  # too short for a secret that is found by its looks
    words = [
        "model=llama_debug",
        "optimizer.name=checked_optimizer.Sgd",
        "+optimizer.options.token=${oc.env:CORPUS_TOKEN}",
    ]
    assert main(["train", *words, "cluster.device=cpu", "experiment.name=x"]) == 2
    said = "".join(capfd.readouterr())
    assert "denied: ${oc.env:CORPUS_TOKEN}" in said
    assert "sesame" not in said


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *(
            (name, True)
            for name in ("MYAPIKEY", "DB_PWD", "MYSQL_PWD", "PGPASSWORD", "HFTOKEN", "GITHUB_PAT", "AWS_KEYS")
        ),
        *((name, True) for name in ("SENTRY_DSN", "mySecret", "Api_Key2", "SESSION_COOKIE", "JWT", "SSH_PASSPHRASE")),
        *(
            (name, False)
            for name in ("PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "COMPAT", "AUTHOR", "TITAN_EXP_TOKEN")
        ),
        *((name, False) for name in ("PATH", "XAUTHORITY", "MAX_TOKENS", "HF_HOME", "NCCL_DEBUG", "PASSES")),
    ],
)
def test_names_of_secrets(name: str, is_secret: bool):
    assert is_secret_variable(name) is is_secret

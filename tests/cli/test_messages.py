"""Messages of the command line: help, version, and errors for wrong arguments."""

import importlib
import pkgutil
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import titan_exp
import titan_exp.launch
from titan_exp.cli.main import main
from titan_exp.config.extension import extensions
from titan_exp.config.groups.experiment import Experiment

Launched = list[tuple[Experiment, list[str]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Calls of the launcher, which is replaced."""
    # Imported for the first time under the stand-ins, a module would keep them.
    for module in pkgutil.walk_packages(titan_exp.launch.__path__, "titan_exp.launch."):
        importlib.import_module(module.name)
    calls: Launched = []

    def plan_run(experiment: Experiment, overrides: Sequence[str]) -> SimpleNamespace:
        folder = SimpleNamespace(path=Path("there"), metrics=Path(__file__), read_state=lambda: None)
        found = {"folder": folder, "compilation": (), "is_done": False, "name": "name/id"}
        return SimpleNamespace(experiment=experiment, overrides=[*overrides], **found)

    def run(plan: Any) -> SimpleNamespace:
        calls.append((plan.experiment, plan.overrides))
        return SimpleNamespace(exit_code=plan.experiment.experiment.seed, summary=SimpleNamespace(state="done"))

    monkeypatch.setattr("titan_exp.launch.run_plan.plan_run", plan_run)
    monkeypatch.setattr("titan_exp.launch.memory_gate.gate_run", lambda plan, echo: plan)
    monkeypatch.setattr("titan_exp.launch.local.executor.run", run)
    monkeypatch.setattr("titan_exp.compare.output.plots.draw_run", lambda folder: [])
    return calls


@pytest.fixture
def echo(capsys: pytest.CaptureFixture[str], launched: list[Any]):
    """Run a command that must be refused; returns its message."""

    def run(*words: str) -> str:
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, launched) == ("", [])
        assert "Traceback" not in err
        return err

    return run


def test_training_composes_converts_and_launches(launched: Launched):
    before = list(sys.argv)
    assert main(["train", "model=llama_debug", "training.steps=1e3", "+experiment=smoke", "experiment.seed=3"]) == 3
    ((experiment, overrides),) = launched
    assert (experiment.model.name, experiment.training.steps) == ("llama-debug", 1000)
    assert overrides == ["model=llama_debug", "training.steps=1e3", "+experiment=smoke", "experiment.seed=3"]
    assert sys.argv == before


def test_flags_and_overrides_mix(capsys: pytest.CaptureFixture[str]):
    assert (
        main(["train", "model=llama_debug", "--cfg", "job", "training.steps=7", "--resolve", "--package=training"]) == 0
    )
    assert "steps: 7" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_usage(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "titan-exp VERB" in out
    assert all(
        f"  {verb} " in out
        for verb in ("train", "sweep", "status", "logs", "cancel", "retry", "generate", "tokenize", "compare")
    )


@pytest.mark.parametrize(
    "verb", ["sweep", "status", "logs", "cancel", "retry", "generate", "evaluate", "convert", "download"]
)
def test_help_of_every_verb(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith((f"titan-exp {verb} ", f"titan-exp {verb}:"))
    assert max(map(len, out.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    version, *lines = capsys.readouterr().out.splitlines()
    assert version == f"titan-exp {titan_exp.__version__}"
    assert lines == [f"  extension {found.name}: {found.summary}" for found in extensions().values()]


def test_the_changelog_begins_with_this_version():
    """Below what is unreleased."""
    changelog = Path(__file__).parents[2] / "CHANGELOG.md"
    unreleased, newest, *_ = re.findall(r"^## (\S+)", changelog.read_text(encoding="utf-8"), re.MULTILINE)
    assert (unreleased, newest) == ("Unreleased", titan_exp.__version__)


def test_help_lists_groups_and_marks_what_is_chosen(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--help", "model=llama3_8b"]) == 0
    out = capsys.readouterr().out
    assert "*llama3_8b" in out
    assert "*llama_laptop" not in out
    assert (
        out.index("  model ")
        < out.index("  optimizer ")
        < out.index("  cluster ")
        < out.index("Overlays")
        < out.index("smoke")
    )
    assert max(map(len, out.splitlines())) <= 120
    assert "family" not in out
    assert "local@" not in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tran"], "Did you mean titan-exp train?"),
        (
            ["launch"],
            "The verbs are cancel, compare, convert, diff, doctor, download, ",
        ),
        (["model=llama3_8b"], "titan-exp train model=llama3_8b"),
        (["--cfg", "job"], "titan-exp train --cfg job"),
        (["train", "training.stesp=4"], "training.stesp=4: unknown key\n    did you mean training.steps?"),
        (["train", "lr=3e-4"], "lr=3e-4: unknown key\n    did you mean optimizer.lr?"),
        (
            ["train", "cluster.partition=gpu"],
            "cluster=local does not have this key\n    use it with cluster=slurm or",
        ),
        (["train", "cluster.partitoin=gpu"], "did you mean cluster.partition? It comes with cluster=slurm or"),
        (
            ["train", "model=llama_debug", "model.moe.experts=4"],
            "model=llama_debug does not have this key\n    use it with model=",
        ),
        (["train", "model=qwen3_moe_debug", "model.moe.top_k=4"], "did you mean model.moe.active_experts?"),
        (
            ["train", "optimizer.name=sgd"],
            "optimizer.name=sgd: the other keys belong to another one\n    use optimizer=sgd\n",
        ),
        (
            ["train", "optimizer.name=lion"],
            "optimizer.name=lion: the other keys belong to another one\n    use optimizer=lion\n",
        ),
        (
            ["train", "model=llama_debug", "model.architecture=tests.models.own_mixer"],
            "write conf/model/own_mixer.yaml with architecture: tests.models.own_mixer, name, layers, dim, vocab_size, "
            "context and decay (titan-exp help own-model), and type --config-dir conf model=own_mixer\n",
        ),
        (
            ["train", "model.architecture=gpt_oss"],
            "model=gpt_oss_120b, model=gpt_oss_20b or model=gpt_oss_debug\n",
        ),
        (["train", "optimizer=lion", "+optimizer.eps=1"], "optimizer.eps=1: unknown key"),
        (
            ["train", "+optimizer.options={a:1}", "+optimizer.options=b"],
            "overrides.\n  +optimizer.options=b: another option already sets this key",
        ),
        (
            ["train", "-m", "+optimizer.options={a:1}", "+optimizer.options=b,c"],
            "=c: another option already sets this key\n      leave out the plus: optimizer.options=c\n",
        ),
        (["train", "training.nonsense=4"], "training has steps, stop_after, seq_len"),
        (["train", "modle=llama3_8b"], "did you mean model=llama3_8b?"),
        (["train", "model=llama9_8b"], "did you mean llama3_8b"),
        (["train", "optimizer=shampoo"], "choose adafactor, adamw"),
        (["train", "model=null"], "choose deepseek_debug"),
        (["train", "experiment=smoke"], "+experiment=smoke"),
        (["train", "experiment=mine"], "experiment.name=mine"),
        (["train", "+experiment=smok"], "did you mean smoke?"),
        (["train", "+model=llama3_8b"], "leave the plus out: model=llama3_8b"),
        (["train", "data.options.x=3"], "+data.options.x=3"),
        (["train", "+model.lr=3"], "model.lr=3: unknown key\n    did you mean optimizer.lr?"),
        (["train", "~data.split"], "data.split: this key has no value"),
        (["train", "~model"], "model: this group is missing"),
        (["train", "training.steps", "100"], "an override is key=value"),
        (["train", "data.paths=[a"], "quote it"),
        (["train", "training.batch_ramp=[2]"], "must be a list of lists"),
        (["train", "training.steps="], "training.steps: must be a whole number"),
        (
            ["train", "training.loss_chunk_tokens=bogus"],
            "loss_chunk_tokens=bogus: must be a whole number, or auto",
        ),
        (["train", "training.loss_chunk_tokens=true"], "training.loss_chunk_tokens=true: must be a number, not true"),
        (["train", "training.steps=1,2"], "start a run with each: titan-exp train -m"),
        (["train", "training.steps=-1"], "must be at least 0"),
        (["train", "--training.steps=5"], "without dashes: training.steps=5"),
        (["train", "--mutlirun"], "Did you mean --multirun?"),
        (["train", "experiment.notes=${nope}"], "experiment.notes"),
        (["train", "experiment.notes=${.nope}"], "experiment.notes"),
        (["train", "optimizer.lr=${oc.env:NOT_SET_ANYWHERE}"], "optimizer.lr"),
        (["train", "training.steps=${training.steps}"], "training.steps"),
        (["train", "optimizer.lr=${.name}"], "optimizer.lr=adamw: must be a number"),
        (["train", "--dryrun"], "Did you mean --dry-run?"),
        (["train", "--lr=3"], "set a key without dashes: optimizer.lr=3"),
        (["train", "--steps", "3"], "set a key without dashes: training.steps=3"),
        (["train", "training.steps:100"], "type training.steps=100"),
        (["train", "optimizer.lr", "=", "3"], "type optimizer.lr=3"),
        (["train", "optimizer.lr=", "3"], "type optimizer.lr=3"),
        (["train", "--cfg"], "--cfg needs a value"),
        (["train", "--resolve"], "--cfg or --help"),
        (["train", "--config-dir", "/nowhere"], "no such folder"),
        (["train", "hydra.searchpath=[pkg://nowhere.conf]"], "there is no nowhere.conf"),
        (["train", "--config-name", "nowhere"], "nowhere"),
        (["train", "--help", "model=llama9_8b"], "did you mean llama3_8b"),
        (["train", "--cfg", "job", "--resolve", "model.heads=5"], "5 does not divide 192"),
        (["train", "data.preview=0"], "must be at least 1"),
        (["train", "--skip"], "Add -m, or use titan-exp sweep"),
        (["train", "-m", "--dryrun", "--skip", "training.steps=1,2"], "Did you mean --dry-run?"),
        (["train", "-m", "--jobs", "many", "training.steps=1,2"], "must be a whole number"),
        (["sweep", "optimisers"], "Did you mean optimizers?"),
        (["sweep", "--dry-run"], "Name a study"),
        (["sweep", "optimizers", "--dryrun"], "Did you mean --dry-run?"),
        (["sweep", "optimizers", "--jobs", "0"], "Use --jobs 1 or more"),
        (["sweep", "optimizers", "size=huge"], "optimizers has laptop and cluster"),
        (["sweep", "optimizers", "optimizer.lrr=3"], "did you mean optimizer.lr?"),
        (
            ["sweep", "adamw_settings", "optimizer.state_precision=fp32"],
            "varies several keys together (optimizer",
        ),
        (["sweep", "optimizers", "experiment.seed=one"], "must be a whole number"),
        (["sweep", "context_parallel_methods", "experiment.name=a,b"], "share one folder"),
        (["sweep", "context_parallel_methods", "parallelism.ep=2"], "None of the 5 points"),
        (["status", "nowhere"], "unknown run or study"),
        (["status", "--wach"], "Did you mean --watch?"),
        (["status", "training.steps=3"], "no overrides other than paths.runs=FOLDER"),
        (["logs"], "titan-exp logs RUN"),
        (["logs", "x", "--rank"], "--rank needs a value"),
        (["cancel"], "titan-exp cancel NAME or RUN"),
        (["retry"], "titan-exp retry NAME or RUN"),
        (["tokenize"], "out=stores/mine"),
        (["tokenize", "outt=x"], "did you mean out?"),
        (["tokenize", "data=txt", "out=x"], "data=txt"),
        (["tokenize", "data.path=[a]", "out=x"], "did you mean data.paths?"),
        (["tokenize", "data=text", "data.paths=[nowhere]", "out=x"], "no such file or folder"),
        (["tokenize", "data=text", f"data.paths=[{__file__}]", f"out={'x' * 300}"], "Use a shorter name"),
        (["tokenize", "training.steps=5", "out=x"], "tokenize does not read this key"),
        (["tokenize", "check=nowhere"], "no such folder"),
        (["tokenize", "check=nowhere", "out=x"], "leave out= out"),
        (["tokenize", "stores/mine"], "an override is key=value"),
    ],
)
def test_wrong_arguments_are_reported(words: list[str], says: str, echo: Any):
    assert says in echo(*words)


def test_tokenize_help(capsys: pytest.CaptureFixture[str]):
    assert main(["tokenize", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {option}=" in out for option in ("out", "workers", "parts", "shard_tokens", "check"))
    assert max(map(len, out.splitlines())) <= 120


def test_a_preview_launches_nothing(launched: Launched, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "data.preview=2", "training.global_batch_size=2", "data.virtual_shards=2"]) == 0
    assert launched == []
    assert capsys.readouterr().out.startswith("step 2: 2 rows of ")


def test_every_wrong_override_is_named_at_once(echo: Any):
    answer = echo("train", "modle=llama3_8b", "model=llama9_8b", "training.stesp=4", "lr=1", "optimizer.lr=1e-3")
    assert [answer.count(word) for word in ("modle", "llama9_8b", "stesp", "  lr=1:", "1e-3")] == [1, 1, 1, 1, 0]


def test_sweeps_are_checked_too(echo: Any):
    answer = echo("train", "-m", "model=llama9,llama_debug", "training.stepz=1,2")
    assert "model=llama9" in answer
    assert "training.stepz=1,2" in answer


def test_keys_of_a_swept_option_are_known(echo: Any, capsys: pytest.CaptureFixture[str]):
    models = "model=qwen3_moe_debug,qwen3_moe_laptop"
    assert main(["train", "-m", models, "model.moe.scale=1,2.5", "--dry-run"]) == 0
    assert "4 to start" in capsys.readouterr().out
    assert "did you mean model.moe.scale?" in echo("train", "-m", models, "model.moe.scael=1,2.5", "--dry-run")


def test_violated_rules_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["train", f"paths.runs={tmp_path}", "parallelism.ep=2", "model.kv_heads=4"]) == 2
    err = capsys.readouterr().err
    assert "parallelism.ep=2" in err
    assert "model.kv_heads=4" in err
    assert list(tmp_path.iterdir()) == []


def test_traceback_with_hydra_full_error(monkeypatch: pytest.MonkeyPatch):
    from titan_exp.config.errors.user_error import UserError

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserError):
        main(["train", "training.stesp=4"])


def test_other_failures_are_not_hidden(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> int:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("titan_exp.launch.local.executor.run", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["train"])
    assert "Error executing job" not in capsys.readouterr().err


@pytest.mark.parametrize("file", ["", "/config.yaml"])
def test_a_run_is_repeated_from_its_own_file(
    file: str, tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
):
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.schema.typed_config import to_experiment, to_yaml

    run = to_experiment(compose(["model=llama_debug", "optimizer.lr=1e-9", "experiment.notes='a: b'"]))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(run))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config-path", f"run{file}"]) == 0
    assert launched.pop() == (run, [])
    assert main(["train", "--config-path", f"run{file}", "experiment.seed=3"]) == 3
    assert launched.pop()[0].experiment.seed == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_failures_inside_a_sweep_are_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> int:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("titan_exp.launch.sweep.sweeper.sweep", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["train", "-m", "training.steps=1,2"])


def test_a_yaml_file_that_cannot_be_read_is_named(tmp_path: Path, echo: Any):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "broken.yaml").write_text("lr: [1\n")
    answer = echo("train", "--config-dir", str(tmp_path), "optimizer=broken")
    assert "broken.yaml" in answer


def test_user_groups_in_a_folder(tmp_path: Path, launched: Launched, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "tiger.yaml").write_text("defaults: [adamw, _self_]\n\nlr: 1e-5\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /optimizer: tiger]\n\ntraining: {steps: 5}\n"
    )
    for words in (["--config-dir", str(tmp_path)], [f"hydra.searchpath=[file://{tmp_path}]"]):
        assert main(["train", *words, "+experiment=mine"]) == 0
        experiment, overrides = launched.pop()
        assert (experiment.optimizer.lr, experiment.training.steps, overrides) == (1e-5, 5, ["+experiment=mine"])
        assert main(["train", *words, "--help"]) == 0
        out = capsys.readouterr().out
        assert "tiger" in out
        assert "mine" in out
        assert main(["train", *words, "optimizer=tigre"]) == 2
        assert "did you mean tiger?" in capsys.readouterr().err


def test_groups_of_a_package_in_the_current_directory(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
):
    conf = tmp_path / "own_package_of_groups" / "conf"
    (conf / "optimizer").mkdir(parents=True)
    (conf / "__init__.py").touch()
    (conf.parent / "__init__.py").touch()
    (conf / "optimizer" / "slow.yaml").write_text("defaults: [adamw, _self_]\n\nlr: 1e-6\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert main(["train", "hydra.searchpath=[pkg://own_package_of_groups.conf]", "optimizer=slow"]) == 0
    assert launched[0][0].optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("experiment.tags=[a,~]", """experiment.tags='[a,"~"]'"""),
        ("experiment.tags=[x,'y',b=c]", """experiment.tags='[x,"y","b=c"]'"""),
        ("data.data_files=[a;b]", """data.data_files='["a;b"]'"""),
        ("experiment.tags=[it's]", """experiment.tags='["it'\\''s"]'"""),
        ("data.split=[train]", "data.split=train"),
        ("optimizer.lr_scales={matrix: 0.5}", "+optimizer.lr_scales='{matrix: 0.5}'"),
        ("experiment.notes=[draft]", """experiment.notes='"[draft]"'"""),
    ],
)
def test_the_remedy_for_a_list_is_typed(word: str, remedy: str, launched: Launched, capsys: pytest.CaptureFixture[str]):
    assert main(["train", word]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f" {remedy}")
    assert main(["train", *shlex.split(remedy)]) == 0


@pytest.mark.parametrize(
    ("word", "one", "each"),
    [
        ("optimizer.name=[adamw,muon]", "optimizer.name=adamw", "optimizer=adamw,muon"),
        ("optimizer=[adamw,muon]", "optimizer=adamw", "optimizer=adamw,muon"),
        ("model=[llama_debug,qwen3_debug]", "model=llama_debug", "model=llama_debug,qwen3_debug"),
        ("experiment.name=[a,b]", "experiment.name=a", "experiment.name=a,b"),
        ("training.steps=[10,20]", "training.steps=10", "training.steps=10,20"),
        ("optimizer.lr=[1e-3,1e-4]", "optimizer.lr=0.001", "optimizer.lr=0.001,0.0001"),
        ("training.deterministic=[false,true]", "training.deterministic=false", "training.deterministic=false,true"),
        ("training.loss_chunk_tokens=[64,128]", "training.loss_chunk_tokens=64", "training.loss_chunk_tokens=64,128"),
        ("training.mixed_precision=[fp32,bf16]", "training.mixed_precision=fp32", "training.mixed_precision=fp32,bf16"),
        ("lr_schedule.decay=[cosine,linear]", "lr_schedule.decay=cosine", "lr_schedule=cosine,linear"),
    ],
)
def test_several_values_of_one_are_the_first_or_a_sweep(
    word: str, one: str, each: str, launched: Launched, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "model=llama_debug", word]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "choose one: " in line]
    assert line.strip() == f"choose one: {one}, or start a run with each: titan-exp train -m {each}"
    assert main(["train", "model=llama_debug", one]) == 0


@pytest.mark.parametrize("each", ["optimizer=adamw,muon", "lr_schedule=cosine,linear", "training.steps=10,20"])
def test_the_sweep_of_several_values_is_typed(each: str):
    assert main(["train", "-m", "model=llama_debug", "plan.gate=off", each, "--dry-run"]) == 0


@pytest.mark.parametrize("word", ["model.architecture=[llama,qwen3]", "optimizer.name=[nothing,adamw]"])
def test_several_components_are_no_sweep(word: str, capsys: pytest.CaptureFixture[str]):
    """The other keys are those of one of them."""
    assert main(["train", "model=llama_debug", word]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].endswith(("model.architecture=llama", "optimizer.name=adamw"))


@pytest.mark.parametrize("verb", ["plan", "doctor --coordinates", "doctor --layout", "doctor --layout --json"])
def test_every_verb_that_takes_keys_explains_a_wrong_one(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([*verb.split(), "parallelsm.tp=2"]) == 2
    message = capsys.readouterr().err
    assert "parallelsm.tp=2: unknown key" in message
    assert "did you mean parallelism.tp" in message

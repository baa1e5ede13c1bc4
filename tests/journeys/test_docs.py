"""Commands of the README and the guides: executed, or planned by --dry-run if they would train or need a cluster."""

import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.compare.made_runs import made_question, make_study
from tests.extensions.tasks.made_tasks import made_task
from tests.journeys.command import REPOSITORY, titan_exp
from titan_exp.cli.help import guides
from titan_exp.cli.main import main
from titan_exp.extensions.tasks import sums
from titan_exp.launch.ledger import enter

DOCS = REPOSITORY / "docs"
TUTORIAL = DOCS / "tutorials" / "ablation.md"
OWN_PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")])
PAGES = [REPOSITORY / "README.md", REPOSITORY / "AGENTS.md", *OWN_PAGES, *sorted(guides().values())]

ELSEWHERE = {
    "additions": "needs the example package; tests/journeys/test_example_package.py runs it",
    "s3://": "needs an S3 server; tests/checkpoint/test_remote.py has one",
    "my-team/": "needs W&B; tests/compare/test_wandb.py has a server",
    "meta-llama": "needs the Hugging Face hub; tests/data/test_download.py has a local one",
    "c4": "needs a data set from the hub",
    "fineweb": "needs a data set from the hub",
    "images=emoji": "needs a font; tests/extensions/diffusion/test_captioned_images.py encodes them where it is",
    "images=folder": "needs images; tests/extensions/diffusion/test_captioned_images.py makes some",
    "images=webdataset": "needs shards; tests/extensions/diffusion/test_captioned_images.py makes some",
    "images=huggingface": "needs a data set from the hub; tests/extensions/diffusion/test_captioned_images.py has one",
    "olmes_easy": "needs files to fetch; tests/extensions/tasks/test_suites.py makes some",
    "evaluation=core": "needs files to fetch; tests/extensions/tasks/test_suites.py makes some",
    "captions=": "needs networks; tests/extensions/diffusion/test_image_scores.py makes tiny ones",
    "guidance=": "needs a diffusion run; tests/extensions/diffusion/test_generate_images.py trains one",
    "-f": "follows until interrupted",
    "-sc ": "prints shell code",
    "--experts": "needs a run with experts; tests/inference/test_expert_classes.py trains one",
    "STUDY": "needs finished runs that differ; tests/plan/test_fit.py makes them",
    "compare decay_shape": "needs pairs of finished runs; tests/launch/test_looks.py compares some",
    "compare right_sums": "needs its runs; tests/extensions/tasks/test_compare.py compares some",
    "compare linear_attention_ratio": "needs its runs; tests/compare compares others",
    "my-team/suite": "needs the hub; tests/cli/test_download.py has a small one",
    "downloads/datasets": "needs files to fetch; tests/extensions/tasks/test_suites.py makes some",
    "compare short_documents": "needs pairs of finished runs; tests/launch/test_looks.py compares some",
    "compare ladder": "needs a finished ladder; tests/compare/test_ladder.py makes some",
    "nvfp4": "composed in tests/config",
    "--ranks 0,1,7": "takes minutes; tests/plan/test_extrapolate.py plans a small model of its kind",
    "405b": "takes a minute; benchmarks/planning.py measures it",
}
"""Parts of commands that cannot run here, each with the reason."""
TRAINS = ("train", "sweep")
"""Verbs whose commands are planned by `--dry-run` instead of started."""


def commands(page: Path) -> Iterator[str]:
    """Each command of a page's bash blocks on one line, comments cut off."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.sub(r"\s+#.*", "", line).strip():
                yield command


COMMANDS = sorted({command for page in PAGES for command in commands(page) if command.startswith("titan-exp ")})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the guides name and one finished run."""
    folder = tmp_path_factory.mktemp("home")
    notes = [f"notes/{number}.txt" for number in range(200)]  # enough documents that some are held out
    for name in (*notes, "books/a.txt", "input.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n\n".join(f"{name}: paragraph {number} of many." for number in range(100)))
    (folder / "corpus.jsonl").write_text('{"body": "a text"}\n' * 2000)
    (folder / "my_package.py").write_text(
        "import torch\n\nSignum = torch.optim.SGD\n\n\ndef quadratic(progress):\n    return (1 - progress) ** 2\n"
    )
    for copy in ("olmo", "docs/examples/olmo_debug"):
        shutil.copytree(REPOSITORY / "docs/examples/olmo_debug", folder / copy)
    made_task(folder / "tasks" / "arc_easy")
    (folder / "llama3").mkdir()
    Tokenizer(WordLevel({"<|end_of_text|>": 0, "a": 1}, unk_token="a")).save(str(folder / "llama3/tokenizer.json"))
    done = titan_exp(
        *("train", "model=llama_debug", "training.steps=2", "training.seq_len=64", "evaluation.every=0"),
        *("cluster.device=cpu", "data=text", "data.paths=[notes]", "checkpoint=sync", "tracking.log_every=1"),
        "weight_average=ema",
        folder=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = {1e-3: [3.1, 3.2, 3.3], 3e-3: [2.7, 2.8, 2.9], 1e-2: [2.9, 3.0, 3.0]}
    for study in ("rates", "optimizers", "halving", "semi_synchronous", "one", "dp", "tp"):
        make_study(folder / "runs", losses, study=study)
    for study in ("rates", "rates_2"):
        enter(folder / "runs", made_question(study))
    (run,) = (folder / "runs" / "first").iterdir()
    with contextlib.chdir(folder):
        assert main(["encode", "images=glyphs", "out=stores/glyphs"]) == 0
        assert main(["tokenize", "data=text", "data.paths=[notes]", "out=stores/mine"]) == 0
        assert main(["convert", str(run), "export/mine"]) == 0
    for store, copy in (("glyphs", "emoji"), ("mine", "mixed")):
        shutil.copytree(folder / "stores" / store, folder / "stores" / copy)
    with contextlib.chdir(folder):
        sums.main()
    (folder / "sweeps").mkdir()
    shutil.copytree(folder / "notes", folder / "corpus" / "all")
    shutil.copytree(folder / "notes", folder / "corpus" / "long", ignore=shutil.ignore_patterns("*1.txt"))
    studies = re.findall(r"`sweeps/(\w+)\.yaml`:\s+```yaml\n(question: .*?)```", TUTORIAL.read_text(), re.S)
    assert [name for name, _ in studies] == ["warmup", "high_rate"]
    studies += re.findall(r"`sweeps/(\w+)\.yaml`:\s+```yaml\n(question: .*?)```", guides()["data"].read_text(), re.S)
    for name, text in studies:
        (folder / "sweeps" / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def tutorial_runs(home: Path) -> None:
    """Two points of the tutorial's study, shortened: those that its page looks at."""
    words = ("optimizer.lr=0.1", "experiment.seed=0", "training.steps=20", "lr_schedule.decay_steps=4")
    done = titan_exp("sweep", "warmup", *words, "evaluation.every=0", "checkpoint=none", folder=home)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_hold_commands():
    assert len(COMMANDS) > 60


def test_the_architecture_page_names_what_exists():
    """In links, whose text is the path in titan_exp, in words, and in its drawing."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    linked = re.findall(r"\[`(.+?)`\]\(\.\./titan_exp/(.+?)\)", page)
    named = re.findall(r"`((?:titan_exp|tests|conf|docs)/[\w./]+)`", page)
    drawn = re.findall(r">([\w/…]+\.py)", (REPOSITORY / "docs" / "images" / "life_of_a_run.svg").read_text())
    assert [(text, path) for text, path in linked if text != path] == []
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
    patterns = [path for _, path in linked] + [path.replace("…", "*") for path in drawn]
    assert [pattern for pattern in patterns if not any((REPOSITORY / "titan_exp").glob(pattern))] == []
    assert (len(linked), len(named), len(drawn)) > (30, 15, 15)


def by_day(command: str) -> object:
    """The command as a case, by night if it takes many seconds."""
    slow = (
        "doctor",
        "plan ",
        "model=huggingface",
        "evaluate",
        "format=",
        "sweep parallelism_degrees",
        "predict=",
        "my_package",
        "sweep optimizers",
        "sweep halving",
        "sweep width_transfer",
        "warmup_1b",
        "retry",
        "optimizer=soap",
    )
    verb_and_words = command.removeprefix("titan-exp ")
    marks = [pytest.mark.night] if any(part in verb_and_words for part in slow) else []
    return pytest.param(command, marks=marks, id=verb_and_words)


@pytest.mark.parametrize("command", [by_day(command) for command in COMMANDS])
def test_a_command_of_the_guides_works(
    command: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
):
    if reason := next((why for part, why in ELSEWHERE.items() if part in command), None):
        pytest.skip(reason)
    if "warmup" in command and command.split()[1] not in TRAINS:
        request.getfixturevalue("tutorial_runs")
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "argv", ["titan-exp"])
    (run,) = (home / "runs" / "first").iterdir()
    verb, *words = [str(run) if word == "RUN" else word for word in shlex.split(command)[1:]]
    words = [word.replace("=RUN", f"={run}") for word in words]
    if verb in TRAINS and not {"--help", "--cfg", "--dry-run"} & set(words) and words:
        words = [*(["-m"] if verb == "train" and "-m" not in words else []), *words, "--dry-run"]
    for made in ("stores/mine", "stores/mixed", "export/mine", "export/llama", "export/tune", "mine.pt", "start"):
        # Commands that write a target make it anew.
        if verb in ("tokenize", "convert") and (f"out={made}" in words or words[1:2] == [made]):
            shutil.rmtree(made) if Path(made).is_dir() else Path(made).unlink(missing_ok=True)
    try:
        assert main([verb, *words]) == 0, capsys.readouterr()
    finally:
        # A run branched off the finished one is not a run of the next command.
        for branch in set(run.parent.iterdir()) - {run}:
            shutil.rmtree(branch)

"""The command in a process of its own: what it imports, and completion in a real bash."""

import ast
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_exp.config.command_line.help import complete_option
from titan_exp.config.extension import extensions

HEAVY = ("torch", "wandb", "datasets", "tensorboard", "transformers", "pydantic", "matplotlib", "numpy")


def run(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "words",
    [
        "train --help",
        "train --cfg job --resolve",
        "train --info defaults model=llama3_8b",
        "train -sc install=bash",
        "status --help",
        "generate --help",
        "convert --help",
        "doctor --coordinates --help",
    ],
)
def test_nothing_heavy_is_imported(words: str):
    assert imported(words) == []


def test_composing_imports_nothing_of_launches():
    """Each of these takes a tenth of the time of `--cfg job`, which users type often."""
    late = [
        "titan_exp.rules",
        "titan_exp.launch.executor",
        "titan_exp.launch.sweep.sweeper",
        "rich",
        "importlib.metadata",
    ]
    code = "import sys; from titan_exp.cli.main import main; main(); sys.exit(str([n for n in %r if n in sys.modules]))"
    assert run(code % late, *["train", "--cfg", "job"]).stderr.splitlines()[-1] == "[]"


def test_a_refusal_types_the_other_values_and_imports_no_more():
    assert imported("train training.stesp=3") == ["pydantic"]


def imported(words: str) -> list[str]:
    """Heavy packages that a command imports."""
    heavy = f"[name for name in {HEAVY!r} if name in sys.modules]"
    code = f"import sys; from titan_exp.cli.main import main; main(); sys.exit(str({heavy}))"
    return ast.literal_eval(run(code, *words.split()).stderr.splitlines()[-1])


def test_a_rank_composes_nothing():
    code = "import sys, titan_exp.launch.local.ranks; print({'hydra', 'torch', 'submitit'} & {*sys.modules})"
    assert run(code).stdout == "set()\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "titan-exp ",
            [
                "cancel",
                "compare",
                "convert",
                "diff",
                "doctor",
                "download",
                *(["encode"] if "diffusion" in extensions() else []),
                "evaluate",
                "generate",
                "help",
                "logs",
                "plan",
                "retry",
                "show",
                "status",
                "sweep",
                "tokenize",
                "train",
            ],
        ),
        ("titan-exp sweep opt", ["optimizers"]),
        ("titan-exp sweep optimizers optimizer.lr", ["optimizer.lr=", "optimizer.lr_scales."]),
        ("titan-exp status no_such_stu", []),
        ("titan-exp tr", ["train"]),
        ("titan-exp train model=llama3_1_4", ["model=llama3_1_405b"]),
        ("titan-exp train model=llama3_8b optimizer.lr", ["optimizer.lr=", "optimizer.lr_scales."]),
        ("titan-exp train +exp", ["+experiment="]),
        ("titan-exp train -m --config-dir /tmp data=text data.tok", ["data.tokenizer="]),
        ("/some/where/titan-exp train data=te", ["data=text"]),
        ("python -m titan_exp train data=te", ["data=text"]),
        ("titan-exp generate runs/first temp", ["temperature="]),
        ("titan-exp convert runs/first out format=torch", ["format=torch", "format=torchtune"]),
        ("titan-exp tokenize out=stores/mine data=te", ["data=text"]),
        ("titan-exp tokenize out=stores/mine data=text sha", ["shard_tokens="]),
        ("titan-exp evaluate runs/first split=", ["split=held_out", "split=all"]),
        ("titan-exp evaluate runs/first data.validation_f", ["data.validation_fraction="]),
        ("titan-exp evaluate runs/first optimizer.l", []),
        ("titan-exp train training.steps=3 'unfinished", []),
        ("titan-exp train --cfg ", []),
    ],
)
def test_completion_answers(line: str, words: list[str]):
    done = run("import sys; from titan_exp.cli.main import main; sys.exit(main())", "-sc", "query=bash", COMP_LINE=line)
    assert (done.stdout.split(), done.stderr, done.returncode) == (words, "", 0)


@pytest.mark.parametrize(
    ("verb", "word", "offers"),
    [
        ("generate", "to", ["tokens=", "top_k=", "top_p="]),
        ("generate", "cache=", ["cache=true", "cache=false"]),
        ("generate", "", []),
        ("convert", "runs/fir", []),
        ("download", "files=w", ["files=weights"]),
        ("tokenize", "opt", []),
        ("train", "tok", []),
    ],
)
def test_completion_of_options(verb: str, word: str, offers: list[str]):
    assert complete_option(verb, word) == offers


def test_info_stands_alone_or_with_a_topic():
    for topic in ("", "defaults"):
        done = run(
            "from titan_exp.cli.main import main; main()", "train", "--info", *topic.split(), "model=llama3_1_8b"
        )
        assert "model/family/llama3_1" in done.stdout


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "titan_exp", "tran"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Did you mean titan-exp train?" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])  # it is noticed at the end, and in Hydra
def test_closed_pipe_is_no_error(unbuffered: str):
    bash = f"set -o pipefail; {sys.executable} -m titan_exp train --cfg job | true"
    known = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, timeout=60, check=False, env=known)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_completion_in_a_real_bash(tmp_path: Path):
    command = tmp_path / "titan-exp"
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom titan_exp.cli.main import main\nsys.exit(main())\n")
    command.chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(PATH=f"{tmp_path}:{os.environ['PATH']}", PS1="ready> ", TERM="dumb")
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        assert "ready>" in read_until(terminal, "ready>")
        os.write(terminal, b'eval "$(titan-exp train -sc install=bash)"; echo installed $?\n')
        assert "installed 0" in read_until(terminal, "installed 0")
        os.write(terminal, b"titan-exp train model=llama3_1_4\t")
        assert "model=llama3_1_405b" in read_until(terminal, "405b")
    finally:
        os.write(terminal, b"\x15exit\n")
        os.close(terminal)
        os.waitpid(pid, 0)


def read_until(terminal: int, text: str, limit: float = 30.0) -> str:
    """Read what a terminal shows until a text is there, or a time in seconds is over."""
    shown, end = "", time.monotonic() + limit
    while text not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown

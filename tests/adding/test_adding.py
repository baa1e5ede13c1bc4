"""Files that an addition takes, docs/guides/adding.md: one of each, in a copy of the tree, where it then works."""

import json
import re
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.journeys.command import REPOSITORY, run

PAGE = REPOSITORY / "docs" / "guides" / "adding.md"
FILES = Path(__file__).parent
NAMES = {"optimizer": "adamax", "family": "flat_llama", "source": "sums", "verb": "where", "executor": "ssh"}
NAMES |= {"part": "update_size", "metric": "embedding_peak"}
"""Names of the additions whose own files are in folders here."""
EDITS = {
    "key": {
        "titan_exp/config/groups/optimizer.py": (
            "    power: NonNegativeFloat = 0.0\n",
            "    lowest: NonNegativeFloat = 0.0\n"
            '    """Learning rate below which no step falls after the warm-up. E.g. `lr_schedule.lowest=1e-5`."""\n',
        ),
        "titan_exp/optim/lr_schedule.py": (
            "        factor = self._decay(",
            "        if step == self.steps:\n            return config.lowest\n",
        ),
    },
    "rule": {
        "titan_exp/rules/training.py": (
            "    Refuse(\n",
            '    Refuse(\n        "lr_schedule.lowest",\n'
            "        lambda lr_schedule, optimizer: lr_schedule.lowest > optimizer.lr,\n"
            '        "the peak is optimizer.lr={optimizer.lr}",\n'
            '        "lr_schedule.lowest={optimizer.lr}",\n    ),\n',
        ),
    },
    "part": {
        "titan_exp/trainer/parts.py": (
            "    # After all that leaves garbage.\n",
            "    # After the evaluation, whose time is not that of a step.\n"
            "    from titan_exp.trainer.update_size import UpdateSize\n\n"
            "    yield UpdateSize()\n",
        ),
    },
}
"""Additions to files that exist: by file a text that is in it, and what is written before its first place."""
GOLDEN = r"tests/(config|extensions/\w+)/golden/"
THINGS = ("key", "rule", "verb", "optimizer", "family", "source", "executor", "part", "metric")


@cache
def promised(thing: str) -> tuple[list[str], list[str]]:
    """Patterns of the files that the page says a person and `make golden` write."""
    name = NAMES.get(thing, "")
    (row,) = re.findall(rf"^\| an? {thing} \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    written, _, generated = (re.findall(r"`([\w/.*]+/[\w/.*]+)`", cell) for cell in row.split("|"))

    def pattern(path: str) -> str:
        for word, meaning in (("NAME", name), ("GROUP", r"\w+"), ("ROOM", r"\w+"), ("FILE", r"\w+"), ("*", ".+")):
            path = path.replace(word, meaning)
        return path

    return [pattern(path) for path in written], [pattern(path) for path in generated]


def texts(tree: Path) -> dict[str, str]:
    paths = (path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    found = {path.relative_to(tree).as_posix(): path for path in paths if path.suffix in (".py", ".yaml", ".md")}
    return {name: path.read_text(encoding="utf-8") for name, path in found.items() if not name.startswith("runs/")}


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def python(tree: Path, *words: str) -> CompletedProcess[str]:
    return run([sys.executable, "-m", *words], tree, environment={"PYTHONPATH": str(tree)})


def golden(tree: Path, *tests: str) -> None:
    """The part of `make golden` that these tests write."""
    done = python(tree, "pytest", "-q", "-p", "no:cacheprovider", *tests, "--update-golden")
    assert done.returncode == 0, done.stdout + done.stderr


def add(thing: str, tree: Path) -> None:
    if thing in NAMES:
        shutil.copytree(FILES / thing, tree, dirs_exist_ok=True)
    for name, (place, text) in EDITS.get(thing, {}).items():
        before = (tree / name).read_text()
        assert place in before, f"{name} has changed: where does the text go now?"
        (tree / name).write_text(before.replace(place, f"{text}{place}", 1))


def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for name in ("titan_exp", "hydra_plugins", "conf", "docs", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree(REPOSITORY / name, tree / name, ignore=ignored)
    shutil.rmtree(tree / "conf" / "local", ignore_errors=True)
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(REPOSITORY / name, tree / name)
    # Before the tree that the environment was installed from, in every process.
    (tree / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tree)!r})\n")
    return tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory)


@pytest.fixture(scope="module")
def by_hand(tree: Path) -> dict[str, set[str]]:
    """Files that each addition changed by hand."""
    found = {}
    for thing in THINGS:
        before = texts(tree)
        add(thing, tree)
        found[thing] = changed(before, texts(tree))
    return found


@pytest.fixture(scope="module")
def generated(tree: Path, by_hand: dict[str, set[str]]) -> set[str]:
    """Files that `make golden` changed, after all additions."""
    before = texts(tree)
    golden(tree, "tests/config/test_reference.py")
    return changed(before, texts(tree))


@pytest.mark.parametrize("thing", THINGS)
def test_an_addition_takes_the_files_of_the_page(thing: str, by_hand: dict[str, set[str]]):
    assert unmatched(promised(thing)[0], by_hand[thing]) == ([], [])


def test_golden_texts_are_written_by_no_hand(generated: set[str]):
    """All additions together; `make night` asks each alone."""
    also = [pattern for thing in THINGS for pattern in promised(thing)[1]]
    assert_promised(also, {name for name in generated if not re.match(GOLDEN, name)})


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_each_addition_changes_the_golden_texts_of_the_page(tmp_path_factory: pytest.TempPathFactory):
    tree = copied(tmp_path_factory)
    for thing in THINGS:
        add(thing, tree)
        before = texts(tree)
        golden(tree, "tests/config/test_reference.py")
        assert_promised(promised(thing)[1], changed(before, texts(tree)))
    before = texts(tree)
    golden(tree, "tests/config/test_compose.py", "-k", "default_configuration or every_option or every_overlay")
    assert [name for name in changed(before, texts(tree)) if not re.match(GOLDEN, name)] == []


def assert_promised(also: list[str], names: set[str]) -> None:
    # Golden texts are those of all additions, and the page of models takes the markers of all tests.
    assert unmatched([path for path in also if "golden" not in path and "models.md" not in path], names) == ([], [])


def unmatched(patterns: list[str], names: set[str]) -> tuple[list[str], list[str]]:
    """Patterns that no file has, and files that have no pattern."""
    idle = [pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in names)]
    return idle, sorted(name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns))


def test_the_additions_work_together(tree: Path, generated: set[str]):
    words = ["+experiment=smoke", "model=flat_llama_debug", "optimizer=adamax", "data=sums", "training.steps=2"]
    words += ["evaluation.every=0", "checkpoint=none", "plan.gate=off", "lr_schedule.lowest=1e-5"]
    words += ["tracking.metrics=[embedding_peak]"]
    done = python(tree, "titan_exp", "train", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = tree.glob("runs/smoke/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert rows[-1]["lr"] == 1e-5
    assert rows[-1]["update_size"] > 0
    assert rows[-1]["model/embedding_peak"] > 0


def test_the_rule_refuses_and_its_remedy_is_accepted(tree: Path, generated: set[str]):
    refused = python(tree, "titan_exp", "train", "--dry-run", "lr_schedule.lowest=1")
    assert (refused.returncode, "lr_schedule.lowest=0.004" in refused.stderr) == (2, True)
    assert python(tree, "titan_exp", "train", "--dry-run", "lr_schedule.lowest=0.004").returncode == 0


def test_the_source_takes_its_options(tree: Path, by_hand: dict[str, set[str]]):
    words = ["train", "--dry-run", "model=llama_debug", "plan.gate=off", "data=sums"]
    refused = python(tree, "titan_exp", *words, "+data.options.other=5")
    assert (refused.returncode, "did you mean others?" in refused.stderr) == (2, True), refused.stderr
    assert python(tree, "titan_exp", *words, "+data.options.others=5").returncode == 0


def test_the_verb_runs_and_is_listed(tree: Path, by_hand: dict[str, set[str]]):
    assert python(tree, "titan_exp", "where", "paths.runs=/scratch").stdout == "/scratch\n"
    assert "  where      Print the folder that holds every run." in python(tree, "titan_exp", "--help").stdout


def test_the_executor_starts_a_command_on_each_host(tree: Path, by_hand: dict[str, set[str]]):
    words = ["cluster=ssh", "cluster.device=cpu", "+cluster.processes_per_node=1", "parallelism.dp_shard=2"]
    done = python(tree, "titan_exp", "train", "--dry-run", "model=llama_debug", *words)
    assert re.findall(r"^# (\w+)$", done.stdout, re.MULTILINE) == ["node1", "node2"], done.stdout + done.stderr

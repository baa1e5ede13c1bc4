"""The rules of the house: rooms import downwards, files and functions stay small, public names say what they are."""

import ast
import dataclasses
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.conftest import cases_by_day
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.models.spec.transformer import TransformerConfig

PACKAGE = Path(__file__).resolve().parents[1] / "titan_exp"
FILES = sorted(PACKAGE.rglob("*.py"))
BENCHMARKS = sorted((PACKAGE.parent / "benchmarks").rglob("*.py"))
FLOORS = (
    {"config"},
    {"ops"},
    {"models"},
    {"rules", "quantization", "optim", "data", "tracking", "parallel"},
    {"checkpoint"},
    {"trainer"},
    {"inference", "doctor"},
    {"plan"},
    {"launch"},
    {"compare"},
    {"cli"},
    {"__main__", "extensions"},
)
"""From the ground up: a room imports rooms of lower floors, and itself; never another room of its own floor."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Every absolute name that a file imports, lazily or not; relative imports are made absolute."""
    here = ("titan_exp", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stem = ".".join([*here[: -node.level], *(node.module or "").split(".")]) if node.level else node.module
            yield from (f"{(stem or '').rstrip('.')}.{alias.name}" for alias in node.names)


def named(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


def test_every_room_has_its_floor():
    assert {room_of(path) for path in FILES} - set(FLOOR) == {"__init__"}


def test_the_architecture_page_lists_the_rooms_by_floor():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    listed = [(int(floor) - 1, room) for floor, room in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.M)]
    assert listed == sorted(listed, key=lambda row: row[0])
    assert {room: floor for floor, room in listed} | {"__main__": len(FLOORS) - 1} == FLOOR


@pytest.mark.parametrize("path", FILES, ids=named)
def test_rooms_import_downwards(path: Path):
    room = room_of(path)
    if room == "__init__":
        return
    upward = {
        module
        for module in imported_modules(path)
        if module.startswith("titan_exp.")
        and (other := module.split(".")[1]) != room
        and FLOOR.get(other, -1) >= FLOOR[room]
    }
    assert upward == set()


def test_the_direction_test_notices_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "x.py"
    for line in (
        "from titan_exp.optim import build",
        "import titan_exp.trainer.parts",
        "from ..tracking import log",
    ):
        path.write_text(f"def lazily():\n    {line}\n")
        with pytest.raises(AssertionError):
            test_rooms_import_downwards(path)
    path.write_text("from titan_exp.config.groups.run import DataConfig\nfrom . import batch\nimport torch\n")
    test_rooms_import_downwards(path)


def test_the_core_names_no_extension_and_extensions_not_each_other():
    """The core imports none by a text either; descriptions alone hold import paths."""
    folder = PACKAGE / "extensions"
    names = [path.parent.name for path in sorted(folder.glob("*/extension.py"))] or ["none"]
    named_extension = re.compile(rf"\bextensions\.({'|'.join(names)})\b")
    found = []
    for path in FILES:
        own = path.relative_to(folder).parts[0] if path.is_relative_to(folder) else None
        imported = {module.split(".")[2] for module in imported_modules(path) if module.startswith("titan_exp.ext")}
        others = {*named_extension.findall(path.read_text()), *imported} - {own}
        found += [(named(path), other) for other in sorted(others)]
    assert found == []


def test_the_core_trains_plans_and_launches_worlds_and_knows_no_replica_groups():
    words = re.compile(r"replica.?group|lighthouse|torchft|semi.?sync|outer.?optim|diloco", re.IGNORECASE)
    texts = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json", ".js", ".html", ".css", ".jinja")]
    texts += [path for folder in ("conf", "sweeps") for path in (PACKAGE.parent / folder).rglob("*.yaml")]
    core = [path for path in texts if PACKAGE / "extensions" not in path.parents and path.name != "provided.json"]
    assert len(core) > 400
    assert {named(path): found for path in core if (found := words.findall(path.read_text()))} == {}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if room_of(path) in ("config", "rules") or path.name == "extension.py"],
    ids=named,
)
def test_the_configuration_knows_no_torch(path: Path):
    heavy = {"torch", "torchao", "wandb", "datasets", "tensorboard", "transformers", "numpy"}
    assert {module.split(".")[0] for module in imported_modules(path)} & heavy == set()


@pytest.mark.parametrize("path", [*FILES, *BENCHMARKS], ids=named)
def test_files_and_functions_stay_small(path: Path):
    source = path.read_text()
    assert source.count("\n") <= 500
    assert not {"utils", "util", "helpers", "helper", "manager", "common", "misc"} & set(path.stem.split("_"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is longer than 80 lines"


def test_the_loop_names_no_feature():
    """What joins training is a part or a commit. Only the constructor may switch an instrument on."""
    words = "average|qk_?clip|evaluat|image|semi|replica|fragment|expert|mtp|ramp|quantiz|profil|spike|probe|sampl"
    loop = (PACKAGE / "trainer/trainer.py").read_text().partition("    def run(self)")[2]
    assert re.findall(words, loop) == []
    assert loop.count("\n") < 160


def test_no_order_hides_in_hooks_of_an_optimizer():
    assert [named(path) for path in FILES if "register_step_p" in path.read_text()] == []


def test_the_usual_file_is_short():
    assert median(path.read_text().count("\n") for path in FILES) <= 215


@pytest.mark.parametrize("path", FILES, ids=named)
def test_public_names_are_documented_and_typed(path: Path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module says what it is"
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and is_public(node))]:
        for node in filter(is_public, owner.body):
            # A method that stands in for a base class's is documented there.
            if isinstance(node, ast.ClassDef) or (isinstance(node, functions) and not getattr(owner, "bases", [])):
                assert ast.get_docstring(node), f"{node.name} has no docstring"
            if isinstance(node, functions):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                untyped = [
                    argument.arg
                    for argument in arguments
                    if argument.annotation is None and argument.arg not in ("self", "cls")
                ]
                assert untyped == [], f"{node.name} has untyped arguments"
                assert node.returns is not None, f"{node.name} does not say what it returns"


def is_public(node: ast.stmt) -> bool:
    return not getattr(node, "name", "_").startswith("_")


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) in ("config", "rules")], ids=named)
def test_fields_of_the_configuration_are_documented(path: Path):
    undocumented = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            for place, field in enumerate(node.body):
                if isinstance(field, ast.AnnAssign):
                    after = node.body[place + 1] if place + 1 < len(node.body) else None
                    said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    undocumented += [] if said else [f"{node.name}.{ast.unparse(field.target)}"]
    assert undocumented == []


def test_nothing_is_left_over():
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "raise NotImplemented" + "Error")
    found = defaultdict(list)
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(word in line for word in words):
                found[named(path)].append(number)
    assert found == {}


def test_few_files_name_a_field_of_a_model_family():
    """Everything but the families reads the spec, so that another family is one file."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} - {
        field.name for field in dataclasses.fields(ModelConfig)
    }
    assert "heads" in fields
    named_field = re.compile(rf"\bmodel\.({'|'.join(fields)})\b")
    rooms = ("models", "extensions")
    found = [named(path) for path in FILES if room_of(path) not in rooms and named_field.search(path.read_text())]
    assert len(found) <= 5, found


def test_no_product_code_patches_itself():
    assert [named(path) for path in FILES if any("mock" in name for name in imported_modules(path))] == []


@pytest.mark.xdist_group("house")
def test_tests_of_a_group_share_a_worker(request: pytest.FixtureRequest):
    """Without it every worker computes the curves of tests/parity, and starts a SLURM, for itself."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("groups are for several workers: pytest -n 3 --dist loadgroup")
    assert request.node.nodeid.endswith("@house")


@pytest.mark.night
def test_every_mutation_runs_where_its_file_is_named():
    """`make night` names them."""
    named = ("tests/parity/rope_mutations.py", "tests/parity/kernel_mutations.py")
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *named]
    found = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=True)
    assert "deselected" not in found.stdout


def test_cases_left_to_the_night_are_of_tests_that_exist():
    for name, number in cases_by_day().items():
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(|^{test} = ", (PACKAGE.parent / file).read_text(), re.MULTILINE), name
        assert number >= 0

"""OLMo's rendered requests and CORE bundles, read from files; refusals."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.extensions.tasks.formats import read_tasks


def request(document: int, choice: int, label: Any = 1, **changes: Any) -> dict[str, Any]:
    """Request of OLMo's, with the keys of a real one."""
    context = "Answer:" if document >= 1_000_000 else f"Question {document}?\nAnswer:"
    texts = {"context": context, "continuation": f" {'éabc'[choice]}"}
    doc = {"query": "q", "choices": ["é", "a"], "gold": label}
    numbers = {"idx": choice, "doc_id": document, "native_id": f"n{document}", "label": label}
    return {"request_type": "loglikelihood", "doc": doc, "request": texts, "task_name": "t", **numbers, **changes}


CHOICES = [request(document, choice) for document in (0, 1, 1_000_000, 1_000_001) for choice in (1, 0)]
CONFIG = {"task_name": "t", "task_config": {"primary_metric": "acc_per_char"}, "num_instances": 2}


def olmo(folder: Path, requests: list[dict[str, Any]], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    with gzip.open(folder / "requests.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(one) + "\n" for one in requests))
    return folder


def test_requests_are_items(tmp_path: Path):
    (task,) = read_tasks(olmo(tmp_path / "arc" / "rc", CHOICES))
    assert (task.name, task.kind, task.convention, task.delimiter) == ("arc_rc", "choice", "apart", " ")
    assert (task.primary, task.chance) == ("acc_per_char", 0.5)
    context = "Question 1?\nAnswer:"
    assert task.items[1].choices == ((context, " é"), (context, " a"))
    assert [(item.gold, item.neutral, item.id) for item in task.items] == [
        ((1,), "Answer:", "0"),
        ((1,), "Answer:", "1"),
    ]


def test_a_gold_answer_alone_is_a_continuation(tmp_path: Path):
    requests = [request(number, 0, label="text", request={"context": "c", "continuation": "\n x"}) for number in (0, 1)]
    (task,) = read_tasks(
        olmo(tmp_path / "mbpp", requests, num_instances=0, task_config={"primary_metric": "exact_match"})
    )
    assert (task.kind, task.primary, task.delimiter, task.chance) == ("continuation", "bits_per_byte", "", 0)
    assert task.items[0].choices == (("c", "\n x"),)


def test_a_folder_of_folders_has_the_tasks_of_all(tmp_path: Path):
    for name in ("b/rc", "a/mc"):
        olmo(tmp_path / name, CHOICES)
    assert [task.name for task in read_tasks(tmp_path)] == ["a_mc", "b_rc"]


DAMAGED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a choice twice": ([*CHOICES, CHOICES[0]], {}, r"line 9 .*choice 1 of document 0 is there twice"),
    "a choice missing": (CHOICES[:2] + CHOICES[2:3], {}, r"document 1 "),
    "all choices but one missing": ([*CHOICES[:2], request(1, 0, 0)], {}, r"document 1 .*it has a single choice"),
    "documents missing": (CHOICES[:2], {}, r"has 1 documents of 2"),
    "no documents": ([], {"num_instances": 0}, r"has 0 documents"),
    "a label that is no choice": ([request(0, 0, 2), request(0, 1, 2)], {"num_instances": 1}, r"document 0 .*\[2\]"),
    "generation": ([request(0, 0, request_type="generate_until")], {}, r"line 1 .*generate_until is not scored"),
    "no request": ([{"doc_id": 0}], {}, r"line 1 has no request_type"),
    "a number for a text": (
        [request(0, 0, request={"context": 1, "continuation": " a"})],
        {"num_instances": 1},
        "1 is not a text",
    ),
    "a text for a number": ([request(0, 0, doc_id="x")], {}, r"line 1: doc_id is x"),
    "another metric": (CHOICES, {"task_config": {"primary_metric": "f1"}}, "its primary metric f1 is none of acc_raw"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_requests_are_refused(name: str, tmp_path: Path):
    requests, config, message = DAMAGED[name]
    with pytest.raises(UserError, match=message):
        read_tasks(olmo(tmp_path, requests, **config))


def test_damaged_files_are_refused(tmp_path: Path):
    file = olmo(tmp_path, CHOICES) / "requests.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"requests\.jsonl\.gz is damaged"):
        read_tasks(tmp_path)
    file.unlink()
    (tmp_path / "requests.jsonl").write_text(json.dumps(CHOICES[0]) + "\n[1]\n")
    with pytest.raises(UserError, match=r"requests\.jsonl, line 2 is damaged"):
        read_tasks(tmp_path)
    (tmp_path / "requests.jsonl").unlink()
    with pytest.raises(UserError, match="has no tasks"):
        read_tasks(tmp_path)
    with pytest.raises(UserError, match=r"missing\.yaml"):
        read_tasks(tmp_path / "missing.yaml")


CORE = """\
icl_tasks:
- label: mc
  dataset_uri: mc.jsonl
  num_fewshot: [2]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
- {label: schema, dataset_uri: schema.jsonl, num_fewshot: [1], icl_task_type: schema}
- {label: lm, dataset_uri: lm.jsonl, num_fewshot: [0, 2], icl_task_type: language_modeling}
"""
RECORDS: dict[str, list[dict[str, Any]]] = {
    "mc": [{"query": f"Q{i}: é?", "choices": [f"a{i}", f"b{i}", "c"], "gold": i % 3} for i in range(6)],
    "schema": [
        {"context_options": [f"The cat{i}", f"The dog{i}"], "continuation": f"ran {i}.", "gold": i % 2}
        for i in range(5)
    ],
    "lm": [{"context": f"  one {i} \n", "continuation": f"two {i}"} for i in range(5)],
}


def core(folder: Path, text: str = CORE, **records: list[Any]) -> Path:
    (folder / "eval_data").mkdir(exist_ok=True)
    for name, lines in {**RECORDS, **records}.items():
        (folder / "eval_data" / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (folder / "eval_meta_data.csv").write_text("Eval Task,Task Category,Random baseline\nmc,x,25.0\nlm,y,0\n")
    (folder / "core.yaml").write_text(text)
    return folder / "core.yaml"


def test_a_bundle_has_the_prompts_of_nanochat(tmp_path: Path):
    """Literals of nanochat's templates, shuffle and draws, rendered by Jinja on these records."""
    tasks = read_tasks(core(tmp_path))
    assert [(task.name, task.kind, task.chance, task.primary) for task in tasks] == [
        ("mc", "choice", 0.25, "acc_per_token"),
        ("schema", "choice", 0.5, "acc_per_token"),
        ("lm_0shot", "continuation", 0.0, "acc"),
        ("lm_2shot", "continuation", 0.0, "acc"),
    ]
    mc, schema, plain, shots = (task.items for task in tasks)
    assert {task.convention for task in tasks} == {"common"}
    context = "Q5: é?\nAnswer: c\n\nQ0: é?\nAnswer: a0\n\nQ1: é?"
    assert mc[0].choices == tuple((context, f"\nAnswer: {one}") for one in ("a1", "b1", "c"))
    assert (mc[0].gold, mc[0].id, mc[0].neutral) == ((1,), "2", None)
    assert schema[1].choices == tuple((f"The cat4 ran 4.\n\nThe {one}0", " ran 0.") for one in ("cat", "dog"))
    assert plain[0].choices == (("one 1", " two 1"),)
    assert shots[0].choices == (("one 4 two 4\n\none 0 two 0\n\none 1", " two 1"),)


def test_shots_leave_out_the_item_itself(tmp_path: Path):
    mc, schema, _, shots = read_tasks(core(tmp_path, CORE.replace("[2]", "[5]").replace("[0, 2]", "[1, 4]")))
    for task, number in ((mc, 6), (shots, 5)):
        for item in task.items:
            own = item.choices[0][0].rpartition("\n\n")[2]
            assert item.choices[0][0].count("\n\n") == number - 1
            assert own not in item.choices[0][0].rpartition("\n\n")[0]
    assert len(schema.items) == 5


ENTRY = "icl_tasks: [{label: mc, dataset_uri: mc.jsonl, icl_task_type: multiple_choice, num_fewshot: [0]}]"
BUNDLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a type": (ENTRY.replace("multiple_choice", "generation"), {}, r"task 1 .*icl_task_type=generation is none of"),
    "a file": (ENTRY.replace("mc.jsonl", "none.jsonl"), {}, r"no file .*eval_data/none\.jsonl"),
    "another folder": (ENTRY.replace("mc.jsonl", "../../x"), {}, r"dataset_uri is '../../x'"),
    "no label": (ENTRY.replace("label: mc, ", ""), {}, r"task 1 has no label"),
    "a number of shots": (ENTRY.replace("[0]", "0"), {}, r"task 1: num_fewshot is a number instead of a list"),
    "too many shots": (ENTRY.replace("[0]", "[6]"), {}, r"task 1 .*[Ss]ample larger"),
    "no query": (ENTRY, {"mc": [{"choices": ["a", "b"], "gold": 0}]}, r"mc\.jsonl, line 1 has no query"),
    "a gold of none": (ENTRY, {"mc": [{"query": "q", "choices": ["a", "b"], "gold": 2}]}, r"line 1 .*\[2\] is none"),
    "a number": (ENTRY, {"mc": [{"query": "q", "choices": ["a", 2], "gold": 1}]}, r"line 1 .*2 is not a text"),
    "no records": (ENTRY, {"mc": []}, r"mc\.jsonl has no"),
    "a list": ("- label: mc", {}, "holds a list"),
    "something else": ("name: x", {}, "has no dataset_path|output_type"),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_damaged_bundles_are_refused(name: str, tmp_path: Path):
    text, records, message = BUNDLES[name]
    with pytest.raises(UserError, match=message):
        read_tasks(core(tmp_path, text, **records))


@pytest.mark.parametrize("level", ["none", "nan", "100"])
def test_a_damaged_chance_level_is_named_by_line(level: str, tmp_path: Path):
    file = core(tmp_path)
    (tmp_path / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\nmc,25\nlm,{level}\n")
    with pytest.raises(UserError, match=rf"eval_meta_data\.csv, line 3 .*{level}"):
        read_tasks(file)

"""Prompts and scores of lm-eval's YAML, equal to those of lm-eval; refusals.

The prompts and the table are those of lm-eval 0.4.13 on the files of `folder`: `TaskManager(include_path=FOLDER,
include_defaults=False).load(NAMES)`, then `task.set_fewshot_seed(seed=1234)` and `task.build_all_requests()`; and
`simple_evaluate` with a model whose log-likelihood and greedy hit are those of `log_likelihood` and `greedy`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.formats import Task, read_tasks
from titan_exp.extensions.tasks.scores import TaskScores, score

TRAIN = [{"q": f"Q{i} é?", "choices": [f"a{i}", f"b{i}", "c"], "gold": i % 3, "text": f"one two{i}"} for i in range(7)]
TEST = [
    {"q": "T0", "choices": ["x", "y"], "gold": 1, "text": "alpha beta"},
    {"q": "T1 ", "choices": ["é0", "yy"], "gold": 0, "text": "gamma delta"},
    {"q": "T0", "choices": ["x", "y"], "gold": 1, "text": "alpha beta"},
    {"q": "T3", "choices": ["u", "v", "w"], "gold": 2, "text": "e f g"},
    {"q": "T4", "choices": ["u", "v", "w"], "gold": 2, "text": "h  i"},
]
FILES = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "test.jsonl", "train": "train.jsonl"}},
    "test_split": "test",
}
TASKS: dict[str, dict[str, Any]] = yaml.safe_load(r"""
index:
  output_type: multiple_choice
  description: "About {{q}}:\n\n"
  fewshot_split: train
  num_fewshot: 2
  doc_to_text: "Question: {{q}}\nAnswer:"
  doc_to_choice: choices
  doc_to_target: gold
  metric_list: [{metric: acc_norm}, {metric: acc_mutual_info}]
same:
  output_type: multiple_choice
  fewshot_split: test
  num_fewshot: 3
  doc_to_text: q
  doc_to_choice: "{{choices}}"
  doc_to_target: "{{choices[gold]}}"
  fewshot_delimiter: "\n##\n"
  target_delimiter: ""
schema:
  output_type: multiple_choice
  fewshot_split: train
  num_fewshot: 1
  doc_to_text: "{{gold}}"
  doc_to_choice: "{{[q + ' first', q + ' second', q + ' third']}}"
  doc_to_target: "{{text}}"
word:
  output_type: loglikelihood
  fewshot_split: train
  num_fewshot: 3
  fewshot_config: {sampler: first_n}
  doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
  doc_to_target: " {{text.split(' ')[-1] | regex_replace('e', 'E')}}"
several:
  output_type: multiple_choice
  doc_to_text: "{{q}}"
  doc_to_choice: [k, l, m]
  doc_to_target: "{{[gold, 0]}}"
document:
  output_type: loglikelihood_rolling
  doc_to_text: ""
  doc_to_target: text
""")
PROMPTS = {
    "index": [
        "About T0:\n\nQuestion: Q6 é?\nAnswer: a6\n\nQuestion: Q3 é?\nAnswer: a3\n\nQuestion: T0\nAnswer:",
        "About T1 :\n\nQuestion: Q0 é?\nAnswer: a0\n\nQuestion: Q6 é?\nAnswer: a6\n\nQuestion: T1 \nAnswer:",
        "About T0:\n\nQuestion: Q0 é?\nAnswer: a0\n\nQuestion: Q4 é?\nAnswer: b4\n\nQuestion: T0\nAnswer:",
        "About T3:\n\nQuestion: Q0 é?\nAnswer: a0\n\nQuestion: Q5 é?\nAnswer: c\n\nQuestion: T3\nAnswer:",
        "About T4:\n\nQuestion: Q5 é?\nAnswer: c\n\nQuestion: Q0 é?\nAnswer: a0\n\nQuestion: T4\nAnswer:",
    ],
    "same": [
        "T4w\n##\nT1 é0\n##\nT3w\n##\nT0",
        "T0y\n##\nT0y\n##\nT4w\n##\nT1 ",
        "T4w\n##\nT3w\n##\nT1 é0\n##\nT0",
        "T0y\n##\nT1 é0\n##\nT0y\n##\nT3",
        "T0y\n##\nT3w\n##\nT0y\n##\nT4",
    ],
    "schema": [
        "Q6 é? first one two6\n\nT0 first",
        "Q3 é? first one two3\n\nT1  first",
        *(f"Q0 é? first one two0\n\nT{i} first" for i in (0, 3, 4)),
    ],
    "word": [f"one  two0\n\none  two1\n\none  two2\n\n{text}" for text in ("alpha", "gamma", "alpha", "e f", "h ")],
    "several": ["T0", "T1 ", "T0", "T3", "T4"],
    "document": [""] * 5,
}
"""Contexts of the first choices."""
CONTINUATIONS = {
    "index": [" x", " y"],
    "same": ["x", "y"],
    "schema": [" alpha beta"] * 3,
    "word": [" bEta"],
    "several": [" k", " l", " m"],
    "document": ["alpha beta"],
}
"""Continuations of the first item."""
TABLE = {
    "index": {"acc_per_char": 0.0, "acc_pmi": 0.4},
    "same": {"acc": 0.2, "acc_per_char": 0.2},
    "schema": {"acc": 0.2},
    "word": {"perplexity": 36.59823444367799, "acc": 0.4},
    "several": {"acc": 0.6, "acc_per_char": 0.6},
    "document": {
        "word_perplexity": 272.0703319073793,
        "byte_perplexity": 4.672371070304759,
        "bits_per_byte": 2.224154854703819,
    },
}


def log_likelihood(context: str, continuation: str) -> float:
    return -len(continuation) * ((sum(map(ord, context + continuation)) % 7) + 1) / 3


def greedy(context: str, continuation: str) -> bool:
    return sum(map(ord, context + continuation)) % 2 == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, records in (("train", TRAIN), ("test", TEST)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return tmp_path


def read(folder: Path, name: str = "index", **changes: Any) -> Task:
    values = {"task": name, **FILES, **TASKS[name], **changes}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({key: one for key, one in values.items() if one is not None}))
    (task,) = read_tasks(folder / f"{name}.yaml")
    return task


def scored(task: Task) -> TaskScores:
    """Scores by the functions above."""
    encoded = encode(task, ByteTokenizer(), 512)
    found, hits, neutral = (np.zeros(encoded.windows.shape) for _ in range(3))
    for i, item in enumerate(encoded.items):
        for j, (context, continuation) in enumerate(item.choices):
            found[i, j], hits[i, j] = log_likelihood(context, continuation), greedy(context, continuation)
            neutral[i, j] = log_likelihood(item.neutral or "", continuation)
    return score(encoded, found, hits.astype(bool), neutral)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_and_scores_are_those_of_the_harness(name: str, folder: Path):
    task = read(folder, name)
    assert [item.choices[0][0] for item in task.items] == PROMPTS[name]
    assert [continuation for _, continuation in task.items[0].choices] == CONTINUATIONS[name]
    found = scored(task).metrics
    assert {metric: found[metric].value for metric in TABLE[name]} == pytest.approx(TABLE[name], rel=1e-12)


def test_a_task_has_the_conventions_of_the_harness(folder: Path):
    task = read(folder)
    assert (task.kind, task.convention, task.delimiter, task.primary) == ("choice", "whole", " ", "acc_per_char")
    assert [item.gold for item in task.items] == [(1,), (0,), (1,), (2,), (2,)]
    assert {item.neutral for item in task.items} == {""}
    assert task.chance == pytest.approx((3 / 2 + 2 / 3) / 5)
    assert [item.gold for item in read(folder, "several").items] == [(1, 0), (0,), (1, 0), (2, 0), (2, 0)]
    assert read(folder, "document").delimiter == ""


def test_the_digest_is_of_the_prompts_and_conventions(folder: Path):
    task = read(folder)
    assert task.digest == read(folder, metadata={"version": 2}).digest
    changed: list[dict[str, Any]] = [
        {"num_fewshot": 1},
        {"target_delimiter": "  "},
        {"metric_list": [{"metric": "acc"}]},
    ]
    assert len({task.digest, *(read(folder, **one).digest for one in changed)}) == 4


def test_included_keys_lie_below_the_own_ones(folder: Path):
    expected = read(folder).items
    (folder / "_base.yaml").write_text(yaml.safe_dump({**FILES, **TASKS["index"], "num_fewshot": 1}))
    (folder / "index.yaml").write_text("include: _base.yaml\ntask: index\nnum_fewshot: 2\n")
    assert read_tasks(folder)[0].items == expected
    (folder / "_base.yaml").write_text("include: index.yaml\n")
    with pytest.raises(UserError, match="leads back"):
        read_tasks(folder)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "generation": ({"output_type": "generate_until"}, "output_type=generate_until is not scored"),
    "a list for a text": ({"output_type": [1]}, "unhashable"),
    "endless recursion": ({"doc_to_text": "{% macro a() %}{{a()}}{% endmacro %}{{a()}}"}, r"line 1 .*recursion"),
    "no output type": ({"output_type": None}, "output_type=generate_until"),
    "a key that changes prompts": ({"gen_prefix": "x"}, "gen_prefix could change a prompt"),
    "a data set to download": ({"dataset_path": "allenai/ai2_arc"}, "only local JSONL files are read"),
    "options of the data": ({"dataset_kwargs": {"field": "x"}}, "only local JSONL files are read"),
    "no such file": ({"dataset_kwargs": {"data_files": {"test": "missing.jsonl"}}}, r"no file .*missing\.jsonl"),
    "no such split": ({"test_split": "held_out"}, "has no held_out"),
    "no column": ({"doc_to_text": "{{nothing}}"}, r"test\.jsonl, line 1 .*'nothing' is undefined"),
    "a broken template": ({"doc_to_text": "{{q"}, r"test\.jsonl, line 1"),
    "Python inside": ({"doc_to_text": "{{q.__class__.__mro__}}"}, r"line 1 .*unsafe"),
    "a target that is no choice": ({"doc_to_target": "text"}, r"line 1 .*'alpha beta' is not in list"),
    "an index that is no choice": ({"doc_to_target": "{{gold + 1}}"}, r"line 1 .*\[2\] is none of its 2 choices"),
    "choices that are no list": ({"doc_to_choice": "{{q}}"}, r"line 1 .*instead of a list"),
    "a sampler": ({"fewshot_config": {"sampler": "balanced"}}, "balanced is neither"),
    "samples of its own": ({"fewshot_config": {"samples": []}}, "samples beside"),
    "too few documents": ({"num_fewshot": 8}, "7 documents for num_fewshot: 8"),
    "too few others": ({"fewshot_split": "test", "num_fewshot": 5}, "3 documents for num_fewshot: 5"),
    "its own example": ({"test_split": None, "validation_split": "test", "fewshot_split": "test"}, "its own few-shot"),
    "its own example unsaid": ({"fewshot_split": None}, "its own few-shot"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, folder: Path):
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        read(folder, **changes)


def test_python_functions_are_refused_by_line(folder: Path):
    (folder / "index.yaml").write_text("task: index\nprocess_docs: !function utils.process_docs\n")
    with pytest.raises(UserError, match=r"index\.yaml, line 2.*: !function runs Python"):
        read_tasks(folder / "index.yaml")


def test_damaged_data_is_named_by_line(folder: Path):
    with (folder / "test.jsonl").open("a") as file:
        file.write('{"q": "cut')
    with pytest.raises(UserError, match=r"test\.jsonl, line 6 is damaged"):
        read(folder)


def test_the_remedy_for_own_examples_works(folder: Path):
    changes = {"test_split": None, "validation_split": "test", "fewshot_split": "test"}
    with pytest.raises(UserError, match="write test_split: test and fewshot_split: test"):
        read(folder, **changes)
    found = read(folder, **{**changes, "test_split": "test", "validation_split": None})
    shots = [item.choices[0][0].rpartition("\n\nQuestion: ")[0] for item in found.items]
    assert not [text for text, one in zip(shots, TEST, strict=True) if f"Question: {one['q']}\n" in text]

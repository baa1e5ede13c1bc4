"""Task files: OLMo's rendered requests and CORE bundles; `read_tasks` finds the format of a path."""

import csv
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.foreign_file import count, file_name, read_object, read_text, read_yaml, text
from titan_exp.config.foreign_file import items as listing
from titan_exp.extensions.tasks.harness import HarnessLoader, read_harness_task
from titan_exp.extensions.tasks.items import Item, Task, guessing, placed, read_records


def read_tasks(path: str | Path) -> list[Task]:
    """Tasks of a file or folder, in order.

    A folder has OLMo's rendered requests, at any depth, or lm-eval's YAML files. A YAML file is a task of lm-eval or a
    CORE bundle. Raises UserError that names file and line for what cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        values = read_yaml(path, "a task of lm-eval, or `icl_tasks:` of a CORE bundle", HarnessLoader)
        return list(_core_tasks(path, values)) if "icl_tasks" in values else [read_harness_task(path, values)]
    if folders := sorted(file.parent for file in path.rglob("config.json") if _requests(file.parent).is_file()):
        return [_olmo_task(folder) for folder in folders]
    files = sorted(file for file in path.glob("*.y*ml") if not file.name.startswith("_"))
    if not files:
        reason = "neither config.json with requests.jsonl or requests.jsonl.gz nor a YAML file"
        raise UserError(f"{path} has no tasks: there is {reason}. Give the folder or the YAML file of a task.")
    return [task for file in files for task in read_tasks(file)]


_OLMO_METRICS = {"acc_raw": "acc", "acc_uncond": "acc_pmi"}
_OLMO_METRICS |= {name: name for name in ("acc_per_char", "acc_per_byte", "acc_per_token", "bits_per_byte")}
_OLMO_METRICS |= dict.fromkeys(("logits_per_byte", "bits_per_byte_corr", "exact_match"), "bits_per_byte")
"""Metric by OLMo's primary metric. Exact match needs generation; these tasks have the gold answer, too."""
_UNCONDITIONAL = 1_000_000
"""Offset of the document numbers of requests with the neutral context."""


def _requests(folder: Path) -> Path:
    zipped = folder / "requests.jsonl.gz"
    return zipped if zipped.is_file() else folder / "requests.jsonl"


def _olmo_task(folder: Path) -> Task:
    """Task of a folder of rendered requests, one line for each choice."""
    values, file = read_object(folder / "config.json"), _requests(folder)
    with placed(folder / "config.json"):
        if (named := values["task_config"]["primary_metric"]) not in _OLMO_METRICS:
            raise ValueError(f"its primary metric {named} is none of {listed(_OLMO_METRICS)}")
    documents: dict[int, dict[int, tuple[tuple[str, str], Any]]] = {}
    for place, record in read_records(file):
        with placed(place):
            if record["request_type"] not in ("loglikelihood", "generate_until_and_loglikelihood"):
                raise ValueError(f"the request type {record['request_type']} is not scored by log-likelihood")
            number, choice = count(record["doc_id"], f"{place}: doc_id"), count(record["idx"], f"{place}: idx")
            if choice in documents.setdefault(number, {}):
                raise ValueError(f"choice {choice} of document {number} is there twice")
            texts = (record["request"]["context"], record["request"]["continuation"])
            documents[number][choice] = texts, record["label"]
    scored = [number for number in documents if number < _UNCONDITIONAL]
    expected = values.get("num_instances") or len(scored)
    if not scored or expected != len(scored):
        raise UserError(f"{file} is damaged: it has {len(scored)} documents of {expected}. Copy it again.")
    several = any(len(documents[number]) > 1 for number in scored)
    items = []
    for number in scored:
        with placed(f"{file}, document {number}"):
            choices = [documents[number][choice] for choice in range(len(documents[number]))]
            if several and len(choices) == 1:
                raise ValueError("it has a single choice, and others have several")
            plain = documents.get(number + _UNCONDITIONAL)
            neutral = plain[min(plain)][0][0] if plain else None
            gold = choices[0][1] if several else 0
            items.append(Item(tuple(texts for texts, _ in choices), (gold,), neutral, id=str(number)))
    spaced = all(continuation.startswith(" ") for item in items for _, continuation in item.choices)
    name, delimiter = f"{folder.resolve().parent.name}_{folder.resolve().name}", " " if spaced else ""
    if several:
        chance, primary = guessing(items), _OLMO_METRICS[named]
        return Task(name, "choice", tuple(items), chance, primary, "apart", delimiter, str(folder))
    return Task(name, "continuation", tuple(items), 0.0, "bits_per_byte", "apart", delimiter, str(folder))


_CORE_KINDS = ("multiple_choice", "schema", "language_modeling")
_CORE_SHUFFLE, _CORE_SHOTS = 1337, 1234
"""Seeds of nanochat: the order of a file, and the shots of an item before its index is added."""
_Choices = Sequence[tuple[str, str]]


def _core_tasks(path: Path, values: Mapping[Any, Any]) -> Iterator[Task]:
    """Tasks of a CORE bundle: a YAML list, JSONL files in `eval_data`, and CSV files of chance levels. Each file is
    shuffled as nanochat does."""
    baselines = _core_baselines(path.parent)
    for position, entry in enumerate(listing(values["icl_tasks"], f"{path}: icl_tasks"), 1):
        name = f"{path}, task {position}"
        with placed(name):
            label, kind = text(entry["label"], f"{name}: label"), entry["icl_task_type"]
            if kind not in _CORE_KINDS:
                raise ValueError(f"icl_task_type={kind} is none of {listed(_CORE_KINDS)}")
            file = path.parent / "eval_data" / file_name(entry["dataset_uri"], f"{name}: dataset_uri")
            delimiter = text(entry.get("continuation_delimiter", " "), f"{name}: continuation_delimiter")
            shots = listing(entry.get("num_fewshot", [0]), f"{name}: num_fewshot")
        records = []
        for place, record in read_records(file):
            with placed(place):
                records.append((place.rpartition(" ")[2], *_core_record(record, kind)))
        random.Random(_CORE_SHUFFLE).shuffle(records)
        for shot in shots:
            with placed(name):
                if not records:
                    raise ValueError(f"{file} has no items")
                items = tuple(_core_item(records, index, shot, delimiter) for index in range(len(records)))
                own = label if len(shots) == 1 else f"{label}_{shot}shot"
                if kind == "language_modeling":
                    chance = baselines.get(label, 0.0)
                    yield Task(own, "continuation", items, chance, "acc", "common", delimiter, str(file))
                else:
                    chance = baselines.get(label, guessing(items))
                    yield Task(own, "choice", items, chance, "acc_per_token", "common", delimiter, str(file))


def _core_baselines(folder: Path) -> dict[str, float]:
    """Chance level by task, of CSV files that have percentages."""
    found = {}
    for file in sorted(folder.glob("*.csv")):
        try:
            for number, row in enumerate(csv.DictReader(read_text(file).splitlines()), 2):
                with placed(f"{file}, line {number}"):
                    if (percent := row.get("Random baseline")) is not None:
                        found[row["Eval Task"]] = float(percent) / 100
                        if not 0 <= float(percent) < 100:
                            raise ValueError(f"the random baseline {percent} is not a percentage below 100")
        except csv.Error as error:
            raise UserError(f"{file} is damaged: {error}. Copy it again.") from error
    return found


def _core_record(record: Mapping[str, Any], kind: str) -> tuple[_Choices, int]:
    """Context and answer of each choice, and the gold choice."""
    if kind == "language_modeling":
        return [(record["context"].strip(), record["continuation"])], 0
    if kind == "schema":
        found = [(context, record["continuation"]) for context in record["context_options"]]
    else:
        found = [(record["query"], choice) for choice in record["choices"]]
    return Item(tuple(found), (record["gold"],)).choices, record["gold"]


def _core_item(records: Sequence[tuple[str, _Choices, int]], index: int, shots: int, delimiter: str) -> Item:
    others = [other for other in range(len(records)) if other != index]
    drawn = [records[other] for other in random.Random(_CORE_SHOTS + index).sample(others, shots)]
    examples = [(*choices[gold], "\n\n") for _, choices, gold in drawn]
    before = "".join(context + delimiter + answer + end for context, answer, end in examples)
    line, choices, gold = records[index]
    return Item(tuple((before + context, delimiter + answer) for context, answer in choices), (gold,), id=line)

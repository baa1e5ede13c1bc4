"""Tasks as data, items with rendered contexts and continuations, and the files they are read from.

`read_tasks` finds the format of a path: OLMo's rendered requests, CORE bundles, or YAML of the lm-evaluation-harness
with JSONL, whose prompts are as version 0.4.13 renders them in one process.
"""

import ast
import csv
import hashlib
import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.foreign_file import (
    StrictLoader,
    count,
    file_name,
    parse_object,
    read_lines,
    read_object,
    read_text,
    read_yaml,
    text,
)
from titan_exp.config.foreign_file import items as listing

Kind = Literal["choice", "continuation", "rolling"]


@dataclass(frozen=True)
class Item:
    """Item of a task, rendered: few-shot examples are part of its contexts. Raises ValueError for other types."""

    choices: tuple[tuple[str, str], ...]  # context and continuation of each; a document has an empty context
    gold: tuple[int, ...]  # indices of the correct choices, at least one
    neutral: str | None = None  # context of the unconditional log-likelihood, for PMI. None if the task has none.
    id: str = ""  # name of the item in its file, or its number. Runs are paired by it.

    def __post_init__(self) -> None:
        if odd := [text for pair in self.choices for text in pair if not isinstance(text, str)]:
            raise ValueError(f"{odd[0]!r} is not a text")
        if not self.gold or not all(type(one) is int and 0 <= one < len(self.choices) for one in self.gold):
            raise ValueError(f"the gold choice {list(self.gold)} is none of its {len(self.choices)} choices")


@dataclass(frozen=True)
class Task:
    """Task: items, and the conventions by which they become tokens and scores."""

    name: str  # name, unique in its file
    kind: Kind  # multiple choice; one gold continuation, scored by log-likelihood and greedy hit; or whole documents
    items: tuple[Item, ...]  # items in the order of the file
    chance: float  # accuracy of guessing, 0 to 1
    primary: str  # metric by which the task is usually reported, a name of `scores.score`
    convention: Literal["whole", "apart", "common"]
    """Tokenization at the border of context and continuation. `whole`: context + continuation and context, as lm-eval;
    `apart`: each by itself, as OLMo; `common`: the tokens that all choices share are context, as CORE."""
    delimiter: str  # text that every continuation starts with, such as a space. The lengths of answers leave it out.
    file: str  # file or folder that the task was read from

    @cached_property
    def digest(self) -> str:
        """Version: sha256 of the rendered items and the conventions, in hex."""
        conventions = (self.kind, self.chance, self.primary, self.convention, self.delimiter)
        return hashlib.sha256(json.dumps([conventions, *map(asdict, self.items)]).encode()).hexdigest()


def guessing(items: Sequence[Item]) -> float:
    """Accuracy of guessing among the choices, a mean over items."""
    return sum(len(item.gold) / len(item.choices) for item in items) / len(items)


@contextmanager
def placed(place: object) -> Iterator[None]:
    """Raise a UserError that names the place for a missing key, or a value of another type."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{place} has no {error.args[0]}. Add it.") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"{place} cannot be used: {error}. Correct or remove it.") from error


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a JSONL file, which may be gzipped, each after its place. Raises UserError."""
    try:
        for number, line in enumerate(read_lines(path), 1):
            if line.strip():
                yield (place := f"{path}, line {number}"), parse_object(line, place)
    except FileNotFoundError as error:
        raise UserError(f"There is no file {path}. Put it there, or correct its name.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}. Copy it again.") from error


def read_tasks(path: str | Path) -> list[Task]:
    """Tasks of a file or folder, in order. A folder has OLMo's rendered requests, at any depth, or lm-eval's YAML
    files. A YAML file is a task of lm-eval or a CORE bundle. Raises UserError that names file and line for what cannot
    be read."""
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
_UNCONDITIONAL = 1_000_000  # offset of the document numbers of requests with the neutral context


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


_SEED = 1234  # seed of the few-shot examples; one generator serves all items in order
_KINDS: dict[str, tuple[Kind, str]] = {
    "multiple_choice": ("choice", "acc"),
    "loglikelihood": ("continuation", "acc"),
    "loglikelihood_rolling": ("rolling", "bits_per_byte"),
}
"""Kind and usual metric by output type."""
HARNESS_METRICS = {"acc": "acc", "acc_norm": "acc_per_char", "acc_bytes": "acc_per_byte", "acc_mutual_info": "acc_pmi"}
HARNESS_METRICS |= {name: name for name in ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")}
"""Our metric by that of lm-eval."""
_READ = ("task", "output_type", "dataset_path", "dataset_kwargs", "test_split", "validation_split", "training_split",
         "fewshot_split", "fewshot_config", "num_fewshot", "description", "doc_to_text", "doc_to_choice",
         "doc_to_target", "target_delimiter", "fewshot_delimiter", "metric_list")  # fmt: skip
_WITHOUT_EFFECT = ("task_alias", "tag", "group", "dataset_name", "metadata", "generation_kwargs", "repeats",
                   "unsafe_code", "should_decontaminate", "doc_to_decontamination_query")  # fmt: skip


class HarnessLoader(StrictLoader):
    """YAML loader that refuses `!function` by name."""


def _refuse_function(_: Any, node: yaml.Node) -> None:
    problem = "!function runs Python, which a task file may not. Write the template in Jinja"
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


HarnessLoader.add_constructor("!function", _refuse_function)


def read_harness_task(path: Path, values: Mapping[str, Any]) -> Task:
    """Task of a YAML file with these values. Raises UserError for what could change a prompt and is not supported."""
    config = {"target_delimiter": " ", "fewshot_delimiter": "\n\n", **_with_includes(path, values, (path.resolve(),))}
    with placed(path):
        if (output := config.get("output_type", "generate_until")) not in _KINDS:
            raise ValueError(f"output_type={output} is not scored by log-likelihood, as {listed(_KINDS, 'and')} are")
        if unknown := sorted(map(str, config.keys() - {*_READ, *_WITHOUT_EFFECT})):
            raise ValueError(f"{listed(unknown, 'and')} could change a prompt. A task may have {listed(_READ, 'and')}")
        name, (kind, usual) = text(config["task"], f"{path}: task"), _KINDS[output]
        metrics = [one["metric"] for one in config.get("metric_list") or ()]
        items = tuple(_Rendering(path, config, kind, "" if "acc_mutual_info" in metrics else None).items())
        chance, delimiter = (guessing(items), config["target_delimiter"]) if kind == "choice" else (0.0, "")
        primary = next((HARNESS_METRICS[one] for one in metrics if one in HARNESS_METRICS), usual)
        return Task(name, kind, items, chance, primary, "whole", delimiter, str(path))


def _with_includes(path: Path, values: Mapping[str, Any], seen: tuple[Path, ...]) -> dict[str, Any]:
    names, found = values.get("include", []), {}
    for name in names if isinstance(names, list) else [names]:
        file = (path.parent / text(name, f"{path}: include")).resolve()
        if file in seen:
            raise UserError(f"{path}: include: {name} leads back to the file itself. Remove it.")
        found |= _with_includes(file, read_yaml(file, "keys of a task", HarnessLoader), (*seen, file))
    return found | {key: value for key, value in values.items() if key != "include"}


class _Rendering:
    """Rendering of a task's documents; few-shot examples are drawn in the order of the items."""

    def __init__(self, path: Path, config: Mapping[str, Any], kind: Kind, neutral: str | None) -> None:
        self.path, self.config, self.kind, self.neutral = path, config, kind, neutral
        self.environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        self.environment.filters["regex_replace"] = lambda text, old, new, count=0: re.sub(old, new, text, count=count)
        own = config.get("fewshot_config") or {}
        if unknown := sorted(own.keys() - {"split", "sampler"}):
            raise ValueError(f"fewshot_config has {listed(unknown, 'and')} beside split and sampler")
        if (sampler := own.get("sampler", "default")) not in ("default", "first_n"):
            raise ValueError(f"the sampler {sampler} is neither default nor first_n")
        self.shots, self.first_n = count(config.get("num_fewshot") or 0, f"{path}: num_fewshot"), sampler == "first_n"
        self.random, self.pool, self.leave_out = random.Random(_SEED), [], False
        scored = config.get("test_split") or config["validation_split"]
        self.documents = self._read(scored)
        self.columns = self.documents[0][1].keys()
        if self.shots:
            named = own.get("split", config.get("fewshot_split"))
            split = named or config.get("training_split") or config.get("validation_split") or scored
            self.leave_out = named == config.get("test_split")
            if split == scored and not self.leave_out:
                remedy = f"write test_split: {split} and fewshot_split: {split}"
                raise UserError(f"{path}: an item could be among its own few-shot examples; {remedy}.")
            self.pool = [document for _, document in self._read(split)]

    def _read(self, split: str) -> list[tuple[str, dict[str, Any]]]:
        """Documents of a split, each after its place; all have the same columns."""
        options = self.config.get("dataset_kwargs") or {}
        if self.config["dataset_path"] != "json" or options.keys() - {"data_files", "trust_remote_code"}:
            remedy = f"dataset_path: json and dataset_kwargs: {{data_files: {{{split}: FILE.jsonl}}}}"
            raise UserError(f"{self.path}: only local JSONL files are read. Save the data as such, and write {remedy}.")
        files = options["data_files"][split]
        paths = [self.path.parent / file for file in ([files] if isinstance(files, str) else files)]
        found = [one for path in paths for one in read_records(path)]
        columns = dict.fromkeys(key for _, document in found for key in document)
        if not columns:
            raise ValueError(f"the split {split} has no documents")
        return [(place, {key: document.get(key) for key in columns}) for place, document in found]

    def items(self) -> Iterator[Item]:
        """Rendered items."""
        for number, (place, document) in enumerate(self.documents):
            with placed(place):
                yield self._item(document, str(number))

    def _item(self, document: dict[str, Any], number: str) -> Item:
        target = self._value("doc_to_target", document)
        if self.kind == "rolling":
            return Item((("", target),), (0,), id=number)
        description = self.config.get("description") or ""
        before = document[description] if description in document else self._render(description, document)
        before += "".join(self._example(one) for one in self._drawn(document))
        question = self._value("doc_to_text", document)
        if self.kind == "continuation":
            return Item(((before + question, target),), (0,), id=number)
        answers, delimiter = self._value("doc_to_choice", document), self.config["target_delimiter"]
        if not isinstance(answers, list):
            raise ValueError(f"doc_to_choice gives {answers!r} instead of a list")
        if type(question) is int:  # the choices are questions, and the target is their common answer
            return Item(tuple((before + one, f"{delimiter}{target}") for one in answers), (question,), id=number)
        gold = answers.index(target) if isinstance(target, str) else target
        choices = tuple((before + question, delimiter + answer) for answer in answers)
        return Item(choices, tuple(dict.fromkeys(gold if isinstance(gold, list) else [gold])), self.neutral, id=number)

    def _drawn(self, document: dict[str, Any]) -> Sequence[dict[str, Any]]:
        others = [one for one in self.pool if one != document] if self.leave_out else self.pool
        if self.shots > len(others):
            raise ValueError(f"there are {len(others)} documents for num_fewshot: {self.shots}")
        if self.first_n or not self.shots:
            return others[: self.shots]
        if not self.leave_out:
            return self.random.sample(others, self.shots)
        # One more is drawn, and the item taken away. If copies of it were drawn, all are drawn again.
        drawn = [one for one in self.random.sample(self.pool, self.shots + 1) if one != document][: self.shots]
        return drawn if len(drawn) == self.shots else self.random.sample(others, self.shots)

    def _example(self, document: dict[str, Any]) -> str:
        """Question and answer of a few-shot example."""
        question, answer = self._value("doc_to_text", document), self._value("doc_to_target", document)
        choices = self._value("doc_to_choice", document)
        if choices and type(question) is int:
            question = choices[question]
        if answer == "":
            return question
        if choices and type(answer) is int:
            answer = choices[answer]
        answer = answer[0] if isinstance(answer, list) else answer
        return question + self.config["target_delimiter"] + answer + self.config["fewshot_delimiter"]

    def _value(self, key: str, document: dict[str, Any]) -> Any:
        """Value of `doc_to_...`: a column, or a template, whose text may be a number or a list."""
        template = self.config.get(key)
        if not isinstance(template, str):
            return list(template.values()) if isinstance(template, dict) else template
        if template in self.columns:
            return document[template]
        found = self._render(template, document)
        is_list = key == "doc_to_choice" or (key == "doc_to_target" and re.fullmatch(r"\[.*\]", found, re.DOTALL))
        if is_list or (found.isdigit() and self.config.get("doc_to_choice") is not None):
            with suppress(SyntaxError, ValueError):
                return ast.literal_eval(found)
        return found

    def _render(self, template: str, document: dict[str, Any]) -> str:
        try:
            return self.environment.from_string(template).render(**document)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

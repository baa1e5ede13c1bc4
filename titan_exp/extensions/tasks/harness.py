"""Tasks of the lm-evaluation-harness: YAML with local JSONL; prompts as version 0.4.13 renders them in one process."""

import ast
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.foreign_file import StrictLoader, count, read_yaml, text
from titan_exp.extensions.tasks.items import Item, Kind, Task, guessing, placed, read_records

_SEED = 1234
"""Seed of the few-shot examples; one generator serves all items in order."""
_KINDS: dict[str, tuple[Kind, str]] = {
    "multiple_choice": ("choice", "acc"),
    "loglikelihood": ("continuation", "acc"),
    "loglikelihood_rolling": ("rolling", "bits_per_byte"),
}
"""Kind and usual metric by output type."""
_METRICS = {"acc": "acc", "acc_norm": "acc_per_char", "acc_bytes": "acc_per_byte", "acc_mutual_info": "acc_pmi"}
_METRICS |= {name: name for name in ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")}
_READ = (
    *("task", "output_type", "dataset_path", "dataset_kwargs", "test_split", "validation_split", "training_split"),
    *("fewshot_split", "fewshot_config", "num_fewshot", "description", "doc_to_text", "doc_to_choice"),
    *("doc_to_target", "target_delimiter", "fewshot_delimiter", "metric_list"),
)
_WITHOUT_EFFECT = (
    *("task_alias", "tag", "group", "dataset_name", "metadata", "generation_kwargs", "repeats", "unsafe_code"),
    *("should_decontaminate", "doc_to_decontamination_query"),
)


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
        primary = next((_METRICS[one] for one in metrics if one in _METRICS), usual)
        return Task(name, kind, items, chance, primary, "whole", delimiter, str(path))


def _with_includes(path: Path, values: Mapping[str, Any], seen: tuple[Path, ...]) -> dict[str, Any]:
    """Values over those of included files."""
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
        """Few-shot examples of a document."""
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

"""Small tasks, made here, in the formats that are read."""

import json
from pathlib import Path

import yaml


def made_task(folder: Path, items: int = 3) -> None:
    """Rendered requests of OLMo: sums with two answers each."""
    lines = []
    for number in range(items):
        for index, answer in enumerate((f" {2 * number}", f" {2 * number + 5}")):
            request = {"context": f"{number} + {number} =", "continuation": answer}
            about = {"request_type": "loglikelihood", "doc_id": number, "native_id": number, "doc": {}}
            lines.append(json.dumps({**about, "idx": index, "label": 0, "request": request}))
    folder.mkdir(parents=True)
    config = {"task_name": folder.name, "task_config": {"primary_metric": "acc_per_char"}, "num_instances": items}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "requests.jsonl").write_text("\n".join(lines))


def made_bundle(folder: Path) -> None:
    """CORE bundle of one task without shots."""
    (folder / "eval_data").mkdir(parents=True)
    record = {"query": "1 + 1 =", "choices": ["2", "7"], "gold": 0}
    (folder / "eval_data" / "sums.jsonl").write_text(json.dumps(record))
    task = {"label": "sums", "dataset_uri": "sums.jsonl", "icl_task_type": "multiple_choice", "num_fewshot": [0]}
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": [task]}))

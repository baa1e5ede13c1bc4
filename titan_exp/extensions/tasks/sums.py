"""Write the files of the study `right_sums` to the folder `sums`: text, sums that are right or wrong, and a task.

The text is source code of Python's standard library. Sums are one line each, and twenty make a document. Wrong sums
have the results of the right ones in another order, so both files have the same bytes.
"""

import json
import random
import sysconfig
from pathlib import Path

MODULES = ("argparse", "ast", "configparser", "datetime", "decimal", "difflib", "doctest", "enum", "inspect",
           "locale", "mailbox", "optparse", "pdb", "pickletools", "pydoc", "statistics", "tarfile",
           "threading", "typing")  # fmt: skip
DOCUMENTS, LINES = 2000, 20


def main() -> None:
    """Write the files."""
    draw, folder = random.Random(0), Path("sums")
    task = folder / "task"
    task.mkdir(parents=True, exist_ok=True)
    pairs = [(draw.randrange(5), draw.randrange(5)) for _ in range(DOCUMENTS * LINES)]
    results = [a + b for a, b in pairs]
    for name in ("right", "wrong"):
        lines = [f"{a} + {b} = {result}" for (a, b), result in zip(pairs, results, strict=True)]
        documents = ("\n".join(lines[first : first + LINES]) for first in range(0, len(lines), LINES))
        (folder / f"{name}.txt").write_text("\n\n".join(documents))
        draw.shuffle(results)
    for name, modules in (("text", MODULES), ("held_out", ["subprocess"])):
        files = (Path(sysconfig.get_paths()["stdlib"], f"{module}.py") for module in modules)
        code = "\n\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        (folder / f"{name}.txt").write_text(code, encoding="utf-8")
    requests = []
    for number, (a, b) in enumerate((a, b) for a in range(5) for b in range(5)):
        others = draw.sample([sum_ for sum_ in range(9) if sum_ != a + b], 3)
        for place, answer in enumerate([a + b, *others]):
            about = {"request_type": "loglikelihood", "doc_id": number, "idx": place, "label": 0}
            request = {"context": f"{a} + {b} =", "continuation": f" {answer}\n"}
            requests.append(json.dumps(about | {"request": request}))
    (task / "requests.jsonl").write_text("\n".join(requests))
    config = {"task_name": "sums", "task_config": {"primary_metric": "acc_raw"}, "num_instances": 25}
    (task / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()

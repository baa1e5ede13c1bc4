"""Table of what each class of transformers can do here: docs/huggingface_models.md.

python -m tests.extensions.transformers.class_table            # every class, in half an hour on two cores
python -m tests.extensions.transformers.class_table olmo2 lfm2 # these rows, beside the others of the page

Each class runs at a tiny size in processes of its own: rules and planner in one, and then, in fp64, two steps on one
rank and in each axis, which the check before a launch compares (`titan_exp/doctor/layout`).
"""

import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "huggingface_models.md"
ROWS = Path(__file__).parent / "golden" / "classes.json"
"""Rows of the page by class, with the version of transformers."""
COLUMNS = ("trains", "tp", "cp", "pp", "ep", "documents", "plan")
"""Columns of the table, each of them `yes` or the number of a reason."""
AXES = {
    "trains": "",
    "tp": "parallelism.tp=2",
    "cp": "parallelism.cp=2",
    "pp": "parallelism.pp=2 training.micro_batch_size=1",
    "ep": "parallelism.dp_shard=2 parallelism.ep=2",
    "documents": "data.document_mask=true data.reset_positions=true",
}
"""Overrides by column."""
WHOLE_TOKENS = "parallelism.sequence_parallel=false"
"""Override with which a class that mixes tokens outside attention is tensor-parallel."""
SECONDS = 120.0
"""Time of a class, in either process."""

ENCODERS = (
    *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert"),
    *("data2vec-text", "electra", "ernie", "git", "marian", "mbart", "megatron-bert", "moshi", "musicgen"),
    *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "reformer", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl"),
    *("xlnet", "xmod"),
)
"""Classes that are encoders, or read a second sequence, images or sound."""

Rows = dict[str, dict[str, str]]
"""Cells by class and column."""

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "swa_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_key_heads", "kda_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("num_experts_per_token", "num_expert_group", "moe_top_k"), 2),
    **dict.fromkeys(("num_selected_experts", "moe_k", "moe_num_active_primary_experts", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "num_swa_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("attention_head_dim", "global_head_dim", "swa_head_dim", "index_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "qk_dim_factor"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("o_lora_rank", "hidden_size_per_layer_input", "time_step_rank", "mamba_dt_rank"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("feed_forward_hidden_size", "dense_intermediate_size", "attention_hidden_size"), 48),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 320),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_multiple_of", "index_n_heads", "index_topk"), 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "local_window"), 10),
}
"""Largest value of a size in a tiny class, by its key in `config.json`."""
LAYERS = 4
"""Layers of a tiny class, unless it takes more to have each of its kinds."""
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 2, "num_experts_per_token": 2, "linear_num_heads": 4, "linear_head_dim": 8},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 32},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
"""Further values by class: its default has one kind of layers, or lists those that the tiny one has not."""


def classes() -> list[str]:
    """Types of the decoders among the causal language models of the installed transformers, without those that hold
    one beside a model of images or sound."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    known = {kind: name for name, kind in CONFIG_MAPPING.items()}
    names = {known[kind] for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind in known and not kind.sub_configs}
    return sorted(names - {*ENCODERS})


def tiny(name: str) -> dict[str, Any]:
    """`config.json` of a tiny class: its defaults with small sizes, and no dropout."""
    from transformers import CONFIG_MAPPING

    values = json.loads(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str))
    return {**_smaller(values), "model_type": name, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
            **OWN.get(name, {})}  # fmt: skip


def _smaller(values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in values.items():
        if isinstance(value, dict):
            found[key] = _smaller(value)
        elif type(value) is int and key in SIZES:
            found[key] = min(value, SIZES[key])
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            found[key] = 0.0
        else:
            found[key] = value
    heads, shared = "num_attention_heads", "num_key_value_heads"
    if shared in values and values[shared] == values.get(heads):
        found[shared] = found[heads]
    return found


def layers_of(values: Mapping[str, Any]) -> int:
    """Fewest first layers, an even number for two stages, that have all kinds in lists by layer."""
    lists = [value for value in values.values() if isinstance(value, list) and value and isinstance(value[0], str)]
    last = max((kinds.index(kind) for kinds in lists for kind in kinds), default=0)
    return max(LAYERS, last + 1 + (last + 1) % 2)


def words(folder: str, more: str) -> list[str]:
    """Command line of a tiny run."""
    return [
        "model=huggingface",
        f"model.repository={folder}",
        f"model.layers={layers_of(json.loads(Path(folder, 'config.json').read_text()))}",
        "cluster.device=cpu",
        "training.steps=2",
        "training.seq_len=24",
        "training.global_batch_size=8",
        "evaluation.every=0",
        "checkpoint=none",
        *more.split(),
    ]


def experiment_of(folder: str, more: str) -> Any:
    """The run of a column with a resolved layout.

    Raises:
        UserError: it is refused.
    """
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.layout.resolved_layout import resolve_layout
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.rules import check

    return check(resolve_layout(to_experiment(compose(words(folder, more))), 1))


def refused_or_planned(folder: str) -> dict[str, str]:
    """Cells that need no training: refusals by column, and whether the planner predicts a step."""
    found = dict[str, str]()
    for column, more in AXES.items():
        found[column] = refusal(folder, more)
        if column == "tp" and found[column]:
            found[column] = refusal(folder, f"{more} {WHOLE_TOKENS}") or f"yes, with {WHOLE_TOKENS}"
        if column == "trains" and found[column]:
            return dict.fromkeys(COLUMNS, found[column])
    from titan_exp.plan.predict import predict

    try:
        predict(experiment_of(folder, ""), None)
        found["plan"] = "yes"
    except Exception as error:
        found["plan"] = first_line(error)
    return found


def refusal(folder: str, more: str) -> str:
    """First reason why a run is refused; empty if it is not."""
    try:
        experiment_of(folder, more)
    except Exception as error:
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """Reason of the first violation of an error; else its first line."""
    violations = getattr(error, "violations", ())
    text = str(violations[0].reason) if violations else f"{type(error).__name__}: {error}"
    return re.sub(r"/tmp/\S+/", "", " ".join(text.split()))[:300]


def compared(folder: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Cells of columns with their overrides: `yes` if two steps in fp64 are those of one rank."""
    from titan_exp.doctor.layout.cases import Axis, Case, _changed
    from titan_exp.doctor.layout.compare import _what, first_difference, probe
    from titan_exp.doctor.layout.ranks import call, record, sets
    from titan_exp.doctor.layout.shrink import shrink

    small = shrink(experiment_of(folder, ""))
    if isinstance(small, str):
        return dict.fromkeys(columns, small)
    cases = [Case((), _changed(small, {}))]
    for column, more in columns.items():
        changes: dict[str, Any] = {}
        for word in more.split():
            key, _, value = word.partition("=")
            changes[key] = {"true": True, "false": False}.get(value) if value in ("true", "false") else int(value)
        if column not in ("trains", "documents"):
            cases.append(Case((Axis(column, changes, ""),), _changed(small, changes)))
    deadline = time.monotonic() + SECONDS
    results = {case.name: (case, found) for case, found in record(sets(cases), deadline)}
    one = results["one rank"][1]
    if isinstance(one, str):
        return dict.fromkeys(columns, one)
    cells = {"trains": "yes"}
    for name, (case, found) in results.items():
        if name != "one rank":
            difference = None if isinstance(found, str) else first_difference(case, found, one)
            differs = "" if difference is None else f"differs from one rank: {_what(difference)}"
            cells[name] = found if isinstance(found, str) else differs or "yes"
    if "documents" in columns:
        run = _changed(small, {"data.document_mask": True, "data.reset_positions": True})
        probed = call(probe, run, deadline)
        leaks = not isinstance(probed, str) and probed.documents
        cells["documents"] = probed if isinstance(probed, str) else "documents see each other" if leaks else "yes"
    return cells


def in_child(job: Callable[..., dict[str, str]], *args: Any) -> dict[str, str]:
    """What a job returns in a process of its own."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(send, job, args))
    child.start()
    send.close()
    try:
        if receive.poll(SECONDS):
            return receive.recv()
        return dict.fromkeys(COLUMNS, f"it took more than {SECONDS:.0f} seconds")
    except EOFError:
        return dict.fromkeys(COLUMNS, "its process died")
    finally:
        child.kill()
        child.join()


def _answer(send: Any, job: Callable[..., dict[str, str]], args: Sequence[Any]) -> None:
    try:
        found = job(*args)
    except Exception as error:
        found = dict.fromkeys(COLUMNS, first_line(error))
    send.send(found)


def rows(names: Iterable[str], save: Callable[[Rows], None] = lambda _: None) -> Rows:
    """Cells of classes by column; `save` gets those that are complete."""
    import torch

    import titan_exp.plan.predict
    import titan_exp.trainer.train_state  # noqa: F401  # each child would import it

    torch.set_num_threads(1)
    found, asked = dict[str, dict[str, str]](), dict[str, tuple[str, dict[str, str]]]()
    with tempfile.TemporaryDirectory() as top:
        for name in names:
            folder = Path(top, name)
            folder.mkdir()
            try:
                folder.joinpath("config.json").write_text(json.dumps(tiny(name)))
            except Exception as error:
                found[name] = dict.fromkeys(COLUMNS, first_line(error))
                continue
            began = time.monotonic()
            found[name] = in_child(refused_or_planned, str(folder))
            asked[name] = str(folder), columns_of(found[name])
            print(f"{name}: {time.monotonic() - began:.0f} s, {found[name]}", file=sys.stderr, flush=True)
            if not asked[name][1]:
                save({name: found[name]})
        trained = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--double"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert trained.stdin is not None
        assert trained.stdout is not None
        trained.stdin.write(json.dumps({name: given for name, given in asked.items() if given[1]}))
        trained.stdin.close()
        for line in trained.stdout:
            name, cells = json.loads(line)
            given = asked[name][1]
            for column, cell in cells.items():
                if column in given:
                    whole = WHOLE_TOKENS in given[column] and cell == "yes"
                    found[name][column] = f"yes, with {WHOLE_TOKENS}" if whole else cell
            save({name: found[name]})
        trained.wait()
    return found


def columns_of(cells: Mapping[str, str]) -> dict[str, str]:
    """Columns that are not refused, with their overrides."""
    if cells.get("trains"):
        return {}
    whole = {"tp": f"{AXES['tp']} {WHOLE_TOKENS}"} if cells["tp"].startswith("yes") else {}
    return {column: more for column, more in {**AXES, **whole}.items() if not cells[column] or column in whole}


def answer_in_double() -> None:
    """Compare the classes given on the standard input, one line of JSON each."""
    from titan_exp.doctor.layout import in_double

    in_double()
    import titan_exp.doctor.layout.compare
    import titan_exp.trainer.train_state  # noqa: F401  # each child would import it

    for name, (folder, columns) in json.loads(sys.stdin.read()).items():
        print(json.dumps([name, in_child(compared, folder, columns)]), flush=True)


HEAD = """# Classes of transformers

What each decoder of transformers {version} can do as `model=huggingface`, found by running it. Each class ran at a
tiny size: two steps in fp64 on one rank, and in each layout on two ranks, which must agree to rounding. See
[Hugging Face models](../titan_exp/extensions/transformers/guides/huggingface.md) for how to train one.

- `yes`: it does. `alone` under tp: with `parallelism.sequence_parallel=false`.
- `no`: your run is refused before it starts, or the check before a launch refuses it. The reason is below.
- `-`: the class has no experts, or it does not train at all.

Documents: `data.document_mask=true`. Plan: the planner predicts memory and time.

{yes} of these {all} classes train. The check before a launch judges a class that is not here when you type it.

"""


def page(rows: Mapping[str, Mapping[str, str]], version: str) -> str:
    """Text of docs/huggingface_models.md."""
    lines = [f"| class | {' | '.join(COLUMNS)} |", f"|---{'|:--' * len(COLUMNS)}|"]
    lines += [f"| {name} | {' | '.join(map(mark, cells_of(row)))} |" for name, row in sorted(rows.items())]
    lines += ["", "## Reasons", "", "| class | column | reason |", "|---|---|---|"]
    for name, row in sorted(rows.items()):
        of_reason: dict[str, list[str]] = {}
        for column, cell in zip(COLUMNS, cells_of(row), strict=True):
            if mark(cell) == "no":
                of_reason.setdefault(cell, []).append(column)
        lines += [f"| {name} | {', '.join(columns)} | {escaped(reason)} |" for reason, columns in of_reason.items()]
    trained = sum(row["trains"] == "yes" for row in rows.values())
    return HEAD.format(version=version, yes=trained, all=len(rows)) + "\n".join(lines) + "\n"


def cells_of(row: Mapping[str, str]) -> list[str]:
    """Cells of a class in the order of the columns; `-` beside one that does not train."""
    return [row[column] if column == "trains" or row["trains"] == "yes" else "-" for column in COLUMNS]


def mark(cell: str) -> str:
    """Mark in the table."""
    if cell in ("yes", "-"):
        return cell
    return "alone" if cell.startswith("yes") else "-" if cell.endswith(" has no experts") else "no"


def escaped(reason: str) -> str:
    """Reason as a cell of a table."""
    return reason.replace("|", "\\|").replace("<", "\\<").replace("_", "\\_").replace("*", "\\*")


def main(names: Sequence[str]) -> None:
    """Run classes and write their rows."""
    from transformers import __version__

    def save(made: Rows) -> None:
        known = json.loads(ROWS.read_text()) if ROWS.exists() else {}
        kept = known.get("rows", {}) if known.get("transformers") == __version__ else {}
        kept = {name: row for name, row in sorted({**kept, **made}.items()) if name in decoders}
        ROWS.write_text(json.dumps({"transformers": __version__, "rows": kept}, indent=1) + "\n")
        PAGE.write_text(page(kept, __version__))

    decoders = classes()
    save(rows(names or decoders, save))


if __name__ == "__main__":
    if sys.argv[1:] == ["--double"]:
        answer_in_double()
    else:
        main(sys.argv[1:])

"""CUDA graphs on a GPU: replayed passes train as launched ones. None of it has run so far."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.composing import experiment
from tests.parity.runs import LINES
from tests.ranks import run_ranks
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import load_experiment, to_yaml
from titan_exp.rules import check
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SMALL = [
    *("model=llama_debug", "training.steps=10", "training.seq_len=64", "training.global_batch_size=8"),
    *("evaluation.every=0", "tracking.log_every=1", "checkpoint=none", "parallelism.dp_shard=1"),
    *("cluster.device=cuda", "training.deterministic=true", "optimizer.eps=1e-4", "optimizer.lr=5e-4", *LINES),
]


def train(path: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], str]:
    """Rows, final weights, and what the log says of replays."""
    run = check(resolve_layout(experiment(*SMALL, *overrides), 1))
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(to_yaml(run))
    weights, said = run_ranks(1, _on_rank, str(path), limit=300.0)[0]
    return [dict(row) for row in read_metrics(folder.metrics)], weights, said


def _on_rank(path: str) -> tuple[dict[str, torch.Tensor], str]:
    import logging

    from torch.distributed.tensor import DTensor

    from titan_exp.tracking.logging import get_logger
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.trainer import Trainer

    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    get_logger().addHandler(Kept())
    get_logger().setLevel(logging.INFO)
    folder = RunFolder(path)
    run = load_experiment(folder.config)
    with joined(run.cluster) as device:
        trainer = Trainer(run, folder, device)
        trainer.restore()
        trainer.run()
        trainer.report.close("done")
        state = trainer.model.parts[0].state_dict()
        whole = {name: it.full_tensor() if isinstance(it, DTensor) else it for name, it in state.items()}
        replays = [line for line in said if line.startswith("compile.cuda_graphs")]
        return {name: it.cpu() for name, it in whole.items()}, "\n".join(replays)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "training.mixed_precision=bf16 training.micro_batch_size=4 data.document_mask=false",
        "training.mixed_precision=bf16 training.loss_chunk_tokens=100 activation_checkpoint=full",
        "training.mixed_precision=bf16 evaluation.every=3 data.validation_fraction=0.1",
        "training.mixed_precision=bf16 compile=all activation_checkpoint=selective",
        "training.mixed_precision=bf16 optimizer.implementation=triton model.tied_embeddings=true",
        "training.mixed_precision=bf16 quantization=float8_tensorwise quantization.precomputed_scales=true "
        "quantization.smallest_gemm=0",
    ],
)
def test_replays_train_the_same_on_a_gpu(tmp_path: Path, overrides: str):
    """The same kernels on the same numbers; a library may still choose another one for another stream."""
    rows, weights, said = train(tmp_path / "launched", *overrides.split())
    assert said == ""
    found, replayed, said = train(tmp_path / "replayed", *overrides.split(), "compile.cuda_graphs=true")
    assert "a CUDA graph with a memory pool of" in said
    assert " of 0.0 MiB" not in said
    assert len(found) == len(rows) == 10
    for row, expected in zip(found, rows, strict=True):
        assert row["tokens"] == expected["tokens"]
        for name, near in (("loss", 1e-4), ("grad_norm", 1e-2), ("validation_loss", 1e-4)):
            if expected.get(name) is not None:
                assert math.isclose(row[name], expected[name], rel_tol=near), (row["step"], name)
    for name, weight in weights.items():
        torch.testing.assert_close(replayed[name], weight, atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_pass_that_waits_is_not_recorded():
    """CUDA refuses, and a note says which option to leave off."""
    assert "compile.cuda_graphs=false" in run_ranks(1, _records_a_wait)[0]


def _records_a_wait() -> str:
    from titan_exp.trainer.forward_backward import CudaRecorder

    number = torch.ones((), device="cuda")
    try:
        CudaRecorder(torch.device("cuda")).record(lambda: print(number.item()))
    except RuntimeError as error:
        return "".join(error.__notes__)
    return "it was recorded"

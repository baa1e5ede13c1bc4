"""Attention kernel of a loaded model: that of its training where it runs, else `auto`."""

import pytest
import torch

from titan_exp.trainer.restore import _runs


@pytest.mark.parametrize(
    ("backend", "dtype", "kept"),
    [
        *((backend, torch.float32, False) for backend in ("cudnn", "flash", "fa3", "fa4")),
        *((backend, torch.float32, True) for backend in ("auto", "efficient", "math", "flex")),
        *((backend, torch.bfloat16, True) for backend in ("cudnn", "flash", "fa3", "fa4", "efficient", "flex")),
    ],
)
def test_kernels_of_low_precision_load_no_fp32_weights_on_cuda(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype, kept: bool
):
    monkeypatch.setattr("titan_exp.trainer.restore.runs_here", lambda backend, device: True)
    assert _runs(backend, torch.device("cuda", 0), dtype) == kept


def test_cpus_keep_the_kernels_that_they_have():
    kept = [_runs(backend, torch.device("cpu"), torch.float32) for backend in ("auto", "flash", "cudnn", "fa3", "flex")]
    assert kept == [True, True, False, False, False]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["auto", "flash", "cudnn", "math", "flex"])
def test_parts_of_a_sequence_keep_kernels_that_merge(monkeypatch: pytest.MonkeyPatch, device: str, backend: str):
    monkeypatch.setattr("titan_exp.trainer.restore.runs_here", lambda backend, device: True)
    assert _runs(backend, torch.device(device), torch.bfloat16, parts=True) == (backend in ("auto", "flash"))

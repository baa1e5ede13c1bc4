"""Plans with MXFP8 for GPUs with native support, and with emulation."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ranks import run_ranks
from titan_exp.config.devices import offered_devices
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.devices import device_named
from titan_exp.plan.fake_kernels import fake_cuda_kernels
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.tables import print_plan
from titan_exp.rules import check

SMALL = [
    "model=llama_debug",
    "cluster=slurm_h100",
    "compile=none",
    "training.mixed_precision=bf16",
    "training.global_batch_size=1",
]
RECIPE = ["quantization=mxfp8", "quantization.smallest_gemm=0"]
SEQ = 96


def planned(device: str, *words: str, full: bool = False) -> Plan:
    experiment = to_experiment(compose([*SMALL, f"training.seq_len={SEQ}", "parallelism.dp_shard=1", *words]))
    experiment = resolve_layout(check(experiment), offered_devices(experiment.cluster))
    return predict(experiment, device_named(device), full=full)


@pytest.mark.parametrize("shape", [(96, 64), (2, 128, 320), (32, 32)])
def test_fake_cast_equals_torchaos(shape: tuple[int, ...]):
    """torchao's reference cast has the shapes and strides of its kernel."""
    from titan_exp.quantization.mxfp8 import KernelPreference, MXFP8Dim0CastKernelChoice, MXTensor, ScaleCalculationMode

    def cast(x: torch.Tensor, by: MXFP8Dim0CastKernelChoice) -> list[tuple[object, ...]]:
        reference = MXTensor.to_mx(
            x,
            torch.float8_e4m3fn,
            32,
            ScaleCalculationMode.RCEIL,
            KernelPreference.AUTO,
            mxfp8_dim0_cast_kernel_choice=by,
        )
        parts: Any = reference
        return [(part.shape, part.stride(), part.dtype) for part in (parts.qdata, parts.scale)]

    real = cast(torch.randn(shape, dtype=torch.bfloat16), MXFP8Dim0CastKernelChoice.TORCH)
    with FakeTensorMode(), fake_cuda_kernels():
        assert cast(torch.empty(shape, dtype=torch.bfloat16), MXFP8Dim0CastKernelChoice.TRITON) == real


@pytest.mark.night
def test_scales_are_padded_to_128_rows():
    """As the matmul requires: 96 rows become 128, and the two scales of 64 columns four."""
    with_it, without = (
        Counter(size for _, size, _ in planned("b200", *words).ranks[0].trace.step_events if size)
        for words in (RECIPE, ["quantization=none"])
    )
    experiment = planned("b200", *RECIPE).experiment
    # Of x and gradients, each once by row in every linear layer: they have 96 rows, and few enough columns.
    assert experiment.model.dim == 64
    numbers = SEQ * experiment.model.dim
    assert with_it[128 * 4] > without[128 * 4]
    assert with_it[numbers] > without[numbers]


@pytest.mark.night
def test_matmuls_read_bytes_instead_of_halves():
    instructed, emulated, plain = planned("b200", *RECIPE), planned("h100", *RECIPE), planned("b200")
    works = [plan.ranks[0].trace.costs for plan in (instructed, emulated, plain)]
    assert len({work.flops for work in works}) == 1
    assert works[2].bytes_moved < works[0].bytes_moved < works[1].bytes_moved


def _costs(*plans: tuple[str, int, bool]) -> list[tuple[int, ...]]:
    """FLOPs, float8 FLOPs, bytes moved, peak and reserved memory of runs: `compile`, layers, True to trace each."""
    found, words = [], (*RECIPE, "training.micro_batch_size=1")
    for compiled, layers, full in plans:
        (rank,) = planned("b200", *words, f"compile={compiled}", f"model.layers={layers}", full=full).ranks
        costs = rank.trace.costs
        found.append((costs.flops, costs.fp8_flops, costs.bytes_moved, rank.trace.peak.bytes, rank.bytes))
    return found


def test_compiled_blocks_have_the_matmuls_of_eager_ones():
    ((eager, compiled),) = run_ranks(1, _costs, ("none", 2, True), ("blocks", 2, True))
    assert compiled[:2] == eager[:2]
    assert compiled[2] < eager[2]


@pytest.mark.night
def test_compiled_blocks_are_extrapolated():
    ((short, whole),) = run_ranks(1, _costs, ("blocks", 12, False), ("blocks", 12, True))
    assert short == whole


@pytest.mark.night
def test_emulated_without_native_support(capsys: pytest.CaptureFixture[str]):
    print_plan(planned("h100", *RECIPE))
    assert "mxfp8 is emulated on H100" in capsys.readouterr().out
    print_plan(planned("b200", *RECIPE))
    assert "emulated" not in capsys.readouterr().out


def test_native_nvfp4_is_refused():
    wide = ["quantization=nvfp4", "quantization.smallest_gemm=0", "model.dim=128", "model.ffn_dim=256"]
    with pytest.raises(UserError, match="quantization=mxfp8"):
        planned("b200", *wide, "training.seq_len=128")
    assert planned("h100", *wide, "training.seq_len=128").ranks

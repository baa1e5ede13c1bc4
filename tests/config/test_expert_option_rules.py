"""Rules of options with experts: captured CUDA graphs, scales of divided channels."""

import pytest

from tests.config.composing import experiment, give_gpus
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.rules import violations

BF16 = "training.mixed_precision=bf16"
FLOAT8 = "quantization=float8_tensorwise quantization.smallest_gemm=0 quantization.emulate=true"
GRAPHS = "compile.cuda_graphs=true parallelism.dp_shard=1"


def broken(overrides: str) -> list[Violation]:
    made = experiment("model=qwen3_moe_debug", "training.seq_len=64", *overrides.split())
    return violations(resolve_layout(made, 8))


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        (f"{GRAPHS} {BF16}", "", ""),
        (GRAPHS, "compile.cuda_graphs", "training.mixed_precision=bf16"),
        (f"{GRAPHS} {BF16} model.dim=60", "compile.cuda_graphs", "multiples of 8"),
        (f"{GRAPHS} {BF16} {FLOAT8}", "compile.cuda_graphs", "quantization.filter=['*.experts.*']"),
        (f"{GRAPHS} {BF16} {FLOAT8} quantization.filter=[*.experts.*]", "", ""),
        (
            f"compile.cuda_graphs=true {BF16} parallelism.dp_shard=2 parallelism.ep=2",
            "compile.cuda_graphs",
            "one rank: parallelism.dp_shard=1 parallelism.ep=1",
        ),
        (f"{FLOAT8} parallelism.tp=2 parallelism.etp=2", "", ""),
        (
            f"{FLOAT8} parallelism.tp=2 parallelism.etp=2 quantization.power_of_two_scales=false",
            "",
            "",
        ),
        ("quantization=mxfp8 quantization.emulate=true quantization.smallest_gemm=0 parallelism.tp=2", "", ""),
    ],
)
def test_options_with_experts(overrides: str, field: str, remedy: str, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 8)
    found = broken(overrides)
    assert [violation.field for violation in found] == ([field] if field else []), [str(each) for each in found]
    assert not found or remedy in found[0].remedy

"""Summaries of traces: names to kinds, spans to shares, and the real profiler's events of a run."""

import json

import pytest

from titan_exp.trainer.profiling.profiler import PHASE, Span, kind_of, summary_of, time_shares


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::_scaled_mm", "gemm"),
        ("aten::_grouped_mm", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", "gemm"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNN", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(Params)", "gemm"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd>>(Params)", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(Flash_fwd_params)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("gloo:all_gather", "communication"),
        ("c10d::allreduce_", "communication"),
        ("_c10d_functional::wait_tensor", "communication"),
        ("FSDP::all_gather (blocks.2)", "communication"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>(TensorListMetadata)", "optimizer"),
        ("aten::_foreach_norm", "optimizer"),
        ("aten::mul", "other"),
        ("aten::mean", "other"),
        ("triton_poi_fused_mul_silu_3", "other"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_0", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other"),
    ],
)
def test_names_of_kernels_and_operators(name: str, kind: str):
    assert kind_of(name) == kind


def span(name: str, begin: float, end: float, lane: object = 0, *, runs: bool = True) -> Span:
    return Span(name, kind_of(name), begin, end, lane, runs)


def test_communication_is_exposed_where_nothing_else_runs():
    found = time_shares(
        [span("aten::mm", 0, 10, "a"), span("nccl", 5, 25, "b"), span("aten::mul", 20, 30, "a")], (0, 40)
    )
    assert found.spent == {"gemm": 10, "attention": 0, "communication": 10, "optimizer": 0, "other": 10}
    assert found.hidden == 10
    assert found.idle == 10


def test_the_shares_add_up_whatever_overlaps():
    lanes = [
        span("aten::mm", 0, 30, "a"),
        span("flash_fwd", 10, 40, "b"),
        span("nccl", 20, 60, "c"),
        span("nccl", 55, 70, "d"),
        span("aten::mul", -5, 5, "e"),
        span("aten::mul", 90, 120, "e"),
    ]
    found = time_shares(lanes, (0, 100))
    assert sum(found.spent.values()) + found.idle == pytest.approx(100)
    assert found.spent["communication"] == 30
    assert found.spent["gemm"] == 2.5 + 5 + 10
    assert found.idle == 20


def test_an_operator_has_its_own_time_and_that_of_what_belongs_to_it():
    nested = [
        span("aten::linear", 0, 10),
        span("aten::t", 1, 3),
        span("autograd::engine::evaluate_function: MmBackward0", 10, 20),
        span("aten::mm", 12, 18),
        span("Optimizer.step#AdamW.step", 20, 30),
        span("aten::mm", 22, 24),
    ]
    found = time_shares(nested, (0, 35)).spent
    assert found == {"gemm": 16, "attention": 0, "communication": 0, "optimizer": 10, "other": 4}


def test_an_annotation_on_a_stream_owns_kernels_and_no_gaps():
    found = time_shares([span("Optimizer.step#X.step", 0, 10, runs=False), span("elementwise", 2, 6)], (0, 10))
    assert found.spent["optimizer"] == 4
    assert found.idle == 6


def test_the_text_says_what_the_numbers_are():
    spans = [span("sm90_gemm", 0, 600_000, 7), span("ncclDevKernel", 500_000, 800_000, 13)]
    found = summary_of(spans, (0, 1_000_000), device="cuda", first_step=3, last_step=5)
    text = found.text()
    assert text.startswith("steps 3 to 5: 1.000 s, by the time of kernels on the device\n")
    assert "60.0 %  GEMM\n" in text
    assert "20.0 %  communication\n" in text
    assert "20.0 %  idle: no kernel ran\n" in text
    assert "Another 10.0 % overlapped." in text
    assert found.line().startswith("GEMM 60.0 %, attention 0.0 %, communication 20.0 %")
    assert [(kernel.name, kernel.seconds, kernel.calls) for kernel in found.longest] == [
        ("sm90_gemm", 0.6, 1),
        ("ncclDevKernel", 0.3, 1),
    ]


def test_a_run_is_summarized_on_every_rank(tmp_path):
    from tests.parity.runs import train

    train(
        tmp_path,
        "parallelism.dp_shard=2",
        "profiling=trace",
        "profiling.start=1",
        "profiling.steps=2",
        "training.steps=4",
    )
    for rank in range(2):
        found = json.loads((tmp_path / f"traces/summary-rank-{rank:05d}.json").read_text())
        shares = found["shares"]
        assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
        assert all(shares[kind] > 0 for kind in ("gemm", "attention", "communication", "optimizer", "other"))
        assert (found["device"], found["first_step"], found["last_step"]) == ("cpu", 2, 3)
        assert (tmp_path / f"traces/summary-rank-{rank:05d}.txt").read_text().startswith("steps 2 to 3: ")
        assert not any(name["name"].startswith(PHASE) for name in found["longest"]), "a phase is not work of its own"


@pytest.mark.parametrize(
    ("layout", "phases"),
    [
        ("training.micro_batch_size=4", {"micro-batch 0", "micro-batch 1", "clip and optimizer"}),
        (
            "parallelism.pp=2 training.micro_batch_size=4",
            {"F stage 0 micro-batch 1", "B stage 0 micro-batch 0", "reduce gradients of stage 0", "clip and optimizer"},
        ),
    ],
)
def test_a_trace_marks_the_phases_of_a_step(tmp_path, layout: str, phases: set[str]):
    from tests.parity.runs import train

    train(tmp_path, *layout.split(), "profiling=trace", "profiling.start=1", "profiling.steps=1", "training.steps=3")
    events = json.loads((tmp_path / "traces/steps-2-2-rank-00000.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert phases <= {name.removeprefix(PHASE) for name in names if name.startswith(PHASE)}

"""Roofline rates: of recipes, attention kernels, launches and messages; measured rates before those of the table."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.layouts import experiment_of
from titan_exp.cli.plan import device_for
from titan_exp.config.devices import gpu_memory_bytes
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import COST, pipeline_seconds, timeline
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan import devices
from titan_exp.plan.devices import DEVICES, cpu_device, gpu_memory, refine_gpu
from titan_exp.plan.prediction import with_run_kernels
from titan_exp.plan.roofline import message_seconds, rank_time, schedule_and_bubble
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.tracking.throughput import DeviceRates, write_rates

H100 = DEVICES["h100"]


def in_cluster(**values: float) -> Experiment:
    experiment = experiment_of("")
    return replace(experiment, cluster=replace(experiment.cluster, **values))


def test_every_value_of_a_device_has_a_source():
    groups = {"peaks", "memory", "overheads", "gemm", "attention", "bandwidth", "links", "launch"}
    for device in DEVICES.values():
        assert set(device.sources) == groups, device.name
        peak = device.bandwidth_tbs
        assert peak is not None
        assert device.elementwise_tbs <= device.copy_tbs < peak, device.name
        assert device.gemm["bf16"] < device.bf16_tflops, device.name
        for recipe in set(device.gemm) - {"bf16"}:
            assert device.fp8_tflops is not None
            assert device.gemm["bf16"] < device.gemm[recipe] < device.fp8_tflops, (device.name, recipe)


def test_fp8_matmuls_have_the_rate_of_their_recipe():
    work, half = OpCosts(flops=10**15), OpCosts(flops=10**15, fp8_flops=5 * 10**14)
    device = replace(H100, gemm={"bf16": 600.0, "float8_tensorwise": 1200.0, "float8_rowwise": 900.0})
    for recipe, rate in (("float8_tensorwise", 1200), ("float8_rowwise", 900), ("mxfp8", 1200)):
        found = rank_time(half, {}, replace(device, recipe=recipe), 8).matmuls
        assert found == pytest.approx(0.5 / 0.6 + 0.5e3 / rate), recipe
    # Where there are no such instructions, nothing is gained.
    a100 = DEVICES["a100"]
    assert rank_time(replace(half, fp8_flops=10**15), {}, a100, 8) == rank_time(work, {}, a100, 8)


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ("", "cudnn"),
        ("model.attention_backend=flash", "flash"),
        ("training.deterministic=true", "flash"),
        ("parallelism.cp=2", "flash"),
        ("parallelism.cp=2 parallelism.cp_method=ulysses", "cudnn"),
        ("data.document_mask=true", "efficient"),
    ],
)
def test_attention_has_the_rates_of_its_kernel(words: str, kernel: str):
    device = with_run_kernels(H100, experiment_of(f"training.mixed_precision=bf16 {words}"))
    assert device.kernel == kernel
    assert device.attention_rates == tuple(1e12 * rate for rate in H100.attention[kernel][128])
    older = with_run_kernels(DEVICES["a100"], experiment_of(f"training.mixed_precision=bf16 {words}"))
    assert older.kernel == kernel.replace("cudnn", "flash")


def test_attention_has_the_rates_of_the_nearest_head_size():
    device = replace(H100, attention={"cudnn": {64: (400.0, 350.0), 128: (561.0, 491.0)}}, head_dim=80)
    assert device.attention_rates == (400e12, 350e12)
    forward = OpCosts(flops=10**15, kernels={("attention, forward", "flops"): 10**15})
    assert rank_time(forward, {}, device, 8).matmuls == pytest.approx(1e3 / 400)
    # A kernel without rates has flash's, and without these matmuls'.
    assert replace(device, kernel="math").attention_rates == (device.matmul_rate, device.matmul_rate)


def test_the_slower_of_host_and_device_counts():
    work, device = OpCosts(bytes_moved=10**12, operators=10**6), replace(H100, elementwise_tbs=1.0)
    for microseconds, seconds in ((0.5, 1.0), (3.0, 3.0)):
        assert rank_time(work, {}, replace(device, launch_us=microseconds), 8).total == pytest.approx(seconds)
    # A CPU computes and launches in turn.
    assert rank_time(work, {}, replace(device, launch_us=3.0, launches_ahead=False), 8).total == pytest.approx(4.0)


def test_messages_have_latency():
    inside = message_seconds("all-gather", 0, range(8), H100, 8, calls=10)
    assert inside == pytest.approx(10e-6 * (8.4 + 7 * 3.4))
    across = message_seconds("all-reduce", 0, range(16), H100, 8, calls=1)
    assert across == pytest.approx(1e-6 * (8.4 + 2 * (14 * 3.4 + 14.0)))
    assert message_seconds("send", 0, [0, 8], H100, 8, calls=1) == pytest.approx(1e-6 * (8.4 + 14.0))
    assert message_seconds("receive", 2**30, [0, 8], H100, 8, calls=1) == 0


def test_the_first_gather_and_the_last_reduction_are_exposed():
    key, device = ("fsdp", "all-gather"), replace(H100, message_us=0.0, link_hop_us=0.0)
    work = OpCosts(messages={key: 32 * 2**30}, calls={key: 32})
    found = rank_time(work, {"fsdp": list(range(8))}, device, 8)
    assert found.exposed == pytest.approx(found.behind / 32)
    computing = replace(work, bytes_moved=10**13)
    assert rank_time(computing, {"fsdp": list(range(8))}, device, 8).total == pytest.approx(
        1e13 / device.bandwidth + found.exposed
    )


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"), [("1F1B", 4, 8), ("GPipe", 4, 8), ("Interleaved1F1B", 8, 8)]
)
def test_a_slow_last_stage_delays_others_by_its_own_time_only(schedule: str, stages: int, microbatches: int):
    orders, bubble = schedule_and_bubble(schedule, 4, stages, microbatches)

    def predicted_and_simulated(*slowness: float) -> tuple[float, float]:
        costs = [slowness[stage % 4] for stage in range(stages)]
        busy = {rank: sum(COST[act.kind] * costs[act.stage] for act in order) for rank, order in enumerate(orders)}
        return pipeline_seconds(busy, 4, bubble), max(timeline(orders, costs).end.values())

    for slowness in ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.6)):
        predicted, simulated = predicted_and_simulated(*slowness)
        assert predicted == pytest.approx(simulated)
    # Before a slow first stage, others have slack, of which the prediction counts some.
    predicted, simulated = predicted_and_simulated(1.6, 1.0, 1.0, 1.0)
    assert 0.999 < predicted / simulated < 1.13


def test_a_plan_of_some_ranks_takes_the_others_as_slow():
    assert pipeline_seconds({0: 2.0}, 4, 0.5) == pipeline_seconds(dict.fromkeys(range(4), 2.0), 4, 0.5) == 4.0
    assert pipeline_seconds({0: 1.0, 1: 2.0, 3: 3.0}, 4, 0.5) == pytest.approx(3.0 + 5.0 / 3)
    assert pipeline_seconds({0: 2.0}, 1, 0.0) == 2.0


def test_links_are_those_of_the_cluster_group(tmp_path: Path):
    work = OpCosts(messages={("tp", "all-gather"): 2**30})

    def waited(ranks: int, **links: float) -> float:
        device = refine_gpu(H100, in_cluster(**links).cluster, tmp_path)
        return rank_time(work, {"tp": list(range(ranks))}, device, 8).exposed

    assert waited(8, link_gbs=225.0) == pytest.approx(2 * waited(8))
    assert waited(8, network_gbs=25.0) == waited(8)
    assert waited(16, network_gbs=25.0) == pytest.approx(2 * waited(16))


def test_measured_rates_replace_those_of_the_table(tmp_path: Path):
    assert refine_gpu(H100, in_cluster().cluster, tmp_path) == H100
    write_rates(
        tmp_path,
        DeviceRates(
            "NVIDIA H100 80GB HBM3",
            "",
            "",
            {"bf16": 700.0, "float8_tensorwise": 1300.0},
            {"cudnn": {"128": [600.0, 500.0]}},
            copy=2680.0,
            link=360.0,
            launch_us=4.0,
            context_gib=0.5,
        ),
    )
    device = refine_gpu(H100, in_cluster().cluster, tmp_path)
    assert device.matmul_rate == pytest.approx(700e12)
    assert device.fp8_rate == pytest.approx(1300e12)
    assert device.attention_rates == (600e12, 500e12)
    assert device.attention["flash"] == H100.attention["flash"], "not measured"
    assert device.copy_bandwidth == pytest.approx(2.68e12)
    assert device.bandwidth / device.copy_bandwidth == pytest.approx(H100.bandwidth / H100.copy_bandwidth)
    assert device.link_gbs * device.link_share == pytest.approx(360)
    assert (device.launch_us, device.context_gib, device.message_us) == (4.0, 0.5, H100.message_us)
    assert device.bf16_tflops == H100.bf16_tflops, "MFU is of the maker's peak"


def test_a_measured_cpu_is_a_device(tmp_path: Path):
    assert cpu_device("Some CPU, 4 cores", tmp_path, dtype="fp32", threads=4, processes=1) is None
    attention = {"flash": {"64": [0.04, 0.03]}}
    rates = DeviceRates("Some CPU, 4 cores", "", "", {"fp32": 0.2}, attention, copy=40.0, link=3.0)
    write_rates(tmp_path, rates)
    assert cpu_device("Some CPU, 4 cores", tmp_path, dtype="bf16", threads=4, processes=1) is None
    whole = cpu_device("Some CPU, 4 cores", tmp_path, dtype="fp32", threads=4, processes=1)
    half = cpu_device("Some CPU, 4 cores", tmp_path, dtype="fp32", threads=2, processes=2)
    assert whole is not None
    assert half is not None
    assert (whole.bf16_tflops, half.bf16_tflops) == (0.2, 0.1)
    assert (whole.copy_tbs, half.copy_tbs, half.link_gbs) == (0.04, 0.02, 3.0)
    assert half.attention_rates == (half.matmul_rate, half.matmul_rate), "measured in bf16 only"
    write_rates(tmp_path, replace(rates, tflops={"bf16": 0.4}))
    halved = cpu_device("Some CPU, 4 cores", tmp_path, dtype="bf16", threads=2, processes=2)
    assert halved is not None
    assert halved.attention_rates == pytest.approx((0.02e12, 0.015e12))


def test_memory_is_what_the_driver_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert H100.memory / 2**30 == pytest.approx(79.11)
    assert H100.overhead(3) == round((H100.context_gib + 3 * H100.communicator_gib) * 2**30)
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "81559, 551"\necho "81559, 600"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(devices, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"] * 2)
    gpu_memory_bytes.cache_clear()
    layout = ResolvedLayout.of(experiment_of("cluster=local parallelism.dp_shard=2"))
    present = gpu_memory(layout.cluster, tmp_path, layout, None)
    assert (present.capacity, present.overhead) == ((81559 - 600) * 2**20, H100.overhead(2))
    gpu_memory_bytes.cache_clear()
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert gpu_memory(layout.cluster, tmp_path, layout, None).capacity == H100.memory
    gpu_memory_bytes.cache_clear()


def test_a_requested_device_has_the_cluster_s_links(tmp_path: Path):
    experiment = in_cluster(network_gbs=12.5)
    experiment = replace(experiment, paths=replace(experiment.paths, runs=str(tmp_path)))
    device = device_for(experiment, "b200").device
    assert device is not None
    assert (device.name, device.network_gbs) == (DEVICES["b200"].name, 12.5)


def test_ring_hops_are_exposed_also_on_an_axis_shared_with_fsdp():
    sent = OpCosts(messages={("cp_across=fsdp", "send"): 2**30, ("cp_across=fsdp", "all-gather"): 2**30})
    alone = OpCosts(messages={("cp_across", "send"): 2**30})
    both = rank_time(sent, {"cp_across=fsdp": [0, 1]}, H100, 8)
    # The only gather is the first, which is exposed too.
    hops = rank_time(alone, {"cp_across": [0, 1]}, H100, 8).exposed
    assert both.exposed == pytest.approx(hops + both.behind)
    assert hops > 0
    assert both.behind > 0

"""Roofline rates: fp8 matmuls, links of the cluster group, and measured rates before those of the table."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.layouts import experiment_of
from titan_exp.cli.plan_commands.device import device_for
from titan_exp.config.groups.experiment import Experiment
from titan_exp.plan.calibrated_constants import Constants, write_constants
from titan_exp.plan.cuda.devices import DEVICES
from titan_exp.plan.device_memory import refine_gpu
from titan_exp.plan.time.roofline import rank_time
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.tracking.device_rates import DeviceRates, write_rates

H100 = DEVICES["h100"]


def in_cluster(**values: float) -> Experiment:
    experiment = experiment_of("")
    return replace(experiment, cluster=replace(experiment.cluster, **values))


def test_fp8_matmuls_have_their_own_rate():
    bf16 = rank_time(OpCosts(flops=10**15), {}, H100, 8)
    half = rank_time(OpCosts(flops=10**15, fp8_flops=5 * 10**14), {}, H100, 8)
    assert H100.fp8_tflops is not None
    assert half.matmuls == pytest.approx(bf16.matmuls * (0.5 + 0.5 * H100.bf16_tflops / H100.fp8_tflops))
    # Where there are no such instructions, nothing is gained.
    a100 = DEVICES["a100"]
    assert rank_time(OpCosts(flops=10**15, fp8_flops=10**15), {}, a100, 8) == rank_time(
        OpCosts(flops=10**15), {}, a100, 8
    )


def test_links_are_those_of_the_cluster_group(tmp_path: Path):
    work = OpCosts(messages={("tp", "all-gather"): 2**30}, calls={("tp", "all-gather"): 1})

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
        DeviceRates("NVIDIA H100 80GB HBM3", "", "", {"bf16": 700.0, "fp8": 1300.0}, copy=2680.0, link=360.0),
    )
    device = refine_gpu(H100, in_cluster().cluster, tmp_path)
    assert device.matmul_rate == pytest.approx(700e12)
    assert device.fp8_rate == pytest.approx(1300e12)
    assert device.bandwidth_tbs * device.bandwidth_share == pytest.approx(2.68)
    assert device.link_gbs * device.link_share == pytest.approx(360)
    assert device.bf16_tflops == H100.bf16_tflops, "MFU is of the maker's peak"
    # Fitted constants go before both.
    write_constants(tmp_path, Constants(H100.name, matmul_share=0.5))
    fitted = refine_gpu(H100, in_cluster().cluster, tmp_path)
    assert (fitted.matmul_share, fitted.bandwidth_share) == (0.5, device.bandwidth_share)


def test_a_requested_device_has_the_cluster_s_links(tmp_path: Path):
    experiment = in_cluster(network_gbs=12.5)
    experiment = replace(experiment, paths=replace(experiment.paths, runs=str(tmp_path)))
    device = device_for(experiment, "b200")
    assert device is not None
    assert (device.name, device.network_gbs) == (DEVICES["b200"].name, 12.5)


def test_ring_hops_are_exposed_also_on_an_axis_shared_with_fsdp():
    sent = OpCosts(messages={("cp_across=fsdp", "send"): 2**30, ("cp_across=fsdp", "all-gather"): 2**30})
    alone = OpCosts(messages={("cp_across", "send"): 2**30})
    both = rank_time(sent, {"cp_across=fsdp": [0, 1]}, H100, 8)
    assert both.exposed == rank_time(alone, {"cp_across": [0, 1]}, H100, 8).exposed > 0
    assert both.behind > 0

import pytest

from titan_exp.tracking.throughput import Throughput


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meter(clock: Clock, **options) -> Throughput:
    return Throughput(**{"devices": 4, "warmup_steps": 2, "clock": clock, **options})


def run(clock: Clock, throughput: Throughput, seconds: list[float]) -> None:
    for duration in seconds:
        clock.now += duration
        throughput.step(1000)


def test_throughput_of_job_and_device() -> None:
    clock = Clock()
    throughput = meter(clock, warmup_steps=0, flops_per_token=6e9, peak_tflops=10.0)
    run(clock, throughput, [0.5, 0.5])
    assert throughput.read() == {
        "tokens_per_second": 2000.0,
        "tokens_per_second_per_device": 500.0,
        "tflops": 3.0,
        "mfu": 0.3,
    }


def test_steps_of_different_tokens() -> None:
    clock = Clock()
    throughput = meter(clock, warmup_steps=0)
    for tokens in (100, 300):
        clock.now += 0.5
        throughput.step(tokens)
    assert throughput.read()["tokens_per_second"] == 400.0
    assert (throughput.spent.steps, throughput.spent.tokens, throughput.spent.training) == (2, 400, 1.0)


def test_first_steps_are_left_out() -> None:
    clock = Clock()
    throughput = meter(clock)
    run(clock, throughput, [60.0, 30.0, 1.0, 1.0])
    assert throughput.read()["tokens_per_second"] == 1000.0
    assert throughput.spent.warmup == 90.0


def test_window_of_warmup_is_unknown() -> None:
    clock = Clock()
    throughput = meter(clock, flops_per_token=1.0, peak_tflops=1.0)
    run(clock, throughput, [60.0, 30.0])
    assert set(throughput.read().values()) == {None}
    run(clock, throughput, [2.0])
    assert throughput.read()["tokens_per_second"] == 500.0


def test_each_reading_is_of_its_own_window() -> None:
    clock = Clock()
    throughput = meter(clock, warmup_steps=0)
    run(clock, throughput, [1.0])
    throughput.read()
    run(clock, throughput, [4.0])
    assert throughput.read()["tokens_per_second"] == 250.0
    assert throughput.read()["tokens_per_second"] is None
    assert (throughput.spent.training, throughput.spent.tokens) == (5.0, 2000)


def test_pauses_are_left_out_and_accounted_for() -> None:
    clock = Clock()
    throughput = meter(clock, warmup_steps=1)
    with throughput.pause("evaluation"):
        clock.now += 7.0
    run(clock, throughput, [3.0, 1.0])
    with throughput.pause("evaluation"):
        clock.now += 20.0
    with throughput.pause("checkpoint"):
        clock.now += 5.0
    run(clock, throughput, [1.0])
    assert throughput.read()["tokens_per_second"] == 1000.0
    assert throughput.spent.paused == {"evaluation": 27.0, "checkpoint": 5.0}
    assert (throughput.spent.warmup, throughput.spent.training) == (3.0, 2.0)


def test_a_pause_that_fails_is_accounted_for() -> None:
    clock = Clock()
    throughput = meter(clock)

    def fail() -> None:
        with throughput.pause("checkpoint"):
            clock.now += 2.0
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert throughput.spent.paused == {"checkpoint": 2.0}


def test_queued_kernels_count_as_training() -> None:
    clock = Clock()

    def wait_for_device() -> None:
        nonlocal queued
        clock.now, queued = clock.now + queued, 0.0

    queued = 0.0
    throughput = meter(clock, warmup_steps=0, synchronize=wait_for_device)
    run(clock, throughput, [1.0])
    queued = 3.0
    with throughput.pause("evaluation"):
        clock.now += 10.0
        queued = 5.0
    assert throughput.read()["tokens_per_second"] == 250.0
    assert throughput.spent.paused == {"evaluation": 15.0}


def test_missing_flops_or_peak() -> None:
    clock = Clock()
    throughput = meter(clock, warmup_steps=0, flops_per_token=1e9)
    run(clock, throughput, [1.0])
    found = throughput.read()
    assert found["tflops"] == 0.25
    assert found["mfu"] is None

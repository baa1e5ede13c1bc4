"""Rows as a run logs them, for tests."""

from titan_exp.tracking.sink import Row


def row(step: int, *, attempt: int = 1, loss: float = 2.0, **also: float | None) -> Row:
    known = {
        "step": step,
        "tokens": step * 4096,
        "loss": loss,
        "grad_norm": 0.5,
        "lr": 3e-3,
        "tokens_per_second": 12_345.0,
        "tokens_per_second_per_device": 12_345.0,
        "tflops": None,
        "mfu": None,
        "memory": 0.41,
        "memory_reserved": None,
        "attempt": attempt,
    }
    return {**known, **also}

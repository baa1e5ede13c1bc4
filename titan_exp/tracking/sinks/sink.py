"""Where a row of metrics goes: the one interface of metrics.jsonl, the console, W&B and TensorBoard."""

from collections.abc import Mapping
from typing import Protocol

Value = float | int | None
"""A number, or None where it is unknown."""

Row = Mapping[str, Value]
"""One logged step. The keys, the same in every sink:

| key | meaning |
|---|---|
| `step`, `tokens`, `attempt` | optimizer steps and tokens seen by the whole job so far; start of the run this is |
| `loss` | mean over the tokens of the step's global batch, in nats per token |
| `grad_norm`, `lr` | global gradient norm before clipping; learning rate of the step |
| `tokens_per_second`, `tokens_per_second_per_device` | speed since the row before, without evaluation and saving |
| `tflops`, `mfu` | model TFLOP/s of one device; that over its dense bf16 peak, from 0 to 1 |
| `memory`, `memory_reserved` | peak GiB of a rank in this start: allocated (resident set on CPU), reserved |
| `validation_loss`, `validation_perplexity`, `validation_tokens` | over the whole validation split, where evaluated |
| `validation_loss/NAME` | of each source of a mixture, where evaluated |
| `epoch`, `epoch/NAME` | passes over the training documents so far; of each source of a mixture |
"""


class Sink(Protocol):
    """Takes rows as they are made, on rank 0 or in the launching process."""

    def log(self, row: Row) -> None:
        """Take the row of one step."""
        ...

    def close(self, state: str) -> None:
        """Finish, saying how the run ended: `done`, `failed` or `preempted`."""
        ...

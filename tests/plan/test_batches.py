"""Batches on the device: a GPU holds the micro-batch that it computes, a CPU all of a step."""

import pytest

from tests.plan.layouts import SMALL as ON_CPU
from tests.plan.test_offload import OFFLOADED, blocks, traced
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.predict import predict
from titan_exp.rules import check

SEQ_LEN, ROWS = 192, 2
BATCH = blocks(8 * ROWS * SEQ_LEN)
"""Bytes of the tokens, or of the labels, of a micro-batch."""


@pytest.mark.parametrize("override", ["parallelism.cpu_offload=false", OFFLOADED])
def test_a_gpu_holds_one_micro_batch(override: str):
    found = traced(
        override, "parallelism.dp_shard=1", f"training.seq_len={SEQ_LEN}", f"training.micro_batch_size={ROWS}"
    )
    sizes = {storage: size for storage, size, _ in found.step_events if size}
    held = most = 0
    for storage, size, _ in found.step_events:
        if sizes.get(storage) == BATCH:
            held += 1 if size else -1
            most = max(most, held)
    # Tokens, labels, and the loss's labels without ignored ones.
    assert (most, held) == (3, 0)


def test_a_cpu_holds_all_micro_batches():
    def other(*words: str) -> int:
        experiment = check(resolve_layout(to_experiment(compose([*ON_CPU, *words])), 1))
        return predict(experiment, None).ranks[0].trace.persistent["other"]

    few, many = (other(f"training.global_batch_size={rows}", "training.micro_batch_size=2") for rows in (4, 12))
    assert many - few == 2 * 8 * 64 * (12 - 4)

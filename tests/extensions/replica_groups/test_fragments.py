"""Fragments of streaming DiLoCo: their blocks, and the steps after which they are sent and applied."""

import pytest

from titan_exp.extensions.replica_groups.config import SemiSyncConfig, fragments_of

NAMES = ["embedding.weight", *(f"blocks.{block}.attention.qkv" for block in range(6)), "norm.weight", "head.weight"]


@pytest.mark.parametrize(
    ("pattern", "fragments", "expected"),
    [
        ("strided", 1, [0] * 9),
        ("strided", 3, [0, 0, 1, 2, 0, 1, 2, 2, 2]),
        ("strided", 4, [0, 0, 1, 2, 3, 0, 1, 1, 1]),
        ("sequential", 3, [0, 0, 0, 1, 1, 2, 2, 2, 2]),
        ("sequential", 4, [0, 0, 0, 1, 2, 2, 3, 3, 3]),
    ],
)
def test_blocks_of_fragments(pattern, fragments, expected):
    config = SemiSyncConfig("streaming_diloco", fragments=fragments, fragment_pattern=pattern)
    assert list(fragments_of(NAMES, config, 6).values()) == expected


def test_a_fragment_is_sent_a_delay_before_it_is_applied():
    config = SemiSyncConfig("streaming_diloco", interval=10, fragments=3, delay=2)
    events = {step: (config.sent_fragment(step), config.applied_fragment(step)) for step in range(21)}
    busy = [(step, *event) for step, event in events.items() if event != (None, None)]
    first = [(1, 0, None), (3, None, 0), (4, 1, None), (6, None, 1), (8, 2, None), (10, None, 2)]
    assert busy == [*first, *((step + 10, *event) for step, *event in first)]


def test_diloco_is_sent_and_applied_after_multiples_of_the_interval():
    config = SemiSyncConfig("diloco", interval=5)
    assert [step for step in range(16) if config.sent_fragment(step) == config.applied_fragment(step) == 0] == [
        5,
        10,
        15,
    ]
    assert all(config.sent_fragment(step) is None for step in range(16) if step % 5 or not step)

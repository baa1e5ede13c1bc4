import gc

import pytest

from titan_exp.trainer.gc import GarbageCollection


@pytest.fixture(autouse=True)
def collection_as_before():
    yield
    gc.enable()


def collections() -> int:
    return gc.get_stats()[1]["collections"]


def test_garbage_is_collected_at_its_steps_and_at_no_other_time():
    collection = GarbageCollection(every=3)
    assert not gc.isenabled()
    before = collections()
    counts = []
    for step in range(1, 8):
        collection.step(step)
        counts.append(collections() - before)
    assert counts == [0, 0, 1, 1, 1, 2, 2]
    collection.close()
    assert gc.isenabled()


def test_zero_leaves_it_to_python():
    collection = GarbageCollection(every=0)
    assert gc.isenabled()
    before = collections()
    collection.step(10)
    assert collections() == before

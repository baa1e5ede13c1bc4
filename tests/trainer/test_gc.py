import gc

import pytest

from titan_exp.trainer.part import Step
from titan_exp.trainer.parts import GarbageCollection


@pytest.fixture(autouse=True)
def collection_as_before():
    yield
    gc.enable()


def collections() -> int:
    return gc.get_stats()[1]["collections"]


def test_garbage_is_collected_at_its_steps_and_at_no_other_time():
    collection = GarbageCollection(every=3)
    collection.begin(None)  # type: ignore[arg-type]  # it reads nothing of the run
    assert not gc.isenabled()
    before = collections()
    counts = []
    for step in range(1, 8):
        collection.after(Step(step, last=False, tokens=0))
        counts.append(collections() - before)
    assert counts == [0, 0, 1, 1, 1, 2, 2]
    collection.close()
    assert gc.isenabled()

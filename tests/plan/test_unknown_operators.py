"""Operators that the planner does not know: the plan goes on, names them, and counts their results as memory."""

import json
from dataclasses import asdict, replace

from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.memory_gate import gate_warnings
from titan_exp.plan.devices import DeviceMemory
from titan_exp.plan.gate import MemoryCheck
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.prediction import from_json
from titan_exp.plan.tables import plan_to_json


def planned(name: str) -> Plan:
    words = ["model=llama_debug", "cluster.device=cpu", "training.global_batch_size=2", "model.context=64"]
    own = [f"model.architecture=tests.models.own_kinds.{name}", "training.seq_len=64", "parallelism.dp_shard=1"]
    return predict(resolve_layout(to_experiment(compose([*words, *own])), 1), None)


def test_a_plan_with_an_unknown_operator_names_it(capsys):
    plain, mixed = planned("Kind"), planned("Transformed")
    assert planned("Transformed").prediction.unknown == mixed.prediction.unknown, "its calls are cached by now"
    assert plain.prediction.unknown == ()
    assert plain.prediction.without_unknown == ""
    assert set(mixed.prediction.unknown) == {"aten._fft_r2c", "aten._fft_c2c"}
    assert "The planner does not know aten._fft_r2c and aten._fft_c2c." in mixed.prediction.without_unknown
    assert plan_to_json(mixed)["unknown"] == mixed.prediction.unknown
    # A complex number for each hidden one is alive when a layer ends.
    size = 8 * 2 * 64 * mixed.experiment.model.dim
    assert mixed.prediction.largest.allocated >= plain.prediction.largest.allocated + size
    assert from_json(json.loads(json.dumps(asdict(mixed.prediction)))) == mixed.prediction
    memory = DeviceMemory(None, 2**40, 1, 0, "this machine")
    check = MemoryCheck(mixed.experiment, memory, prediction=mixed.prediction)
    assert check.fits
    assert gate_warnings([check, replace(check, prediction=plain.prediction)]) == [mixed.prediction.without_unknown]

"""A family like Qwen3 with experts, whose `config.json` takes any router: biases and shared experts are exported."""

from dataclasses import replace
from typing import Any

from titan_exp.models import qwen3_moe
from titan_exp.models.qwen3_moe import Config, block, spec, state_dict_map, violations

__all__ = ["Config", "block", "huggingface", "spec", "state_dict_map", "violations"]


def _from_config_json(values: Any, name: str) -> Config:
    found = qwen3_moe.huggingface.from_config(values, name)
    assert isinstance(found, Config), "the family's own"
    moe = replace(found.moe, **values["router"], balance=replace(found.moe.balance, loss=values["balance"]))
    return replace(found, architecture=__name__, moe=moe)


def _to_config_json(config: Config) -> dict[str, Any]:
    router = {key: value for key, value in vars(config.moe).items() if key != "balance"}
    values = qwen3_moe.huggingface.to_config(config)
    return {**values, "router": router, "balance": config.moe.balance.loss}


huggingface = replace(
    qwen3_moe.huggingface, to_config=_to_config_json, from_config=_from_config_json, violations=lambda config: ()
)

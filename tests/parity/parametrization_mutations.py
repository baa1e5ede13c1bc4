"""Mutations of parametrizations and parameter groups, each of which the parity tests must notice. Run on demand:

python -m pytest tests/parity/parametrization_mutations.py -m "night or not night"
"""

from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from tests.parity.runs import mutation_test
from tests.parity.test_parametrization import FROZEN, SCALED
from tests.patching import patch

EXPERIMENTS = {"scaled": " ".join(SCALED), "frozen": " ".join(FROZEN)}
SHARDS, STAGES = "parallelism.tp=2 parallelism.dp_shard=2", "parallelism.pp=2 training.micro_batch_size=1"


def shards_have_no_learning_rate_of_their_own() -> None:
    def make(original: Any) -> Any:
        def hyperparameters(named: Any, config: Any) -> dict[str, Any]:
            found = original(named, config)
            if isinstance(named.parameter, DTensor) and named.name.endswith("out.weight"):
                found.pop("lr_scale", None)
            return found

        return hyperparameters

    patch("titan_exp.optim.parameter_groups.hyperparameters", make)


def shards_have_the_epsilon_of_the_optimizer() -> None:
    def make(original: Any) -> Any:
        return lambda named, config: {
            key: value
            for key, value in original(named, config).items()
            if key != "eps" or not isinstance(named.parameter, DTensor)
        }

    patch("titan_exp.optim.parameter_groups.hyperparameters", make)


def a_stage_counts_its_own_layers_as_depth() -> None:
    def make(original: Any) -> Any:
        def scales_of(parametrization: Any, model: Any) -> Any:
            return original(replace(parametrization, base_depth=2 * parametrization.base_depth), model)

        return scales_of

    patch("titan_exp.trainer.train_state.scales_of", make)


def initial_weights_of_stages_are_not_scaled() -> None:
    patch("titan_exp.trainer.train_state.init_specs", lambda original: lambda module, scales: original(module))


def shards_of_frozen_parameters_are_trained() -> None:
    patch("titan_exp.trainer.train_state.freeze", lambda _: lambda module, config: None)


test_mutation_is_noticed = mutation_test(
    EXPERIMENTS,
    [
        ("scaled", SHARDS, shards_have_no_learning_rate_of_their_own),
        ("scaled", SHARDS, shards_have_the_epsilon_of_the_optimizer),
        ("scaled", STAGES, a_stage_counts_its_own_layers_as_depth),
        ("scaled", STAGES, initial_weights_of_stages_are_not_scaled),
        ("frozen", "parallelism.dp_shard=2", shards_of_frozen_parameters_are_trained),
    ],
)

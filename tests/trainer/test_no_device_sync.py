"""Nothing in a training step asks the device for a number: on a GPU the host would wait for it, and fall behind."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.runs import LINES, train
from tests.patching import patch

ASKING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive")
"""Operators whose result, or its shape, the host has to know."""


class Refusing(TorchDispatchMode):
    """Fails where an operator asks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._overloadpacket.__name__ not in ASKING, f"the host waits for {func}"
        return func(*args, **(kwargs or {}))


def refuse() -> None:
    steps = []

    def make(step: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            steps.append(1)
            # The first step caches what it computes.
            with Refusing() if len(steps) > 1 else nullcontext():
                return step(*args, **kwargs)

        return watched

    patch("titan_exp.trainer.trainer.train_step", make)


@pytest.mark.parametrize(
    "layout",
    [
        "training.micro_batch_size=4 training.z_loss=1e-4",
        "parallelism.dp_shard=2 parallelism.tp=2 training.mixed_precision=bf16 training.loss_chunk_tokens=37",
        "parallelism.pp=2 parallelism.cp=2 training.global_batch_size=16 activation_checkpoint=full",
        "documents quantization=float8_tensorwise",
        # With expert parallelism the host waits for counts, once per layer, inside an operator.
        "model=deepseek_debug parallelism.tp=2 model.mtp.depth=1",
        pytest.param("model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.ep=2", marks=pytest.mark.night),
    ],
)
def test_a_step_asks_for_nothing(tmp_path: Path, layout: str):
    """Ranks fail where one does."""
    words = [override for word in layout.split() for override in (LINES if word == "documents" else [word])]
    assert len(train(tmp_path, "training.steps=2", *words, mutate=refuse).loss) == 2


def waited_for(path: str) -> list[str]:
    """Runs on a GPU, where torch itself says so; warm-up allocates and may record, which may wait."""
    import warnings

    from titan_exp.config.schema.typed_config import load_experiment
    from titan_exp.tracking.run_folder.run_folder import RunFolder
    from titan_exp.trainer import trainer as module
    from titan_exp.trainer.distributed import joined

    step, steps, said = module.train_step, [], list[str]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if len(steps) > 4 else "default")
            try:
                result = step(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # Not what torch says of this mode itself, which does not detect "all synchronizing operations".
        said.extend(str(it.message) for it in caught if "called a synchronizing" in str(it.message))
        return result

    module.train_step = watched
    folder = RunFolder(path)
    experiment = load_experiment(folder.config)
    with joined(experiment.cluster) as device:
        trainer = module.Trainer(experiment, folder, device)
        trainer.restore()
        trainer.run()
        trainer.report.close("done")
    return said


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "option",
    ["optimizer.implementation=fused", "optimizer.implementation=triton", "compile.cuda_graphs=true"],
)
def test_a_gpu_is_never_waited_for(tmp_path: Path, option: str):
    from tests.config.composing import experiment
    from tests.ranks import run_ranks
    from titan_exp.config.layout.resolved_layout import resolve_layout
    from titan_exp.config.schema.typed_config import to_yaml
    from titan_exp.rules import check

    run = experiment(
        *("model=llama_debug", "training.steps=7", "training.seq_len=64", "training.global_batch_size=8"),
        *("training.mixed_precision=bf16", "evaluation.every=0", "checkpoint=none", "cluster.device=cuda"),
        *("parallelism.dp_shard=1", option),
    )
    (tmp_path / "config.yaml").write_text(to_yaml(check(resolve_layout(run, 1))))
    assert run_ranks(1, waited_for, str(tmp_path)) == [[]]

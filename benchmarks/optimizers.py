"""CPU time of an optimizer's update, and of a whole step with it, against AdamW's, in a single thread.

python benchmarks/optimizers.py [rounds=20] [key=value ...]

Each round trains every case for one step, on equal batches, so that what else the machine does falls on all. Means are
over rounds; SOAP's cover its power iterations if rounds are a multiple of `optimizer.precondition_every`.
"""

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

BASE = [
    *("model=llama_laptop", "model.dim=256", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=768"),
    *("training.seq_len=256", "training.global_batch_size=4", "checkpoint=none", "training.evaluate_every=0"),
    *("parallelism.dp_shard=1", "cluster.device=cpu"),
]
CASES = [
    *("adamw", "adamw optimizer.state_precision=bf16", "adamw optimizer.state_precision=int8"),
    *("sgd", "lion", "schedule_free_adamw lr_schedule=constant", "adafactor"),
    *("muon", "muon optimizer.precision=bf16", "muon optimizer.split_attention=head", "dion", "soap"),
]
WARMUP = 3


class Case:
    """An optimizer with its own model."""

    def __init__(self, words: list[str]) -> None:
        import torch

        from titan_exp.config.hydra.compose import compose
        from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
        from titan_exp.config.schema.typed_config import to_experiment
        from titan_exp.rules import check
        from titan_exp.trainer.train_state import assemble

        self.experiment = check(resolve_layout(to_experiment(compose(words)), 1))
        self._state = assemble(self.experiment, ResolvedLayout.of(self.experiment), torch.device("cpu"))
        self._state.built.init_weights()
        self._state.model.weights.refresh()
        self.parameters = sum(parameter.numel() for parameter in self._state.model.parameters())
        self.updates, self.steps = list[float](), list[float]()
        self._state.optimizer.step = self._timed(self._state.optimizer.step)  # type: ignore[method-assign]

    def step(self, batch: Any) -> None:
        """Train one step and note its times."""
        from titan_exp.trainer.train_step import train_step

        training, begin = self.experiment.training, time.process_time()
        train_step(
            self._state,
            [batch],
            step=1 + len(self.steps),
            tokens=[training.global_batch_size * training.seq_len],
            lr=1e-4,
        )
        self.steps.append(time.process_time() - begin)

    def _timed(self, update: Callable[[], object]) -> Callable[[], None]:
        def timed() -> None:
            begin = time.process_time()
            update()
            self.updates.append(time.process_time() - begin)

        return timed


def main(arguments: list[str]) -> None:
    """Time every case and print the table."""
    import torch

    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.data.batch import Batch
    from titan_exp.trainer.distributed import joined

    rounds = next((int(word.partition("=")[2]) for word in arguments if word.startswith("rounds=")), 20)
    words = [*BASE, *(word for word in arguments if not word.startswith("rounds="))]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ["TITAN_EXP_RENDEZVOUS"] = str(Path(tempfile.mkdtemp()) / "meet")
    with joined(to_experiment(compose(words)).cluster):
        cases = {name: Case([*words, *f"optimizer={name}".split()]) for name in CASES}
        first = cases[CASES[0]]
        training, vocab = first.experiment.training, first.experiment.model.vocab_size
        load = os.getloadavg()[0]
        for number in range(-WARMUP, rounds):
            generator = torch.Generator().manual_seed(number + WARMUP)
            tokens = torch.randint(vocab, (training.global_batch_size, training.seq_len), generator=generator)
            for case in cases.values():
                case.step(Batch(tokens, tokens, None, None))
            if number == -1:
                for case in cases.values():
                    case.updates, case.steps = [], []
    print(f"{platform.processor() or platform.machine()}, one thread, ", end="")
    print(f"torch {torch.__version__}, {first.parameters / 1e6:.1f} M parameters, batches of ", end="")
    print(f"{training.global_batch_size} x {training.seq_len} tokens, {rounds} rounds, load before {load:.1f}\n")
    print(f"| {'optimizer=':42} | update, ms | fastest, ms | / AdamW | step, ms | / AdamW |\n|---|--:|--:|--:|--:|--:|")
    for name, case in cases.items():
        update, step = mean(case.updates), mean(case.steps)
        print(
            f"| {name:42} | {1e3 * update:.1f} | {1e3 * min(case.updates):.1f} | {update / mean(first.updates):.2f} "
            f"| {1e3 * step:.0f} | {step / mean(first.steps):.2f} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])

"""Ranks of a layout check: the trainer's own build and step in fp64, on processes forked from one with torch."""

import hashlib
import math
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import debug
from torch.utils._pytree import tree_leaves

from titan_exp.config.devices import usable_cores
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.batch import Batch, collate
from titan_exp.doctor.layout.cases import MOST_RANKS, Case
from titan_exp.models.blocks.linear import LinearImpl
from titan_exp.models.spec.lookup import mtp_depth
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.meta_init import local_shard
from titan_exp.trainer.distributed import joined_process_group, seed_step
from titan_exp.trainer.objective import token_counts
from titan_exp.trainer.part import Part, Parts, Update
from titan_exp.trainer.parts import acting_parts
from titan_exp.trainer.train_state import assemble
from titan_exp.trainer.train_step import train_step

RANK_SECONDS = 30.0  # seconds that a case may take from the start of its ranks on
FORK = multiprocessing.get_context("fork")
STEPS = 2  # optimizer steps: the second one sees what the first has left in weights and buffers
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # parts of module names that recomputation and compilation add
Output = tuple[int, str, np.ndarray]
"""Width of the vectors in a module's output, the module's class if it is yours, and a number for each vector."""
Window = tuple[tuple[int, ...], tuple[int, ...], np.ndarray]
"""Shape of a whole tensor, first index of a rank's shard of it in each dim, and the shard."""
dropped = list[float]()  # rates of the dropout that this process left out
_attend = nn.functional.scaled_dot_product_attention


@dataclass
class Recorded:
    """Numbers of a case, put together from all of its ranks."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole gradient of each parameter in the first step, in the order of the model."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole parameters and persistent buffers after the last step."""
    outputs: dict[str, tuple[int, str, np.ndarray]] = field(default_factory=dict)
    """Each module's first output in the first step, as in `Output`, in forward order."""
    disputed: list[str] = field(default_factory=list)
    """Names of parameters and buffers of which ranks hold different values after the last step."""
    dropped: float = 0.0  # largest rate of dropout that was left out


def sets(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that the same processes train one after another, since a process that has trained once is twice as fast. A
    rank has the same pipeline stage in all of them: what your code keeps from one stage must not help another."""
    found: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        found.setdefault((case.ranks, case.experiment.parallelism.pp), []).append(case)
    return list(found.values())


def record(cases: Iterable[Sequence[Case]], deadline: float) -> Iterator[tuple[Case, Recorded | str]]:
    """Numbers of the cases of some sets, or a sentence why there are none, in the order in which they end; as many
    processes run at a time as there are cores, until the deadline on the monotonic clock."""
    waiting, running = deque(map(deque, cases)), list[tuple[deque[Case], _Running]]()
    try:
        while waiting or running:
            busy = sum(one.ranks for _, one in running)
            while waiting and busy + waiting[0][0].ranks <= max(MOST_RANKS, usable_cores()):
                chosen = waiting.popleft()
                runs = [case.experiment for case in chosen]
                running.append((chosen, _Running(chosen[0].ranks, train_steps, runs)))
                busy += chosen[0].ranks
            wait([pipe for _, one in running for pipe in one.missing.values()], timeout=1.0)
            for entry in list(running):
                chosen, one = entry
                while chosen and (found := one.poll(deadline)) is not None:
                    yield chosen.popleft(), found if isinstance(found, str) else _joined(found)
                    if isinstance(found, str):
                        break
                else:
                    if chosen:
                        continue
                one.end()
                running.remove(entry)
                if chosen:
                    waiting.append(chosen)
    finally:
        for _, one in running:
            one.end()


def call(function: Callable[[Any], Any], argument: object, deadline: float) -> Any:
    """Call a function on one rank in a process of its own; returns what it returns, or a sentence why it failed."""
    running = _Running(1, function, [argument])
    try:
        while (found := running.poll(deadline)) is None:
            wait(running.missing.values(), timeout=1.0)
        return found if isinstance(found, str) else found[0]
    finally:
        running.end()


class _Running:
    """Ranks that call a function with each of some arguments."""

    def __init__(self, ranks: int, function: Callable[[Any], Any], arguments: Sequence[object]) -> None:
        self.ranks, self._pipes, self._processes = ranks, dict[int, Connection](), list[Any]()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(ranks):
            receive, send = FORK.Pipe(duplex=False)
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            given = (send, environment, Path(self._folder.name), function, arguments)
            process = FORK.Process(target=_rank, args=given, daemon=True)
            process.start()
            send.close()
            self._pipes[rank] = receive
            self._processes.append(process)
        self._begin()

    def _begin(self) -> None:
        """Wait for the results of the next argument."""
        self.missing = dict(self._pipes)
        self._found, self._limit = list[Any](), time.monotonic() + RANK_SECONDS

    def poll(self, deadline: float) -> list[Any] | str | None:
        """What all ranks returned for an argument, or why one failed; None while they run."""
        for rank, pipe in list(self.missing.items()):
            if not pipe.poll():
                continue
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                failed, value = True, "a rank died"
            if failed:
                return str(value)
            self._found.append(value)
            del self.missing[rank]
        if not self.missing:
            found = self._found
            self._begin()
            return found
        if time.monotonic() > min(deadline, self._limit):
            return "its ranks did not finish in time"
        return None

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _joined(ranks: Sequence[Any]) -> Recorded:
    """Put whole tensors together from the windows that ranks hold."""
    losses = [math.fsum(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    found = Recorded(losses, dropped=max(rank["dropped"] for rank in ranks))
    for kind in ("gradients", "weights"):
        whole: dict[str, np.ndarray] = getattr(found, kind)
        for rank in ranks:
            for name, (shape, start, part) in rank[kind].items():
                target = whole.setdefault(name, np.full(shape, np.nan))
                if target.shape != shape:
                    continue
                window = tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))
                held = target[window]
                least = 1e-9 * np.abs(part).max(initial=0)
                if kind == "weights" and not np.all(np.isnan(held) | np.isclose(held, part, rtol=0, atol=least)):
                    found.disputed.append(name)
                target[window] = part
    for rank in ranks:
        for name, (width, kind, numbers) in rank["outputs"].items():
            before = found.outputs.get(name)
            found.outputs[name] = (width, kind, numbers if before is None else np.concatenate((before[2], numbers)))
    return found


def _rank(
    send: Connection,
    environment: dict[str, str],
    folder: Path,
    function: Callable[[Any], Any],
    arguments: Sequence[object],
) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"
    Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    for number, argument in enumerate(arguments):
        os.environ.update(environment, TITAN_EXP_RENDEZVOUS=str(folder / f"meet{number}"))
        debug._clear_sharding_prop_cache()  # it would return shardings on the last layout's groups
        try:
            outcome = (False, function(argument))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(str(error).split())[:300]
            outcome = (True, f"{type(error).__name__} in {Path(where.filename).name}, line {where.lineno}: {reason}")
        send.send_bytes(pickle.dumps(outcome))
        if outcome[0]:
            break
    send.close()
    os._exit(0)


def without_dropout() -> None:
    """Let torch's dropout drop nothing in this process, since each layout would draw other numbers, and keep its rates
    in `dropped`. Call it before your code is imported."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(nn.functional, name, _keep)
    nn.functional.scaled_dot_product_attention = _attend_to_all


def _keep(x: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Tensor:
    if training:
        dropped.append(p)
    return x


def _attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **options: Any
) -> Tensor:
    dropped.append(dropout_p)
    return _attend(query, key, value, attn_mask, 0.0, *rest, **options)


def train_steps(run: Experiment) -> dict[str, Any]:
    """Train a shrunken run as one of its ranks. Returns this rank's share of each loss, its windows of gradients and
    weights, and a number for each vector of its modules' outputs. Raises what the model or the trainer raises."""
    torch.set_num_threads(1)
    layout, device = ResolvedLayout.of(run), torch.device("cpu")
    losses, gradients, outputs = list[float](), dict[str, Window](), dict[str, Output]()
    with joined_process_group(device):
        state = assemble(run, layout, device)
        state.built.init_weights()
        for part in state.model.parts:
            stir(part)
        state.refresh()
        batch = global_batch(run)
        share, rows = run.training.global_batch_size // state.mesh.dp_degree, layout.micro_batch_size
        first = state.mesh.dp_rank * share
        starts = range(first, first + share, rows)
        batches = [batch.map(lambda whole, at=at: whole[at : at + rows]) for at in starts]
        tokens, parts = token_counts(state.model.objective, batch), [*acting_parts(run, state)]
        for step in range(1, STEPS + 1):
            seed_step(run.experiment.seed, step, state.mesh)
            kept = Parts([*parts, _Gradients(gradients if step == 1 else {})])
            with watched(state.model.parts, outputs if step == 1 else {}):
                row = train_step(state, kept, batches, step=step, tokens=tokens, lr=run.optimizer.lr)
            losses.append(float(row.metrics["loss"]) / state.mesh.loss_replicas)
        weights = {
            _unwrapped(name): _window(value)
            for part in state.model.parts
            for name, value in part.state_dict().items()
            # A number of calls, as batch normalization keeps, depends on micro-batches and computes nothing.
            if isinstance(value, Tensor) and value.is_floating_point()
        }
    found = {"losses": losses, "gradients": gradients, "weights": weights, "outputs": outputs}
    return {**found, "dropped": max(dropped, default=0.0)}


def global_batch(run: Experiment) -> Batch:
    """Batch of random tokens. Documents, if the run tells them apart, end at other places in each row: one has a single
    token, and others cross the cuts between ranks."""
    rows, length = run.training.global_batch_size, run.training.seq_len
    generator = np.random.default_rng(0)
    windows = generator.integers(0, run.model.vocab_size, (rows, length + 1))
    starts = [sorted({1 + row % 5, 2 + row % 5, 9 + row, 19 + row % 3} - {length}) for row in range(rows)]
    data = run.data
    batch = collate(windows, starts, document_mask=data.document_mask, reset_positions=data.reset_positions)
    return batch.with_further(mtp_depth(run.model))


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Give a model weights that hide nothing, the same in every layout: normal matrices in place of outputs that begin
    as zeros, and noise on vectors, without decays too fast to see a token far away."""
    for name, parameter in model.named_parameters():
        part, shard = local_tensor(parameter), local_shard(parameter)
        seed = int.from_bytes(hashlib.sha256(_unwrapped(name).encode()).digest()[:4], "little")
        drawn = torch.randn(shard.shape, generator=torch.Generator().manual_seed(seed))
        window = tuple(slice(first, first + size) for first, size in zip(shard.start, shard.size, strict=True))
        if len(shard.shape) > 1:
            part.copy_(0.7 * drawn[window] / shard.shape[-1] ** 0.5)
        else:
            part.clamp_(-2.0, 2.0).add_(0.3 * drawn[window])


class _Gradients(Part):
    """Keeps the gradients of a step."""

    name = "gradients of a layout check"

    def __init__(self, found: dict[str, Window]) -> None:
        self.found = found

    def on_gradients(self, update: Update) -> None:
        """Copy this rank's gradients."""
        for part in update.state.model.parts:
            for name, parameter in part.named_parameters():
                if parameter.grad is not None:
                    self.found[_unwrapped(name)] = _window(parameter.grad)


def _window(tensor: Tensor) -> Window:
    shard = local_shard(tensor)
    return shard.shape, shard.start, local_tensor(tensor.detach()).cpu().double().numpy().copy()


@contextmanager
def watched(parts: Iterable[nn.Module], found: dict[str, Output]) -> Iterator[None]:
    """Note the width of each module's first output, and a random projection of each vector in it. No layout changes the
    set of these numbers, whichever ranks and micro-batches they come from."""

    def note(name: str, module: nn.Module, _: Any, output: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        tensor = next((leaf for leaf in tensors if leaf.dim() > 1 and leaf.numel() > 0), None)
        if tensor is None or isinstance(tensor, FakeTensor):  # a block is traced to choose what it recomputes
            return
        width = tensor.shape[-1]
        direction = torch.randn(width, generator=torch.Generator().manual_seed(width))
        numbers = (local_tensor(tensor.detach()).flatten(0, -2).double() @ direction).numpy()
        before = found.get(name)
        if before is None or before[0] == width:
            found[name] = (width, _kind(module), numbers if before is None else np.concatenate((before[2], numbers)))

    with ExitStack() as hooks:
        for name, module in (named for part in parts for named in part.named_modules()):
            # The matmul of a row-parallel linear has partial sums, which the linear reduces.
            if name and not isinstance(module, LinearImpl):
                hooks.enter_context(module.register_forward_hook(partial(note, _unwrapped(name))))
        yield


def _kind(module: nn.Module) -> str:
    """Class of a module that is yours; empty for torch's and ours. FSDP extends classes in place."""
    owners = (base for base in type(module).__mro__ if not base.__module__.startswith("torch."))
    found = next(owners)
    return "" if found.__module__.startswith("titan_exp.") else found.__name__


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name

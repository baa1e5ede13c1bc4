"""Steps of one rank of a layout check, by the trainer's own build and step, with what they leave."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.batch import Batch, collate
from titan_exp.doctor.layout.exact_torch import dropped
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

STEPS = 2  # optimizer steps: the second one sees what the first has left in weights and buffers
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # parts of module names that recomputation and compilation add
Output = tuple[int, str, np.ndarray]
"""Width of the vectors in a module's output, the module's class if it is yours, and a number for each vector."""
Window = tuple[tuple[int, ...], tuple[int, ...], np.ndarray]
"""Shape of a whole tensor, first index of a rank's shard of it in each dim, and the shard."""


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

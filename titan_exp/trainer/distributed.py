"""Rendezvous of ranks: the device and the default process group, from environment variables."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titan_exp.config import devices
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import COLLECTIVE_SECONDS, ClusterConfig
from titan_exp.parallel.mesh import LOOPBACK, Mesh, loopback_store
from titan_exp.tracking.logging import configure_logging
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import write_atomically

TIMEOUT = timedelta(seconds=COLLECTIVE_SECONDS)  # timeout of collectives without the hang watchdog
JOIN_LIMIT = timedelta(minutes=10)  # timeout of the rendezvous: imports from a network disk may take minutes


NETWORK_LIMIT = timedelta(minutes=5)  # timeout of the network check


class RanksMissing(RuntimeError):
    """Some ranks of the job did not join."""


class NetworkBroken(RuntimeError):
    """All ranks joined, and their devices cannot exchange tensors."""


@contextmanager
def joined(config: ClusterConfig) -> Iterator[torch.device]:
    """Yield this process's device and join the default process group in the `with` block. Raises UserError if CUDA is
    requested and this machine has none, or torch cannot use the GPU that `auto` found."""
    device = _device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    # Longer than the watchdog's, so that the watchdog ends a hanging run and shows each rank's stack.
    limit = timedelta(minutes=4 * (config.hang_kill_minutes or 0))
    with joined_process_group(device, timeout=max(TIMEOUT, limit)):
        yield device


@contextmanager
def joined_process_group(device: torch.device, *, timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """Join the default process group in the `with` block, with `timeout` for its collectives. After an error, a rank
    with peers stays in the group, and its process must end. Reads `RANK` and `WORLD_SIZE` (default: a single process),
    and for the rendezvous `TITAN_EXP_RENDEZVOUS`, a file on one machine, else `MASTER_ADDR` and `MASTER_PORT`. Raises
    RanksMissing if not all ranks joined within `JOIN_LIMIT`, NetworkBroken if NCCL cannot connect their devices."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    file = os.environ.get("TITAN_EXP_RENDEZVOUS")
    # Gloo beside NCCL: flags and counts go over the CPU and never wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if world == 1 else _rendezvous(rank, world, file)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    failed = True
    try:
        if device.type == "cuda" and world > 1:
            check_network(device, "nccl")
        yield
        failed = False
    finally:
        # After an error NCCL would wait for collectives that no peer joins, and the error would never be recorded.
        if world == 1 or not failed:
            dist.destroy_process_group()


def check_network(device: torch.device, backend: str) -> None:
    """Connect all ranks eagerly by a communicator bound to their devices, all-reduce a number, and free the
    communicator. The default group stays unbound: bound (`init_process_group(device_id=...)`), it would give every axis
    of both meshes, most of size 1, a communicator for the whole run, and would run a pipeline's sends one after the
    other. Raises NetworkBroken if connecting or the all-reduce failed, or took longer than `NETWORK_LIMIT`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    reason: str | None = None
    cause: RuntimeError | None = None
    try:
        bound = device if device.type != "cpu" else None
        group: Any = dist.new_group(backend=backend, timeout=NETWORK_LIMIT, group_desc="network check", device_id=bound)
        count = torch.ones((), device=device)
        work = dist.all_reduce(count, group=group, async_op=True)
        assert work is not None, "this rank belongs to the group"
        work.wait(NETWORK_LIMIT)
        total = int(count)
        dist.destroy_process_group(group)
        if total != world:
            reason = f"the ranks add up to {total}"
    except RuntimeError as error:  # torch's errors of a backend are subclasses
        lines, cause = [line.strip() for line in str(error).splitlines() if line.strip()], error
        reason = "; ".join(lines[:1] + lines[-1:])
    if reason is not None:
        raise NetworkBroken(
            f"rank {rank}: {backend.upper()} cannot connect {world} ranks, this one on {device} of {platform.node()} "
            f"({reason}). Start with NCCL_DEBUG=INFO in the environment to see the adapters that it tries. Choose "
            "others with NCCL_SOCKET_IFNAME and NCCL_IB_HCA, and measure the links of one machine with titan-exp doctor"
        ) from cause


def _rendezvous(rank: int, world: int, file: str | None) -> dist.Store:
    """Return the store that all ranks share, once all of them have joined."""
    url = "env://" if file is None else f"file://{file}"
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        # torchrun serves the store itself.
        served = file is not None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not served and os.environ.get("MASTER_ADDR") == LOOPBACK:
            store: dist.Store = loopback_store(rank, int(os.environ["MASTER_PORT"]), JOIN_LIMIT)
        else:
            store, *_ = next(dist.rendezvous(url, rank, world, timeout=JOIN_LIMIT))
    except (dist.DistError, OSError) as error:
        raise RanksMissing(
            f"rank {rank}: no answer from rank 0 at MASTER_ADDR:MASTER_PORT = {address} ({error}). "
            "Did rank 0 start, and does its machine accept connections there?"
        ) from error
    store.set(f"joined/{rank}", "yes")
    keys = [f"joined/{other}" for other in range(world)]
    try:
        store.wait(keys, JOIN_LIMIT)
    except RuntimeError as error:  # the only type that a FileStore raises
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RanksMissing(
            f"rank {rank}: {world - len(missing)} of {world} ranks joined within {JOIN_LIMIT.total_seconds():.0f} s. "
            f"These are missing: {', '.join(map(str, missing[:16]))}{', ...' if len(missing) > 16 else ''}. Read "
            "their logs"
        ) from error
    return store


def require_usable_cuda() -> None:
    """Raise UserError if this machine has a GPU or a driver, and `cluster.device=auto` would fall back to the CPU."""
    found = devices.cuda_facts().found
    if found is None:
        return
    if (refused := devices.unusable_cuda()) is None:
        said = "torch.cuda.is_available() is false"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            said = str(error).partition("\n")[0]
        reason = f"this machine has {found}, but torch {torch.__version__} cannot use it: {said}"
        refused = reason, f"look at what nvidia-smi and dmesg say, or {devices.ON_PURPOSE}"
    reason, remedy = refused
    raise UserError(f"cluster.device=auto: {reason}\n  {remedy}")


def _device(requested: str, local_rank: int) -> torch.device:
    cuda = torch.cuda.is_available()
    if requested == "cuda" and not cuda:
        raise UserError(
            "cluster.device=cuda: torch finds no CUDA GPU on this machine. To train without one, use cluster.device=cpu"
        )
    if requested == "auto" and not cuda:
        require_usable_cuda()
    if requested == "cpu" or not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


REQUEST, RESPONSE = "request.json", "response.json"
"""Files in the scratch run folder, beside the experiment that defines the ranks' layout."""

RunOnRanks = Callable[[str, Experiment, Any], Any]
"""Runs a rank function, given by import path, on an experiment's ranks; returns rank 0's JSON response."""


def serve(run: Run, function: Callable[[Experiment, Any, torch.device], Any]) -> None:
    """Join the process group, call `function` on the request of a scratch run folder, and write rank 0's response."""
    folder, experiment = run.folder, run.experiment
    request = json.loads((folder.path / REQUEST).read_text(encoding="utf-8"))
    configure_logging(int(os.environ.get("RANK", "0")), folder.logs)
    with joined(experiment.cluster) as device:
        response = function(experiment, request, device)
        if dist.get_rank() == 0:
            write_atomically(folder.path / RESPONSE, json.dumps(response))


def seed_step(seed: int, step: int, mesh: Mesh) -> None:
    """Seed the default generators of the CPU and the device for a step. Data ranks and pipeline stages draw numbers of
    their own. Tensor- and context-parallel ranks draw the same ones: a dropout of the residual stream, or the choice to
    skip a block, must be that of the ranks beside them."""
    stage, device = mesh.pp_rank, mesh.device
    share = f"{mesh.dp_rank}/{stage}" if stage else f"{mesh.dp_rank}"
    digest = hashlib.sha256(f"{seed}/step/{step}/{share}".encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    # torch.manual_seed would probe every device type in each step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def set_deterministic(deterministic: bool) -> None:
    """Allow deterministic kernels only, if `deterministic`."""
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN costs time and breaks buffers that are computed later.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False

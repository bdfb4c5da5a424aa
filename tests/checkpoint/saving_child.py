"""Processes that save checkpoints and die; run by the tests in this folder, which look at what is left.

saving_child.py loop FOLDER            resume from FOLDER, save on and on, say "saved STEP" after each
saving_child.py dissect WORK FOLDER    for n = 1, 2, ...: copy FOLDER to WORK/n, start an operation there
    OPERATION                          and die just before its n-th file operation; until it survives
saving_child.py rank RANK FOLDER       one of two ranks of a process group (see `in_a_group`)
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch

from openk3.checkpoint.train_state import CheckpointStore
from openk3.errors import StorageError

CONFIG = {"model": {"width": 8}}
TRACED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}
OPERATIONS = {
    "save the first": lambda folder: CheckpointStore(folder).save(1, state_at(1), config=CONFIG),
    "save another": lambda folder: CheckpointStore(folder).save(4, state_at(4), config=CONFIG),
    "rewind": lambda folder: CheckpointStore(folder).rewind(2),
}


def state_at(step: int, size: int = 100) -> dict:
    """A state that nobody can mistake for another step's."""
    generator = torch.Generator().manual_seed(step)
    layers = {
        f"layers.{i}.weight": torch.randn(size + i, 3, generator=generator, dtype=dtype)
        for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float64])
    }
    momentum = {name: torch.randn(w.shape, generator=generator) for name, w in layers.items()}
    return {"model": layers, "optim": {"momentum": momentum, "lr": 0.1 + step / 3}, "loop": {"step": step}}


def flat(state: dict, above: str = "") -> dict:
    """Leaves by path, tensors as (dtype, shape, bytes): equal exactly when the states are bit for bit."""
    leaves: dict = {}
    for key, leaf in state.items():
        if isinstance(leaf, dict):
            leaves |= flat(leaf, f"{above}{key}/") or {f"{above}{key}": "empty"}
        elif isinstance(leaf, torch.Tensor):
            raw = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            leaves[above + key] = (leaf.dtype, leaf.shape, raw)
        else:
            leaves[above + key] = repr(leaf)
    return leaves


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def loop(folder: str) -> None:
    store = CheckpointStore(folder)
    latest = store.latest()
    if latest is not None:
        assert flat(store.load(config=CONFIG)) == flat(state_at(latest, 20_000))
    for step in itertools.count((latest or 0) + 1):
        store.save(step, state_at(step, 20_000), config=CONFIG)
        say(f"saved {step}")


def dissect(work: str, folder: str, operation: str) -> None:
    with tempfile.TemporaryDirectory() as warm:  # torch's late imports once, here, not in every child
        OPERATIONS["save the first"](warm)
    for n in itertools.count(1):
        copy = Path(work) / str(n)
        shutil.copytree(folder, copy)
        if (child := os.fork()) == 0:
            die_before_file_operation(n, copy)
            OPERATIONS[operation](copy)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(os.waitstatus_to_exitcode(status))


def die_before_file_operation(n: int, folder: Path) -> None:
    """SIGKILL this process when it is about to do the n-th file operation in `folder` from here on."""
    left = itertools.count(n - 1, -1)

    def tick() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(descriptor: int, sync=os.fsync) -> None:  # the one that Python does not announce
        tick()
        sync(descriptor)

    os.fsync = fsync

    def hook(event: str, about: tuple) -> None:
        if event in TRACED:
            path = str(about[0])  # relative, or a descriptor, when a folder is removed entry by entry
            if path.startswith(str(folder)) or not os.path.isabs(path):
                tick()

    sys.addaudithook(hook)


def in_a_group(rank: int, folder: str) -> None:
    """Two ranks save a sharded and a shared tensor and a part of each one's own; then one cannot write."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(70_700.0).reshape(101, 700)
    state = {
        "model": {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "shared": torch.ones(3), "n": rank},
        f"rng-{rank}": {"torch": torch.full((4,), rank), "position": 10 + rank},
    }
    store = CheckpointStore(f"{folder}/checkpoints", group=dist.new_group(backend="gloo"))
    store.save(1, state, config=CONFIG)

    empty = {
        "model": {
            "sharded": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)]),
            "shared": torch.zeros(3),
        },
        f"rng-{rank}": {"torch": torch.zeros(4, dtype=torch.int64)},
    }
    loaded = store.load(into=empty, config=CONFIG)
    assert torch.equal(loaded["model"]["sharded"].full_tensor(), whole)
    assert loaded["model"]["n"] == 0
    assert loaded[f"rng-{rank}"]["position"] == 10 + rank
    assert torch.equal(empty[f"rng-{rank}"]["torch"], torch.full((4,), rank))

    if rank == 1:
        # Below its shard, above the file through which the ranks find each other.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        store.save(2, state, config=CONFIG)
    except StorageError as error:
        say(str(error))
    say(f"latest {store.latest()}")
    dist.barrier()
    os._exit(0)  # gloo's threads abort some orderly exits, after all is done


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"loop": loop, "dissect": dissect, "rank": lambda rank, folder: in_a_group(int(rank), folder)}[
        sys.argv[1]
    ](*sys.argv[2:])

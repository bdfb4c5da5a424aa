"""The full state of a training run on disk, saved so that no kill at any moment loses the last good one.

A store is a folder of checkpoints `step-00001234/`, each with the tensors in the files of
`torch.distributed.checkpoint` (DCP), everything else in `state.json`, and the `manifest.json` of both. A save
goes through these steps in this order; a process may die between any two, or inside one:

1. Clear leftovers of saves that died. There is one writer, and it is not writing: all leftovers are dead.
2. Build in `step-00001234.partial-*/`, a name that no reader takes for a checkpoint.
3. Tensors, through DCP: shards first, then `.metadata`, which says where in them each tensor lies.
4. `state.json`, then the manifest. It comes last, as it holds the hash of everything before it.
5. Sync all contents, then the folder: names must not become durable before what they name.
6. Rename to `step-00001234/`. This is the one moment of publication: before it the save never happened, after
   it the checkpoint is complete. "Latest" is the highest published step, found by looking; a pointer file
   would be a second truth, one crash away from the first.
7. Sync the store's folder: only now is the save durable, and only a durable save may cost an older one.
8. Remove old checkpoints beyond `keep`, counting whole ones only: a broken copy is never kept in place of a
   good one. Removal renames first, so that no reader meets half a checkpoint under a published name.

Steps only grow: a run that goes back says so with `rewind`, or "latest" would mean an abandoned future.

Saving is synchronous: the state is read while nothing changes it (`background` copies it first). The module
does not know what a model or an optimizer is, when to save, or what the configuration means. `.metadata` is a
pickle, as DCP writes it: load only checkpoints from people you trust.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from openk3 import __version__
from openk3.checkpoint.atomic import (
    atomic_folder,
    atomic_write_json,
    make_folder,
    remove_folder,
    remove_partials,
    storage_errors,
)
from openk3.checkpoint.manifest import FileDigest, check_manifest, digest_files, write_manifest
from openk3.checkpoint.ranks import Ranks
from openk3.checkpoint.state_tree import State, differences, join_state, split_state
from openk3.checkpoint.tensors import mismatches, read_tensors, stored_tensors, write_tensors
from openk3.errors import CheckpointError, InvalidInput

_PUBLISHED = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
_STATE = "state.json"


class CheckpointStore:
    """The checkpoints of one run. One process (or process group) writes; any number may read meanwhile.

    Args:
        folder: where the checkpoints lie; created by the first save.
        keep: how many whole checkpoints remain after a save.
        group: a gloo process group of its own (never one that training uses) over the ranks that save and
            load together. `save`, `load`, `config` and `rewind` are then called on all of them, and they see
            one file system. None: this process alone.
    """

    def __init__(self, folder: str | Path, keep: int = 2, *, group: dist.ProcessGroup | None = None) -> None:
        if keep < 1:
            raise InvalidInput(f"{folder}: keep is {keep}; at least 1 checkpoint must remain")
        self.folder = Path(folder)
        self.keep = keep
        self._ranks = Ranks(group)

    def steps(self) -> list[int]:
        """The published steps, ascending."""
        with storage_errors(self.folder, "read"):
            if not self.folder.is_dir():
                return []
            names = (_PUBLISHED.fullmatch(entry.name) for entry in self.folder.iterdir())
            return sorted(int(name[1]) for name in names if name)

    def latest(self) -> int | None:
        """The highest published step, or None where there is no checkpoint."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """The folder that the checkpoint of `step` has or would have."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, state: Mapping[str, Any], *, config: Mapping[str, Any]) -> Path:
        """Publish `state` as the checkpoint of `step`, durably, and remove those beyond `keep`.

        Args:
            step: at least 0, and higher than every published step.
            state: nested dict whose leaves are tensors, None, bool, int, float, str or lists of such values.
                Its top-level keys are the parts that `load` can ask for. In a process group DTensors are
                saved by shard; of other tensors and of a part's values one rank's copy is kept.
            config: JSON-able; what must agree when the run is resumed, and what a reader needs to build it.

        Returns:
            The folder of the checkpoint.

        Raises:
            StorageError: disk full, no permission and the like; every earlier checkpoint is as it was.
            InvalidInput: the step is not higher, or something would not come back as it was.
        """
        tensors, values = split_state(state)
        content = {"torch": torch.__version__, "config": _as_json(config)}
        with contextlib.ExitStack() as building:
            partial = self._ranks.lead(lambda: building.enter_context(self._new_checkpoint(step)))
            write_tensors(partial, tensors, self._ranks)
            parts = self._ranks.gather(lambda: values)
            content["values"] = {key: part for values in reversed(parts) for key, part in values.items()}
            self._ranks.lead(lambda: atomic_write_json(partial / _STATE, content))
            digests = self._ranks.gather(lambda: _digests_of_share(partial, self._ranks))
            files = {name: digest for share in digests for name, digest in share.items()}
            self._ranks.lead(lambda: write_manifest(partial, files, writer=__version__))
            self._ranks.lead(building.close)
        self._ranks.lead(self._remove_old)
        return self.path(step)

    def load(
        self,
        step: int | None = None,
        *,
        into: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> State:
        """The state of a checkpoint, after every byte of it was compared with its manifest.

        Args:
            step: a published step; None for the latest. A damaged latest is an error, never skipped.
            into: a state whose tensors are filled in place (any device, DTensors of any sharding). It may
                lack whole parts (top-level keys); those are not read. None: everything, in new CPU tensors.
            config: what the checkpoint must have been saved with; None accepts any.

        Returns:
            The saved tree: the tensors of `into` where it is given, and the saved values.

        Raises:
            CheckpointError: there is none, or it is incomplete, damaged, of a newer format, of another
                configuration, or its tensors are not those of `into`; nothing in `into` has changed then.
        """
        folder, content = self._ranks.lead(lambda: self._checked(step, config))
        stored, values = stored_tensors(folder), content["values"]
        if into is None:
            tensors = {
                path: torch.empty(one.size, dtype=one.properties.dtype) for path, one in stored.items()
            }
        else:
            tensors, _ = split_state(into)
            saved_parts = values.keys() | {path.split("/")[0] for path in stored}
            stored = {path: one for path, one in stored.items() if path.split("/")[0] in into}
            values = {part: value for part, value in values.items() if part in into}
            absent = [f"{part} is absent there" for part in into if part not in saved_parts]
            if wrong := absent or [*mismatches(stored, tensors)]:
                raise CheckpointError(f"{folder}: is not a state to load here: {_shortened(wrong)}")
        read_tensors(folder, tensors, self._ranks)
        return join_state(tensors, values)

    def config(self, step: int | None = None) -> State:
        """The `config` that a checkpoint (the latest for None) was saved with; raises as `load` does."""
        _, content = self._ranks.lead(lambda: self._checked(step, None))
        config: State = content["config"]
        return config

    def rewind(self, step: int) -> None:
        """Forget every checkpoint after `step`: the run goes on from there and will publish other ones.

        Raises:
            InvalidInput: there is no checkpoint of `step` to go back to.
        """
        self._ranks.lead(lambda: self._rewind(step))

    def _rewind(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            raise InvalidInput(f"{self.folder}: cannot rewind to step {step}: {_listing(steps)}")
        # From the end, so that a kill on the way leaves a history without holes.
        for later in reversed(steps[steps.index(step) + 1 :]):
            remove_folder(self.path(later))

    @contextlib.contextmanager
    def _new_checkpoint(self, step: int) -> Iterator[Path]:
        latest = self.latest()
        if step < 0 or (latest is not None and step <= latest):
            raise InvalidInput(
                f"{self.folder}: cannot save step {step}: {_listing(self.steps())} and steps only grow; "
                "to go back, rewind the store first"
            )
        make_folder(self.folder)
        remove_partials(self.folder)
        with atomic_folder(self.path(step)) as partial:
            yield partial

    def _remove_old(self) -> None:
        whole = [step for step in self.steps() if self._is_whole(step)]
        for step in self.steps():
            if step not in whole[-self.keep :]:
                remove_folder(self.path(step))

    def _is_whole(self, step: int) -> bool:
        """Whether every file is there at its size; reading all bytes is left to `load`."""
        try:
            check_manifest(self.path(step), contents=False)
        except CheckpointError:
            return False
        return True

    def _checked(self, step: int | None, config: Mapping[str, Any] | None) -> tuple[Path, State]:
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{self.folder}: {wanted}: {_listing(steps)}")
        folder = self.path(steps[-1] if step is None else step)
        with storage_errors(folder, "read"):
            try:
                check_manifest(folder, contents=True)
            except CheckpointError as error:
                whole = [other for other in steps if self._is_whole(other)]
                raise CheckpointError(f"{error}; steps that look whole: {whole or None}") from error
            content = _read_state(folder)
        if config is not None and (fields := [*differences(content["config"], _as_json(config))]):
            raise CheckpointError(
                f"{folder}: was saved with another configuration: {_shortened(fields)}; "
                "go on with what it was saved with, or train into another folder"
            )
        return folder, content


def _read_state(folder: Path) -> State:
    try:
        content: State = json.loads((folder / _STATE).read_bytes())
        whole = isinstance(content["config"], dict) and isinstance(content["values"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{folder}: damaged or incomplete: {_STATE} is not readable")
    return content


def _digests_of_share(folder: Path, ranks: Ranks) -> dict[str, FileDigest]:
    names = sorted(entry.name for entry in folder.iterdir())
    with storage_errors(folder):
        return digest_files(folder, names[ranks.rank :: ranks.size])


def _as_json(config: Mapping[str, Any]) -> State:
    """What `config` is after a trip through a file: tuples are lists."""
    try:
        plain: State = json.loads(json.dumps(config))
    except TypeError as error:
        raise InvalidInput(f"checkpoint config: {error}") from error
    return plain


def _listing(steps: list[int]) -> str:
    return f"it holds step {', '.join(map(str, steps))}" if steps else "it holds no checkpoint"


def _shortened(phrases: list[str], limit: int = 8) -> str:
    more = [f"and {len(phrases) - limit} more"] if len(phrases) > limit else []
    return "; ".join(phrases[:limit] + more)

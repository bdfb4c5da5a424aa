"""The optimizer of a K3: Muon and AdamW by parameter name, fp32 masters, QK-clip (report §2.5, §3.3).

Does not know the schedule (it is told lr), the loss, or other ranks. Its state is keyed by parameter name and
complete from the start, so that a checkpoint of step 0 has the entries of a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from openk3.config import ModelConfig
from openk3.errors import CheckpointError, InvalidInput
from openk3.optim.adamw import AdamW
from openk3.optim.config import OptimConfig
from openk3.optim.muon import Muon
from openk3.optim.qk_clip import clip_factors, scale_logits
from openk3.optim.rules import assign
from openk3.optim.slots import Slot

State = Mapping[str, Mapping[str, torch.Tensor]]


class Optimizer:
    """Updates the parameters it was given, but for those that require no gradient.

    Args:
        named_parameters: as `model.named_parameters()` names them.
        config: see `OptimConfig`.
        model: for the sizes of heads.

    Raises:
        InvalidInput: a parameter matches no row of `openk3.optim.rules`, or several, or has other rows than
            the model's heads.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimConfig,
        model: ModelConfig,
    ) -> None:
        self._config = config
        self._model = model
        trained = {name: p for name, p in named_parameters if p.requires_grad}
        treatments = assign({name: tuple(p.shape) for name, p in trained.items()}, config, model)
        self._slots = {name: Slot.of(name, p, treatments[name]) for name, p in trained.items()}
        slots = list(self._slots.values())
        self._muon = Muon([(s, s.treatment.split) for s in slots if s.treatment.split is not None], config)
        self._adamw = AdamW([s for s in slots if s.treatment.split is None], config)

    def step(self, lr: float) -> None:
        """One update. A parameter without a gradient keeps its value and its state; a block of Muon, such as
        an expert, whose gradient is exactly zero keeps its value.
        """
        self._muon.step(lr)
        self._adamw.step(lr)
        self._publish()

    def qk_clip(self, max_logits: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Shrink the MLA heads whose logits exceed `config.qk_clip_tau`, in master and compute copies.

        Args:
            max_logits: `[H]` by 0-based layer, the MTP layer after the last; see `clip_factors`.

        Returns:
            gamma `[H]` by layer; 1 where nothing was clipped.

        Raises:
            TrainingDiverged: a logit is NaN or +inf.
            InvalidInput: a layer is not MLA, or its projections are not trained here.
        """
        factors = clip_factors(max_logits, self._config.qk_clip_tau)
        for layer, gamma in factors.items():
            module = f"layers.{layer}" if layer < self._model.num_layers else "mtp.layer"
            names = [f"{module}.self_attn.{part}.weight" for part in ("q_proj", "q_b_proj", "kv_b_proj")]
            slots = [self._slots[name] for name in names if name in self._slots]
            if self._model.mla is None or [slot.name for slot in slots[1:]] != names[2:]:
                raise InvalidInput(f"qk_clip: {module} has no trained queries and kv_b_proj of MLA")
            query, kv_b = slots
            scale_logits(query.master, kv_b.master, gamma, self._model.mla)
            query.publish()
            kv_b.publish()
        return factors

    def zero_grad(self) -> None:
        """Free all gradients."""
        for slot in self._slots.values():
            slot.parameter.grad = None

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter name, the live tensors, not copies: moments, step counts, fp32 masters if any."""
        moments = {**self._muon.state, **self._adamw.state}
        masters = {name: {"master": slot.master} for name, slot in self._slots.items() if slot.owns_master}
        return {name: {**moments[name], **masters.get(name, {})} for name in self._slots}

    def load_state_dict(self, saved: State) -> None:
        """Copy a saved state in, and round its masters into the parameters.

        Raises:
            CheckpointError: names every entry that is missing, unexpected, or of another shape or dtype.
                Nothing was changed.
        """
        own, given = _flat(self.state_dict()), _flat(saved)
        problems = [f"{key} is missing" for key in own.keys() - given.keys()]
        problems += [f"{key} is unexpected" for key in given.keys() - own.keys()]
        problems += [
            f"{key} is {_form(given[key])} instead of {_form(own[key])}"
            for key in own.keys() & given.keys()
            if _form(given[key]) != _form(own[key])
        ]
        if problems:
            raise CheckpointError(f"optimizer state of another run: {'; '.join(sorted(problems))}")
        for key, tensor in own.items():
            tensor.copy_(given[key])
        self._publish()

    def _publish(self) -> None:
        for slot in self._slots.values():
            slot.publish()


def _flat(state: State) -> dict[str, torch.Tensor]:
    return {f"{name} {entry}": value for name, entries in state.items() for entry, value in entries.items()}


def _form(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

"""The optimizer of a K3: Muon and AdamW by parameter name, fp32 masters, QK-clip (report §2.5, §3.3).

Does not know the schedule (it is told lr), the loss, or other ranks. Its state is keyed by parameter name and
complete from the start, so that a checkpoint of step 0 has the entries of a later one.

Whether a step is taken may be decided on the device: a factor on the gradients that is 0 or not finite skips
it. With kernels (`openk3.optim.fused`) the host waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, Never, SupportsIndex

import torch

from openk3.config import ModelConfig
from openk3.errors import CheckpointError, InvalidInput, KernelUnavailable
from openk3.ops.dispatch import choose
from openk3.ops.traces import named
from openk3.optim import fused
from openk3.optim.adamw import AdamW
from openk3.optim.config import OptimConfig
from openk3.optim.muon import Muon
from openk3.optim.qk_clip import clip_factors, quiet_factors, scale_logits
from openk3.optim.rules import assign
from openk3.optim.slots import Slot

if TYPE_CHECKING:
    from openk3.optim.fused.adamw import FusedAdamW
    from openk3.optim.fused.muon import FusedMuon

State = Mapping[str, Mapping[str, torch.Tensor]]


class Optimizer:
    """Updates the parameters it was given, but for those that require no gradient.

    Args:
        named_parameters: as `model.named_parameters()` names them.
        config: see `OptimConfig`.
        model: for the sizes of heads.
        implementation: force "eager" or "triton" (fp32 masters, all on one device); by default the kernels on
            a GPU that has checked them.

    Raises:
        InvalidInput: a parameter matches no row of `openk3.optim.rules`, or several, or has other rows than
            the model's heads.
        KernelUnavailable: the forced implementation cannot run here.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimConfig,
        model: ModelConfig,
        *,
        implementation: Literal["eager", "triton"] | None = None,
    ) -> None:
        self._config = config
        self._model = model
        trained = {name: p for name, p in named_parameters if p.requires_grad}
        treatments = assign({name: tuple(p.shape) for name, p in trained.items()}, config, model)
        self._slots = {name: Slot.of(name, p, treatments[name]) for name, p in trained.items()}
        slots = list(self._slots.values())
        matrices = [(slot, slot.treatment.split) for slot in slots if slot.treatment.split is not None]
        others = [slot for slot in slots if slot.treatment.split is None]
        self._eager: tuple[Muon, AdamW] | None = None
        self._fused: tuple[FusedMuon, FusedAdamW] | None = None
        if _fuses(slots, implementation):
            from openk3.optim.fused.adamw import FusedAdamW
            from openk3.optim.fused.muon import FusedMuon

            self._fused = FusedMuon(matrices, config), FusedAdamW(others, config)
            self._launch = _all_of(self._fused)
        else:
            self._eager = Muon(matrices, config), AdamW(others, config)
        muon, adamw = self._fused or self._eager  # type: ignore[misc]
        self._moments: dict[str, dict[str, torch.Tensor]] = {**muon.state, **adamw.state}

    @named
    def step(self, lr: float | torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """One update. A parameter without a gradient keeps its value and its state; a block of Muon, such as
        an expert, whose gradient is exactly zero keeps its value.

        Args:
            lr: of the step; `[]` on the parameters' device, or a number.
            scale: floating `[]` there: multiplies the gradients, which stay as they are. Where it is 0, inf
                or NaN nothing changes: no value, moment or step count. None is 1. With kernels the host does
                not wait for either; the eager step reads them.
        """
        if self._eager:
            factor = 1.0 if scale is None else float(scale)
            if factor != 0 and math.isfinite(factor):
                for rule in self._eager:
                    rule.step(float(lr), factor)
                self._publish()
        elif self._fused:
            device = next(iter(self._slots.values())).master.device
            if not isinstance(lr, torch.Tensor):
                lr = torch.full((), lr, dtype=torch.float64, device=device)
            factors = torch.ones((), device=device) if scale is None else scale.float()
            held = [rule.find_gradients() for rule in self._fused]
            self._launch(lr.double(), factors)
            del held

    @named
    def qk_clip(
        self, max_logits: Mapping[int, torch.Tensor], scale: torch.Tensor | None = None
    ) -> dict[int, torch.Tensor]:
        """Shrink the MLA heads whose logits exceed `config.qk_clip_tau`, in master and compute copies.

        Nothing changes where one logit of any layer is NaN or +inf, or where `scale` skipped the step.

        Args:
            max_logits: `[H]` by 0-based layer, the MTP layer after the last; see `clip_factors`.
            scale: as in `step`.

        Returns:
            gamma `[H]` by layer; 1 where nothing was clipped, NaN where the logit is NaN or +inf. On a GPU
            the host has not waited for them: see `check_factors`.

        Raises:
            TrainingDiverged: a logit is NaN or +inf, where the logits are on a CPU and the step was taken.
            InvalidInput: a layer is not MLA, or its projections are not trained here.
        """
        found = quiet_factors(max_logits, self._config.qk_clip_tau)
        if not found:
            return {}
        applies = torch.stack([gamma.isfinite().all() for gamma in found.values()]).all()
        if scale is not None:
            taken = scale.isfinite() & (scale != 0)
            found = {
                layer: gamma.masked_fill(~(taken | gamma.isnan()), 1.0) for layer, gamma in found.items()
            }
            applies = applies & taken
        if not applies.is_cuda and (scale is None or taken):
            clip_factors(max_logits, self._config.qk_clip_tau)  # raises
        for layer, gamma in found.items():
            module = f"layers.{layer}" if layer < self._model.num_layers else "mtp.layer"
            names = [f"{module}.self_attn.{part}.weight" for part in ("q_proj", "q_b_proj", "kv_b_proj")]
            slots = [self._slots[name] for name in names if name in self._slots]
            if self._model.mla is None or [slot.name for slot in slots[1:]] != names[2:]:
                raise InvalidInput(f"qk_clip: {module} has no trained queries and kv_b_proj of MLA")
            query, kv_b = slots
            scale_logits(query.master, kv_b.master, gamma.masked_fill(~applies, 1.0), self._model.mla)
            query.publish()
            kv_b.publish()
        return found

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        """Copies would update masters and addresses that are not their parameters'."""
        raise InvalidInput(
            "optimizer: cannot be copied or pickled; make one for the other parameters, load its state_dict"
        )

    def zero_grad(self) -> None:
        """Free all gradients."""
        for slot in self._slots.values():
            slot.parameter.grad = None

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter name, the live tensors, not copies: moments, step counts, fp32 masters if any."""
        masters = {name: {"master": slot.master} for name, slot in self._slots.items() if slot.owns_master}
        return {name: {**self._moments[name], **masters.get(name, {})} for name in self._slots}

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


def _all_of(rules: tuple[FusedMuon, FusedAdamW]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def launch(lr: torch.Tensor, factor: torch.Tensor) -> None:
        for rule in rules:
            rule.launch(lr, factor)

    return launch


def _fuses(slots: list[Slot], wanted: Literal["eager", "triton"] | None) -> bool:
    if not slots:
        return False
    problem = fused.problem(slots)
    if wanted == "triton" and problem:
        raise KernelUnavailable(f"optimizer: {problem}; ask for implementation='eager'")
    by_default = fused.KERNELS[0].checked
    first = slots[0].master
    return choose("optimizer", first, wanted, kernels=problem is None, by_default=by_default) == "triton"


def _flat(state: State) -> dict[str, torch.Tensor]:
    return {f"{name} {entry}": value for name, entries in state.items() for entry, value in entries.items()}


def _form(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

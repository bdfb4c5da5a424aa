"""A model from a checkpoint in the released layout.

Tensors come one at a time, each read, widened or unpacked, and put into its place: beside the model itself
the host holds one tensor. Vision tensors are checked with the others and not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from openk3.checkpoint.official.folder import PACKED, SCALE, OfficialFolder
from openk3.checkpoint.official.layout import TensorSpec
from openk3.errors import CheckpointError, InvalidInput
from openk3.model import K3
from openk3.ops.mx import LARGEST_SCALE, decode_mxfp4

Tensor = torch.Tensor


def load_official(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> K3:
    """The text model of the checkpoint at `path`, ready to run (`eval`).

    Args:
        dtype: of weights and activations. float32 and bfloat16 hold every BF16 and MXFP4 value exactly, and
            float32 every F16 value.

    Raises:
        CheckpointError: the folder cannot be loaded or its data is damaged; says where.
    """
    with OfficialFolder.open(path) as folder:
        model = K3(folder.config.model_copy(update={"vision": None}), dtype=dtype, device=device)
        fill(model, folder)
    return model.eval()


@torch.no_grad()
def fill(model: K3, folder: OfficialFolder) -> None:
    """Copy every tensor of `folder` into `model`, whose shapes are the folder's."""
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for spec, value in text_tensors(folder, model.embed_tokens.weight.dtype):
        assert spec.ours is not None
        place = places[spec.ours]
        (place if spec.expert is None else place[spec.expert]).copy_(value)


def text_tensors(folder: OfficialFolder, dtype: torch.dtype) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Each weight of the text model in the shape that our model has it in, experts unpacked to `dtype`.

    Of an MXFP4 pair the `.weight_packed` tensor's spec stands for both.
    """
    for name, spec in folder.specs.items():
        if spec.ours is None or name.endswith(SCALE):
            continue
        if name.endswith(PACKED):
            yield spec, decoded(folder, name, dtype)
        elif spec.ours.endswith(".A_log"):
            yield spec, unpadded(read_numbers(folder, name), folder, name)
        else:
            yield spec, read_numbers(folder, name)


def read_numbers(folder: OfficialFolder, name: str) -> Tensor:
    """The tensor called `name` as stored, all of it numbers.

    Raises:
        CheckpointError: it holds NaN, infinity, or a scale of such values.
    """
    stored = folder.read(name)
    if stored.is_floating_point():
        wrong = not all(bool(end.isfinite()) for end in stored.aminmax())  # no copy; NaN is either end
    else:
        wrong = name.endswith(SCALE) and int(stored.max()) > LARGEST_SCALE
    if wrong:
        raise CheckpointError(f"{folder.tensors[name].file}: {name} holds values that are not finite")
    return stored


def decoded(folder: OfficialFolder, name: str, dtype: torch.dtype) -> Tensor:
    """The expert matrix whose packed half is called `name`, `[out, in]` in `dtype`."""
    scale = folder.read(name.removesuffix(PACKED) + SCALE)
    try:
        return decode_mxfp4(folder.read(name), scale, dtype)
    except InvalidInput as error:
        raise CheckpointError(f"{folder.tensors[name].file}: {name}: {error}") from None


def unpadded(stored: Tensor, folder: OfficialFolder, name: str) -> Tensor:
    """`A_log` `[H]` from its stored form, `[1, 1, H, 1]` or zero-padded.

    Raises:
        CheckpointError: the padding is not zero, so the number of heads is not what the configuration says.
    """
    assert folder.config.kda is not None
    heads = folder.config.kda.num_heads
    flat = stored.flatten()
    if flat[heads:].count_nonzero():
        raise CheckpointError(f"{folder.tensors[name].file}: {name} is not zero behind its {heads} heads")
    return flat[:heads]

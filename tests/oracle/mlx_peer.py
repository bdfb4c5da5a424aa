"""mlx-lm's `kimi_k3` and `kimi_linear` as sides of a comparison. Imported only where mlx-lm is."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model

from oracle.comparison import Feed

Tensor = torch.Tensor


class MlxPeer:
    """A folder in either form, computed by mlx-lm in fp32 on the CPU; MXFP4 experts stay packed.

    mlx-lm renames through its own `sanitize` and then demands that names and shapes are exactly its model's.
    """

    def __init__(self, folder: Path) -> None:
        mx.set_default_device(mx.cpu)
        self.model, _ = load_model(folder, strict=True)
        self.model.set_dtype(mx.float32)
        self.model.eval()

    def logits(self, tokens: Tensor) -> Tensor:
        return _to_torch(self.model(_to_mlx(tokens)))

    def start(self) -> Feed:
        cache = self.model.make_cache()
        return lambda tokens: _to_torch(self.model(_to_mlx(tokens), cache=cache))


def _to_mlx(tokens: Tensor) -> mx.array:
    return mx.array(tokens[None].numpy())


def _to_torch(logits: mx.array) -> Tensor:
    return torch.from_numpy(np.array(logits[0]))

"""A model whose weights stay on disk: the passes of `openk3.model.K3`, with what each layer needs brought in.

Activations and products are float32, which holds every stored weight exactly: a layer is widened when it
runs, an expert block by block. Products of bfloat16 would need no widening, but torch on a CPU keeps half a
megabyte for each shape of one, and decoding makes new shapes with every token: no budget would hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from openk3.checkpoint.official.folder import OfficialFolder
from openk3.checkpoint.official.layout import TensorSpec
from openk3.checkpoint.streamed.budget import Needs, divide
from openk3.checkpoint.streamed.dispatch import StreamedDispatch
from openk3.checkpoint.streamed.ends import Head, embedding_rows
from openk3.checkpoint.streamed.experts import ExpertSlots
from openk3.checkpoint.streamed.trunk import StoredLayer, Trunk
from openk3.checkpoint.streamed.usage import Usage
from openk3.model.decoder import DecoderLayer, Output, check_packed
from openk3.model.kda import KdaAttention
from openk3.model.layers import At, Linear, RmsNorm
from openk3.model.protocols import LOCAL, Seams
from openk3.model.residual import Stream, leave
from openk3.model.state import DecodeState, LayerState

Tensor = torch.Tensor

COMPUTE = torch.float32
READERS = 4
"""Experts that are read at once."""


class StreamedK3:
    """The text model of a checkpoint in the released layout, run on the CPU within a budget of bytes.

    Use as a context manager, or `close` it. It goes where a `K3` goes in `openk3.model.generate`: one
    sequence or several, any number of tokens at a time. Equal inputs give equal bits at every budget.

    Args:
        folder: stays the caller's to close.
        budget: bytes for all that is held: layers, head, experts, buffers that files are read into, and what
            a layer's weights are widened and joined in. States and activations come on top: they grow with
            the tokens.
        readers: how many experts are read at once.

    Attributes:
        division: what is held.
        usage: what was read so far.

    Raises:
        InvalidInput: the budget is too small; says what would do.
        CheckpointError: the data is damaged; says where.
    """

    def __init__(
        self,
        folder: OfficialFolder,
        budget: int,
        *,
        readers: int = READERS,
    ) -> None:
        config = self.config = folder.config
        self.usage = Usage()
        self._folder = folder
        self._ahead = ThreadPoolExecutor(1, "read-ahead")
        self._readers = ThreadPoolExecutor(readers, "read-expert")
        with ExitStack() as undo:
            undo.callback(self.close)
            whole = {spec.ours: spec for spec in folder.specs.values() if spec.ours and spec.expert is None}
            self._embedding = whole["embed_tokens.weight"].name
            head = self._embedding if config.tie_embeddings else whole["lm_head.weight"].name
            self._head = Head(head, folder.tensors[head], folder.reader, self._ahead, self.usage)
            self._experts = ExpertSlots(folder, self._readers, self.usage)
            self._layers = [self._layer(index) for index in range(config.num_layers)]
            stored = [
                StoredLayer(layer, folder, [spec for spec in whole.values() if spec.layer == layer.index])
                for layer in self._layers
            ]
            self._trunk = Trunk(stored, folder, self._ahead, self.usage)
            self._final = _Final(folder, whole)
            joined = max(_joined_bytes(layer) for layer in self._layers)
            self.division = divide(
                budget,
                Needs(
                    always=self._final.bytes + self._trunk.working_bytes + joined,
                    layers=tuple(layer.stored.bytes for layer in stored),
                    head=self._head.bytes,
                    head_block=self._head.block_bytes,
                    expert=self._experts.slot_bytes,
                    experts=self._experts.count,
                    chosen=config.moe.experts_per_token if config.moe else 0,
                ),
            )
            with self.usage.during(self.usage.start):
                self._trunk.hold(self.division.streamed)
                self._head.hold(self.division.head_pinned)
                self._experts.hold(self.division.slots)
            undo.pop_all()

    def __enter__(self) -> StreamedK3:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for reads that are under way, and end the threads."""
        for executor in (self._ahead, self._readers):
            executor.shutdown(cancel_futures=True)

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        return torch.device("cpu")

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cu_seqlens: Tensor, *, state: DecodeState | None = None) -> Output:
        """Packed tokens through the decoder, as `K3.forward`.

        Raises:
            InvalidInput: shapes, borders or token ids are wrong.
            CheckpointError: a file ends early, cannot be read, or is damaged.
        """
        check_packed(tokens, cu_seqlens, self.config.vocab_size, state)
        single = state is not None and tokens.shape[0] < cu_seqlens.shape[0]
        phase = self.usage.decode if single else self.usage.prompt
        phase.tokens += tokens.shape[0]
        with self.usage.during(phase):
            stored = self._folder.tensors[self._embedding]
            rows = embedding_rows(self._embedding, stored, tokens, self._folder.reader, self.usage)
            stream, states = Stream((), rows.to(COMPUTE)), list[LayerState]()
            for index, layer in enumerate(self._layers):
                inputs = stream, cu_seqlens, state.layers[index] if state else None
                self._trunk.bring(index)
                stream, new = layer(*inputs)
                states.append(new)
            final = self._final
            hidden, mixed = leave(stream, final.proj, final.proj_norm, final.norm, "output", None)
            lengths = cu_seqlens.diff() + (state.lengths if state else 0)
            return Output(hidden, mixed, DecodeState(tuple(states), lengths))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of `hidden` `[M, d]`: `[M, V]` in float32."""
        with self.usage.during(self.usage.current):
            return self._head.logits(hidden)

    def _layer(self, index: int) -> DecoderLayer:
        """A layer without weights, whose experts come from the slots."""
        dispatch = StreamedDispatch(index, self._experts)
        seams = Seams(dispatch=dispatch, context=LOCAL.context, tag=LOCAL.tag)
        return DecoderLayer(self.config, index, seams, At(COMPUTE, torch.device("meta"))).eval()


class _Final(nn.Module):
    """The last mix and norm, which are small and always held."""

    def __init__(self, folder: OfficialFolder, whole: Mapping[str, TensorSpec]) -> None:
        super().__init__()
        d, eps, at = folder.config.hidden_size, folder.config.rms_norm_eps, At(COMPUTE, torch.device("cpu"))
        self.norm = _filled(RmsNorm(d, eps, at), folder, whole["norm.weight"])
        mixes = "output_attn_res_proj.weight" in whole
        self.proj = _filled(Linear(d, 1, at), folder, whole["output_attn_res_proj.weight"]) if mixes else None
        self.proj_norm = (
            _filled(RmsNorm(d, eps, at), folder, whole["output_attn_res_norm.weight"]) if mixes else None
        )

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())


M = TypeVar("M", RmsNorm, Linear)


@torch.no_grad()
def _filled(module: M, folder: OfficialFolder, spec: TensorSpec) -> M:
    module.weight.copy_(folder.read(spec.name))
    return module


def _joined_bytes(layer: DecoderLayer) -> int:
    """What `KdaAttention` joins into one matrix for each product."""
    attention = layer.self_attn
    if not isinstance(attention, KdaAttention):
        return 0
    joined = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
    return sum(weight.numel() * weight.element_size() for weight in joined)

"""`TrainConfig`: everything that decides a training run, as one frozen value.

A run is a pure function of it (and of the data it names): what is not here, such as progress display,
changes no number. Files and command lines are read by `openk3.train.recipes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from openk3.config import Count, ModelConfig, StrictModel, preset
from openk3.data.probes import Probe
from openk3.errors import InvalidInput
from openk3.optim.config import OptimConfig, ScheduleConfig
from openk3.train.spike import SpikeConfig

Order = Literal["documents", "windows"]
"""How windows follow each other: "documents" reads one shuffled document after another, so that a step of few
windows is mostly of one document; "windows" shuffles the windows too."""


class CorpusData(StrictModel):
    """A corpus recipe, prepared into a cache on first use."""

    kind: Literal["corpus"] = "corpus"
    recipe: str = "stdlib"
    """A recipe of `openk3.data` by name, or a TOML file."""
    tokenizer: Path | None = None
    """A finished tokenizer; None trains one with the model's vocabulary size."""
    cache: Path | None = None
    """Folder of prepared corpora; None is the user's cache."""
    order: Order = "documents"


class Shards(StrictModel):
    """A prepared folder and its weight among others."""

    folder: Path
    weight: PositiveFloat = 1.0


class ShardsData(StrictModel):
    """Folders that `openk3 data prepare` made, mixed by weight."""

    kind: Literal["shards"] = "shards"
    sources: tuple[Shards, ...] = Field(min_length=1)
    order: Order = "documents"


class SftData(StrictModel):
    """Questions and answers: the loss is on the answers."""

    kind: Literal["sft"] = "sft"
    file: Path
    """JSON lines with `question` and `answer`."""
    tokenizer: Path
    """The tokenizer of the model that is fine-tuned (its run folder has it)."""
    too_long: Literal["error", "truncate"] = "error"
    """What to do with an exchange of more than `train.context` tokens."""


class ProbeData(StrictModel):
    """A recall probe: made sequences, with the loss on the answers. Measured by `openk3.train.probe`."""

    kind: Literal["probe"] = "probe"
    probe: Probe
    """What is asked, and how hard; see `openk3.data.probes`."""
    lengths: tuple[Count, ...] = ()
    """Tokens of a training sequence, one of these with equal chance; each must divide `train.context`, and
    none is `train.context` alone."""
    measured: tuple[Count, ...] = ()
    """Lengths at which answers are counted after the training; none is `train.context` alone."""
    measured_sequences: Count = 128
    """Sequences of each of them."""


class GivenData(StrictModel):
    """The caller of `openk3.train.run` passes the data itself."""

    kind: Literal["given"] = "given"


DataConfig = Annotated[CorpusData | ShardsData | SftData | ProbeData | GivenData, Field(discriminator="kind")]


class LoopConfig(StrictModel):
    """Length and shape of the run."""

    steps: Count | None = None
    tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """Length of the run: give one of `steps` and `tokens`."""
    context: Count = 512
    """Tokens of a window."""
    micro_batch_tokens: Count = 4096
    """Tokens of one forward and backward; a multiple of `context`."""
    accumulation: Count = 1
    """Micro-batches of a step, over all ranks together."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of weights and activations; the optimizer keeps fp32 masters of bf16 weights."""
    recompute: bool = False
    """Keep each layer's input only and run the layer again in the backward."""
    mtp_weight: NonNegativeFloat = 0.0
    """Weight of the multi-token prediction loss; positive exactly when the model has that layer."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the initial weights and of the sample order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    spike: SpikeConfig = SpikeConfig()

    @model_validator(mode="after")
    def _check(self) -> LoopConfig:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("give the length of the run as either `steps` or `tokens`")
        if self.micro_batch_tokens % self.context:
            raise ValueError(
                f"micro_batch_tokens {self.micro_batch_tokens} must be a multiple of context {self.context}"
            )
        return self

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, padding included."""
        return self.micro_batch_tokens * self.accumulation

    @property
    def total_steps(self) -> int:
        """Steps of the run; a token budget is rounded up."""
        return self.steps if self.steps is not None else math.ceil((self.tokens or 0) / self.step_tokens)


class EvaluationConfig(StrictModel):
    """When validation loss and bits per byte are measured. The end of a run always measures all of it."""

    every: Count | None = 250
    """Steps between measurements; None leaves only the last."""
    tokens: Count | None = 131072
    """Measure on the first documents up to about this many tokens; None on all."""
    context: Count | None = None
    """Tokens of a window; None is `train.context`."""


class CheckpointConfig(StrictModel):
    every: Count = 250
    """Steps between checkpoints; the end of the run is one too."""
    keep: Count = 2
    """Checkpoints that stay."""


class LoggingConfig(StrictModel):
    detail_every: Count = 50
    """Steps between rows with AttnRes weights, KDA state norms and loads of single experts."""
    tensorboard: bool = True
    peak_flops: PositiveFloat | None = None
    """Peak of the device for MFU, operations per second; None knows an H200 and leaves others out."""


class TrainConfig(StrictModel):
    """A training run."""

    model: ModelConfig
    """A preset's name, or a table of fields; `preset` in the table starts from that preset."""
    data: DataConfig
    train: LoopConfig
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @field_validator("model", mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        if isinstance(value, str):
            return _preset(value)
        if isinstance(value, Mapping) and "preset" in value:
            changes = {key: inner for key, inner in value.items() if key != "preset"}
            return _merged(_preset(value["preset"]).model_dump(), changes)
        return value

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.train.context > self.model.max_context:
            raise ValueError(
                f"train.context {self.train.context} is more than model.max_context {self.model.max_context}"
            )
        if bool(self.model.mtp_layers) != bool(self.train.mtp_weight):
            raise ValueError(
                f"train.mtp_weight is {self.train.mtp_weight} and model.mtp_layers {self.model.mtp_layers}: "
                "the weight must be positive exactly when there is such a layer"
            )
        return self


def _preset(name: str) -> ModelConfig:
    try:
        return preset(name)
    except InvalidInput as error:  # also a ValueError, but pydantic would print its whole type
        raise ValueError(str(error)) from None


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the fields of `changes`, table by table."""
    out = dict(base)
    for key, value in changes.items():
        below = out.get(key)
        out[key] = (
            _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return out

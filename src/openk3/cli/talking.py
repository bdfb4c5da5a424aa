"""What `generate`, `chat` and `quickstart` share: a model with its tokenizer, and text as it comes."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

import torch

from openk3.chat import Tokenizer
from openk3.chat.tokenizer import FILE_NAME
from openk3.errors import InvalidInput
from openk3.model.generate import LanguageModel, Sampling, generate
from openk3.train.weights import load_model


@dataclass(frozen=True)
class Speaker:
    """A model that can be written to and read from in text."""

    model: LanguageModel
    tokenizer: Tokenizer

    @property
    def stop(self) -> frozenset[int]:
        """What ends a text or an answer; <|close|> opens the framing behind an answer, which nobody reads."""
        return frozenset({self.tokenizer.eos_id, self.tokenizer.end_of_msg_id, self.tokenizer.close_id})

    @property
    def writable(self) -> torch.Tensor:
        """bool `[V]`: ordinary tokens and those that end; other control tokens are for prompts."""
        allowed = torch.zeros(self.tokenizer.vocab_size, dtype=torch.bool)
        allowed[: self.tokenizer.n_ranks] = True
        allowed[list(self.stop)] = True
        return allowed


def load(run: Path, device: torch.device | None = None) -> Speaker:
    """The model and tokenizer of a run, of one of its checkpoints, or of a folder in the released layout.

    device: where it runs, the CPU by default; in bf16 on another.

    Raises:
        InvalidInput, CheckpointError: something of the two is missing or damaged.
    """
    half = device is not None and device.type != "cpu"
    return with_tokenizer(
        load_model(run, dtype=torch.bfloat16 if half else torch.float32, device=device), run
    )


def device_named(name: str | None) -> torch.device:
    """Where to write: the device called so, or by default a CUDA device where there is one.

    Raises:
        InvalidInput: torch does not know it, or cannot use it here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(f"--device {name}: torch knows no such device") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"--device {name}: models run on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"--device {name}: torch {torch.__version__} sees no CUDA device here")
    return device


def with_tokenizer(model: LanguageModel, run: Path) -> Speaker:
    """`model` and the tokenizer that lies beside its weights in `run`.

    Raises:
        InvalidInput: there is none, or it is another model's.
    """
    tokenizer = Tokenizer.load(tokenizer_file(run))
    if tokenizer.vocab_size != model.config.vocab_size:
        raise InvalidInput(
            f"{run}: the tokenizer has {tokenizer.vocab_size} tokens, the model {model.config.vocab_size}"
        )
    return Speaker(model, tokenizer)


def tokenizer_file(run: Path) -> Path:
    """The vocabulary of a run, of one of its checkpoints, or of a folder in the released layout.

    Raises:
        InvalidInput: there is none.
    """
    for folder in (run, *run.parents[:2]):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    raise InvalidInput(f"{run}: no {FILE_NAME} in it or above it; is it a run folder?")


def write_stream(speaker: Speaker, prompt: list[int], most: int, sampling: Sampling) -> str:
    """Print the continuation of `prompt` as it comes, in whole characters, and end the line; returns it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    tokens = generate(
        speaker.model, prompt, most, sampling=sampling, stop=speaker.stop, allowed=speaker.writable
    )
    written = []
    for token in tokens:
        written.append(decoder.decode(speaker.tokenizer.decode_bytes([token])))
        print(written[-1], end="", flush=True)
    written.append(decoder.decode(b"", final=True))
    print(written[-1], flush=True)
    return "".join(written)

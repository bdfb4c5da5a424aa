"""From `TrainConfig.data` to what a run reads: a stream of samples, held-out documents, their tokenizer."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from openk3.chat import Tokenizer
from openk3.chat.template import example
from openk3.config import digest
from openk3.data import (
    Example,
    Examples,
    Mixture,
    ShuffledWindows,
    TokenDataset,
    TokenSplit,
    Windows,
    load_recipe,
    open_dataset,
    prepare,
)
from openk3.data.debian import default_cache
from openk3.data.loader import Stream
from openk3.data.probes import ProbeStream
from openk3.errors import InvalidInput
from openk3.train.config import CorpusData, GivenData, Order, ProbeData, SftData, ShardsData, TrainConfig

Preparing = Callable[[str, int, int], None]
"""Called with (stage, done, total) while a corpus is prepared."""


@dataclass(frozen=True)
class TrainingData:
    """What a run reads. `validation` may be empty; `tokenizer` is kept in the run folder, if there is one.

    `identity`: what it is, by hashes of its content, JSON-able: a run goes on with the same only, wherever it
    lies by then. `notes`: what a person should know before the run, such as what did not fit.
    """

    stream: Stream
    validation: tuple[TokenSplit, ...] = ()
    tokenizer: Tokenizer | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def open_data(config: TrainConfig, preparing: Preparing) -> TrainingData:
    """Open (and on first use prepare) the data of a run.

    Raises:
        InvalidInput: a folder or file is missing, wrong or empty, or its vocabulary is not the model's.
    """
    match config.data:
        case CorpusData() as corpus:
            folder = _prepared(corpus, config.model.vocab_size, preparing)
            return _mixture({folder: 1.0}, corpus.order, config)
        case ShardsData(sources=sources, order=order):
            weights = {source.folder: source.weight for source in sources}
            if len(weights) < len(sources):
                raise InvalidInput(
                    f"data.sources: a folder stands twice in {[str(s.folder) for s in sources]}"
                )
            return _mixture(weights, order, config)
        case SftData() as sft:
            return _exchanges(sft, config)
        case ProbeData() as made:
            return _probe(made, config)
        case GivenData():
            raise InvalidInput("data.kind is 'given': pass the data to openk3.train.run(..., data=...)")


def _prepared(corpus: CorpusData, vocab_size: int, preparing: Preparing) -> Path:
    """The folder of a prepared corpus; its name tells corpora, vocabularies and Python versions apart."""
    recipe = load_recipe(corpus.recipe)
    tokenizer = Tokenizer.load(corpus.tokenizer) if corpus.tokenizer else vocab_size
    of_tokenizer = str(vocab_size) if isinstance(tokenizer, int) else tokenizer.sha256
    key = sha256(f"{digest(recipe)} {of_tokenizer} {platform.python_version()}".encode()).hexdigest()[:12]
    folder = (corpus.cache or default_cache()) / "corpora" / f"{recipe.name}-{vocab_size}-{key}"
    if not folder.exists():
        prepare(recipe, folder, tokenizer=tokenizer, progress=preparing)
    return folder


def _mixture(weights: dict[Path, float], order: Order, config: TrainConfig) -> TrainingData:
    vocab = config.model.vocab_size
    datasets: dict[Path, TokenDataset] = {f: open_dataset(f, vocab_size=vocab) for f in weights}
    first, *others = datasets.values()
    for other in others:
        if other.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
            raise InvalidInput(
                f"data.sources: {first.folder} and {other.folder} were made with different tokenizers; "
                "prepare both with the same one"
            )
    context, seed = config.train.context, config.train.seed
    streams: dict[str, Stream] = {}
    for number, dataset in enumerate(datasets.values()):
        windows = Windows(dataset.train, context, seed)
        name = f"{number}-{dataset.manifest.provenance.recipe.name}"
        streams[name] = windows if order == "documents" else ShuffledWindows(windows)
    stream: Stream = next(iter(streams.values()))
    if others:
        stream = Mixture(streams, dict(zip(streams, weights.values(), strict=True)))
    identity = {
        "sources": [
            {"sha256": dataset.manifest.content_sha256, "weight": weight}
            for dataset, weight in zip(datasets.values(), weights.values(), strict=True)
        ]
    }
    validation = tuple(dataset.validation for dataset in datasets.values())
    return TrainingData(stream, validation, first.tokenizer, identity)


def _exchanges(sft: SftData, config: TrainConfig) -> TrainingData:
    tokenizer = Tokenizer.load(sft.tokenizer)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise InvalidInput(
            f"{sft.tokenizer} has a vocabulary of {tokenizer.vocab_size}, the model {config.model.vocab_size}"
        )
    if not sft.file.is_file():
        raise InvalidInput(f"{sft.file}: no such file")
    content = sft.file.read_bytes()
    examples = []
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"{sft.file}: line {number}"
        try:
            examples.append(Example(*example(*_exchange(line), tokenizer)))
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
    if not examples:
        raise InvalidInput(f"{sft.file}: holds no examples")
    stream = Examples(
        examples,
        config.train.context,
        config.train.seed,
        pad_id=tokenizer.pad_id,
        too_long=sft.too_long,
    )
    notes: tuple[str, ...] = ()
    if stream.truncated:
        notes = (
            f"{sft.file}: {stream.truncated:,} of {len(examples):,} exchanges are longer than train.context "
            f"{config.train.context} and lost their ends, {stream.truncated_tokens:,} tokens in all",
        )
    identity = {
        "exchanges": sha256(content).hexdigest(),
        "tokenizer": tokenizer.sha256,
        "too_long": sft.too_long,
    }
    return TrainingData(stream, tokenizer=tokenizer, identity=identity, notes=notes)


def _probe(made: ProbeData, config: TrainConfig) -> TrainingData:
    probe, loop = made.probe, config.train
    if probe.vocab_size > config.model.vocab_size:
        raise InvalidInput(
            f"data.probe: {probe.kind} has a vocabulary of {probe.vocab_size}, model.vocab_size is "
            f"{config.model.vocab_size}; it must be at least that"
        )
    lengths = made.lengths or (loop.context,)
    stream = ProbeStream(probe, lengths, loop.context, loop.seed)
    return TrainingData(stream, identity={"probe": probe.model_dump(mode="json"), "lengths": list(lengths)})


def _exchange(line: bytes) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON in UTF-8: {error}") from None
    match row:
        case {"question": str(question), "answer": str(answer)}:
            return question, answer
    raise InvalidInput("needs the strings 'question' and 'answer'")

"""Data: from files to packed batches.

`recipe`     what a corpus is made of              `documents`  readers for text, jsonl, parquet, folders
`corpus`     a recipe's documents                  `cleaning`, `dedup`  which of them are kept
`preparation`  all of it, into token shards        `shards`     the shards, written and opened
`windows`    pretraining: documents to windows     `examples`   fine-tuning: examples to packs
`mixing`     several streams in proportion         `loader`     streams to batches, per step and rank
`probes`     made sequences with answers           `baselines`  gzip and xz on the held-out text
"""

from openk3.data.batch import IGNORED, Batch
from openk3.data.examples import Example, Examples
from openk3.data.loader import Loader, collate, validation_batches
from openk3.data.mixing import Mixture
from openk3.data.preparation import prepare
from openk3.data.recipe import Recipe, load_recipe
from openk3.data.shards import TokenDataset, TokenSplit, open_dataset
from openk3.data.windows import ShuffledWindows, Windows

__all__ = [
    "IGNORED",
    "Batch",
    "Example",
    "Examples",
    "Loader",
    "Mixture",
    "Recipe",
    "ShuffledWindows",
    "TokenDataset",
    "TokenSplit",
    "Windows",
    "collate",
    "load_recipe",
    "open_dataset",
    "prepare",
    "validation_batches",
]

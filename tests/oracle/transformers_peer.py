"""transformers' `KimiLinearForCausalLM` as a side of a comparison. Imported only where transformers is."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DynamicCache, KimiLinearForCausalLM
from transformers.utils import logging

from oracle.comparison import Feed

Tensor = torch.Tensor


class TransformersPeer:
    """A folder in the Kimi-Linear form, computed by transformers in fp32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model, found = KimiLinearForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        wrong = {what: names for what, names in found.items() if names}
        assert not wrong, f"transformers does not accept the checkpoint: {wrong}"
        self.model = model.eval()

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(tokens[None], use_cache=False).logits[0]

    def start(self) -> Feed:
        cache = DynamicCache(config=self.model.config)

        def feed(tokens: Tensor) -> Tensor:
            with torch.no_grad():
                return self.model(tokens[None], cache=cache, use_cache=True).logits[0]

        return feed

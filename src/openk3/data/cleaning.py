"""Repairs and refusals, by rules that can be stated in a sentence each; every one is counted.

Repairs keep the meaning of source code: line ends become `\\n`, a byte order mark and control characters
(NULs, form feeds and the like, all but tab and newline) go. Unicode is normalised (NFC) only on request.
Refused are documents that are empty, too short, repeat themselves, or are not text. Rules that need a model
or a language are not here.
"""

from __future__ import annotations

import re
import unicodedata
import zlib

from openk3.data.recipe import CleaningRules

_REFUSALS = ("empty", "short", "binary", "repeated_lines", "repetitive")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Cleaner:
    """Applies the rules to one text after another and keeps the counts.

    `counts`: `documents` seen, `dropped_*` by each rule, `repaired` ones that changed and were kept, and
    `removed_characters` of those.
    """

    def __init__(self, rules: CleaningRules) -> None:
        self.rules = rules
        self.counts = dict.fromkeys(
            ("documents", *(f"dropped_{rule}" for rule in _REFUSALS), "repaired", "removed_characters"), 0
        )

    def __call__(self, text: str) -> str | None:
        """The repaired text, or None if it is refused."""
        self.counts["documents"] += 1
        repaired = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        kept = _CONTROLS.sub("", repaired)
        controls = len(repaired) - len(kept) + kept.count("\ufffd")
        if self.rules.nfc:
            kept = unicodedata.normalize("NFC", kept)
        if refusal := self._refusal(kept, controls):
            self.counts[f"dropped_{refusal}"] += 1
            return None
        if kept != text:
            self.counts["repaired"] += 1
            self.counts["removed_characters"] += max(len(text) - len(kept), 0)
        return kept

    def _refusal(self, text: str, controls: int) -> str | None:
        rules = self.rules
        if not text.strip():
            return "empty"
        if len(text) < rules.min_characters:
            return "short"
        if controls > rules.max_controls * len(text):
            return "binary"
        if repeated_line_share(text) > rules.max_repeated_lines:
            return "repeated_lines"
        encoded = text.encode()
        if len(zlib.compress(encoded, 1)) < rules.min_compressed * len(encoded):
            return "repetitive"
        return None


def repeated_line_share(text: str) -> float:
    """Share of the characters that stand in a line seen before in the same text, indentation aside."""
    total = repeated = 0
    seen: set[str] = set()
    for line in map(str.strip, text.split("\n")):
        total += len(line)
        if line in seen:
            repeated += len(line)
        seen.add(line)
    return repeated / total if total else 0.0

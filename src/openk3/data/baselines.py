"""What general compressors make of the held-out text: the yardstick for bits per byte."""

from __future__ import annotations

import gzip
import lzma

from openk3.errors import InvalidInput


def gzip_bits_per_byte(text: bytes) -> float:
    """`gzip -9` of the whole text, header included, in bits per byte of text."""
    return _bits_per_byte(gzip.compress(text, 9, mtime=0), text)


def xz_bits_per_byte(text: bytes) -> float:
    """`xz -9` of the whole text, header included, in bits per byte of text."""
    return _bits_per_byte(lzma.compress(text, preset=9), text)


def _bits_per_byte(compressed: bytes, text: bytes) -> float:
    if not text:
        raise InvalidInput("bits per byte of no text")
    return 8 * len(compressed) / len(text)

"""The chat language of K3 and its tokenizer. Imports without torch."""

from openk3.chat.tokenizer import Tokenizer

__all__ = ["Tokenizer"]

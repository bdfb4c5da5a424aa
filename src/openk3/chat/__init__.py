"""The chat language of K3 and its tokenizer. Imports without torch.

`tokenizer`   text and ids                      `template`   a conversation as a prompt
`language`    the words of the language         `normalise`  conversations as clients send them
`parse`       an answer's ids as events         `answer`     events as a whole answer
`grammar`     what an answer may be
"""

from openk3.chat.answer import Answer, ToolCall
from openk3.chat.parse import Parser
from openk3.chat.template import encode, prompt_tokens, render
from openk3.chat.tokenizer import Tokenizer

__all__ = ["Answer", "Parser", "Tokenizer", "ToolCall", "encode", "prompt_tokens", "render"]

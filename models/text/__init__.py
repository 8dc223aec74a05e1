"""What a checkpoint folder says of texts: its tokenizer, chat template and sampling defaults."""

from models.text.chat_template import read_chat_template
from models.text.generation_config import chat_defaults, sampling_defaults
from models.text.tokenizer import Tokenizer, save_byte_tokenizer

__all__ = [
    "Tokenizer",
    "chat_defaults",
    "read_chat_template",
    "sampling_defaults",
    "save_byte_tokenizer",
]

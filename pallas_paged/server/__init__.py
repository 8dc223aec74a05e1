"""An HTTP server with OpenAI's endpoints, for any model of the engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pallas_paged.server.tokenizer import HFTokenizer

if TYPE_CHECKING:
    from pallas_paged.server.app import create_app
    from pallas_paged.server.chat_template import ChatTemplate
    from pallas_paged.server.server import serve
    from pallas_paged.server.service import ServerConfig

__all__ = ["ChatTemplate", "HFTokenizer", "ServerConfig", "create_app", "serve"]

# Imported when they are used: programs that only need a tokenizer need not wait for an HTTP server
# and Jinja.
_MODULES = {
    "ChatTemplate": "chat_template",
    "ServerConfig": "service",
    "create_app": "app",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

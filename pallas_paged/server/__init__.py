"""An HTTP server with OpenAI's endpoints, for any model of the engine."""

from pallas_paged.server.app import create_app
from pallas_paged.server.server import serve
from pallas_paged.server.service import ServerConfig
from pallas_paged.server.text import ChatTemplate, HFTokenizer

__all__ = ["ChatTemplate", "HFTokenizer", "ServerConfig", "create_app", "serve"]

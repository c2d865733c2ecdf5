"""An HTTP service for a model and a store of states: `setstream serve`."""

from setstream.serve.app import create_app, make_server
from setstream.serve.options import Options

__all__ = ["Options", "create_app", "make_server"]

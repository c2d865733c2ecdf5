"""The service as an ASGI application: `create_app(store)`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from setstream import __version__
from setstream.serve.guard import Guard
from setstream.serve.metrics import Metrics
from setstream.serve.options import Options
from setstream.serve.pages import add_pages
from setstream.serve.playground import router as playground
from setstream.serve.problems import add_handlers, problem
from setstream.serve.routes import router
from setstream.serve.service import Service
from setstream.stores.store import StateStore

SUMMARY = """
Sets by id: add elements as they arrive, get the model's prediction at any time, merge sets, move their states
elsewhere. The prediction does not depend on the order of the elements, or on how they were cut into requests. A request
is answered when its change is committed.
"""


def create_app(store: StateStore, options: Options | None = None, name: str = "model") -> Guard:
    """The service as an ASGI application. It closes the store when it ends.

    Args:
        store: The states, and the model that reads them.
        options: The limits, and the tokens.
        name: The model's name in `GET /model`.

    Example:
        >>> import tempfile, torch, setstream as ss
        >>> from fastapi.testclient import TestClient
        >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 8), ss.UMBC(8, num_slots=2))
        >>> model = ss.SetModel(encoder, torch.nn.Linear(8, 1)).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     app = create_app(ss.StateStore(f"{folder}/states.db", model))
        ...     with TestClient(app, "http://localhost") as client:
        ...         client.post("/sets/a/elements", json={"elements": [[1, 2], [3, 4]]}).json()
        {'id': 'a', 'count': 2}
    """
    options = options or Options()
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        api.state.service = Service(store, options, metrics)
        try:
            yield
        finally:
            await api.state.service.close()

    api = FastAPI(
        title="setstream",
        version=__version__,
        description=SUMMARY,
        lifespan=lifespan,
        docs_url=None,  # they load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    api.state.model_name = name
    add_handlers(api)

    @api.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> JSONResponse:
        return problem(500, "the server failed; its log has the reason, under the request id of this answer")

    api.include_router(router)
    api.include_router(playground)
    return Guard(api, options, metrics, add_pages(api) | {"/health"})

"""The routes of the service."""

from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from .. import __version__
from .answers import Attacked, GalleryImage, GalleryPage, Health, Model, Noisy, Prediction, Problem
from .bodies import BODY
from .pages import INDEX
from .queries import AttackQuery, GalleryQuery, NoisyQuery, VoteQuery
from .refusals import RefusedError, problem
from .service import TOO_LONG, Service
from .turns import FullError, TimeLimitError

_STATUS = {
    400: "A body or query that cannot be read.",
    401: "The API key is missing or wrong.",
    404: "There is no such image.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The body has another content type than PNG, JPEG or JSON.",
    422: "The image has another shape than the model takes, or values outside [0, 1].",
    503: "Too many requests at a time, or the service stops; Retry-After says when to try again.",
    504: "The answer took longer than the time limit.",
}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text} for status, text in _STATUS.items()
}


def build_app(service: Service) -> FastAPI:
    """The routes as an application; it loads nothing from the network, so there are no interactive docs."""
    app = FastAPI(
        title="dpcert",
        version=__version__,
        description="Certified predictions of a private, robust image classifier.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the host that the client sent
    )
    image = {"requestBody": {"required": True, "content": BODY}}
    post: dict[str, Any] = {"openapi_extra": image, "responses": _PROBLEMS}
    get: dict[str, Any] = {"responses": {status: _PROBLEMS[status] for status in (400, 401, 404)}}

    @app.post("/predict", response_model=Prediction, **post)
    async def predict(request: Request, query: Annotated[VoteQuery, Query()]) -> Response:
        """Certify an image: its class and an L2 radius within which it cannot change, or abstain. Always new noise."""
        return await service.predict(request, query)

    @app.post("/votes", response_model=Prediction, **post)
    async def votes(request: Request, query: Annotated[VoteQuery, Query()]) -> Response:
        """Stream the counts of the votes as lines of JSON; the last line is the answer of /predict."""
        return await service.votes(request, query)

    @app.post("/noisy", response_model=Noisy, **post)
    async def noisy(request: Request, query: Annotated[NoisyQuery, Query()]) -> Response:
        """Return a few noisy copies of an image, as the model sees them."""
        return await service.noisy(request, query)

    @app.post("/attack", response_model=Attacked, **post)
    async def attack(request: Request, query: Annotated[AttackQuery, Query()]) -> Response:
        """Attack an image with PGD within an L2 distance."""
        return await service.attack(request, query)

    @app.get("/model", response_model=Model)
    async def model() -> Response:
        """Describe the model: its privacy statement and its certified accuracy."""
        return JSONResponse(service.model.card.content())

    @app.get("/gallery", response_model=GalleryPage, **get)
    async def gallery(query: Annotated[GalleryQuery, Query()]) -> Response:
        """List some test images."""
        return JSONResponse(service.pictures().page(query.start, query.count).content())

    @app.get("/gallery/{index}", response_model=GalleryImage, **get)
    async def gallery_image(index: int) -> Response:
        """Return one test image with its values."""
        if not 0 <= index < len(service.pictures()):
            raise RefusedError(404, f"index is {index}, must be below {len(service.pictures())}")
        return JSONResponse(service.pictures().image(index).content())

    @app.get("/health", response_model=Health)
    async def health() -> Response:
        """Say that the service is ready."""
        return await service.health()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the counts in the text format of Prometheus."""
        text = service.watch.text(service.desk.in_progress, service.desk.limit)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return service.file_of_page(INDEX, request)

    @app.get("/page/{name:path}", include_in_schema=False)
    async def page(name: str, request: Request) -> Response:
        return service.file_of_page(name, request)

    _answer_errors(app)
    return app


def _answer_errors(app: FastAPI) -> None:
    """Answer every error with one line of JSON."""

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Response:
        return problem(error.status, str(error), retry=error.retry)

    @app.exception_handler(FullError)
    async def full(request: Request, error: FullError) -> Response:
        return problem(503, "too many requests at a time; try again later", retry=1)

    @app.exception_handler(TimeLimitError)
    async def too_long(request: Request, error: TimeLimitError) -> Response:
        return problem(504, TOO_LONG)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return problem(400, f"{name[:100]}: {first['msg'][:200]}; see /openapi.json")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = problem(error.status_code, f"{error.detail}; see /openapi.json for the routes")
        answer.headers.update(error.headers or {})
        return answer

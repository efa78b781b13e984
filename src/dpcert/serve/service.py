"""How each route is answered."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from torch import Tensor

from ..certification.votes import FreshVotes
from .answers import Attacked, Health, Prediction
from .bodies import Bodies, image_of
from .gallery import Gallery
from .health import ModelFile
from .live import Live, line
from .model import ServedModel, Votes
from .pages import PageFile
from .queries import AttackQuery, NoisyQuery, VoteQuery
from .refusals import RefusedError
from .settings import Asked
from .turns import CancelledError, Desk, TimeLimitError
from .watch import Watch

Result = TypeVar("Result")
TOO_LONG = "the answer took longer than the time limit; ask for fewer votes (n), or try again later"


@dataclass(frozen=True)
class Service:
    """What the routes share. `gallery` is the test images, or the reason why there are none."""

    model: ServedModel
    desk: Desk[FreshVotes]
    bodies: Bodies
    file: ModelFile
    gallery: Gallery | str
    page: dict[str, PageFile]
    watch: Watch

    async def predict(self, request: Request, query: VoteQuery) -> Response:
        """Answer with a certificate."""
        asked = self._asked(query)
        answer = await self._compute(request, lambda x, ticket: self.model.predict(x, asked, ticket))
        self.watch.predicted(answer.abstained, answer.n0 + answer.n)
        return JSONResponse(answer.content())

    async def votes(self, request: Request, query: VoteQuery) -> Response:
        """Answer with the counts as they grow, then with the certificate."""
        asked, live = self._asked(query), Live()
        async with self.bodies.read(request) as (kind, body):

            def work(ticket: Votes) -> Prediction:
                return self.model.predict(self._image(kind, body, ticket), asked, ticket, live.tell)

            ticket, done = self.desk.start(work)
            try:
                await _unless_gone(request, live.begun(done))
            except BaseException:
                ticket.cancel()
                raise
        return StreamingResponse(self._stream(ticket, done, live), media_type="application/x-ndjson")

    async def _stream(self, ticket: Votes, done: "asyncio.Future[Prediction]", live: Live) -> AsyncIterator[bytes]:
        try:
            async for text in live.lines(done):
                yield text
            self.watch.predicted(done.result().abstained, done.result().n0 + done.result().n)
        except (TimeLimitError, CancelledError):
            yield line({"error": TOO_LONG})
        finally:
            ticket.cancel()

    async def noisy(self, request: Request, query: NoisyQuery) -> Response:
        """Answer with noisy copies of the image."""
        answer = await self._compute(request, lambda x, ticket: self.model.noisy(x, query.count, ticket))
        return JSONResponse(answer.content())

    async def attack(self, request: Request, query: AttackQuery) -> Response:
        """Answer with an attacked image."""
        if query.label is not None and query.label >= self.model.card.classes:
            raise RefusedError(400, f"label is {query.label}, must be below {self.model.card.classes}")

        def work(x: Tensor, ticket: Votes) -> Attacked:
            return self.model.attacked(x, query.strength, query.target, query.label, ticket)

        return JSONResponse((await self._compute(request, work)).content())

    async def health(self) -> Response:
        """Say that the service is ready, and whether the file of its model has changed."""
        state = await asyncio.to_thread(self.file.state)
        return JSONResponse(Health(status="ok", model_sha256=self.model.sha256, model_file=state).content())

    def pictures(self) -> Gallery:
        """The test images; raises if there are none."""
        if isinstance(self.gallery, str):
            raise RefusedError(404, f"there is no gallery: {self.gallery}")
        return self.gallery

    def file_of_page(self, name: str, request: Request) -> Response:
        """A file of the page."""
        file = self.page.get(name)
        if file is None:
            raise RefusedError(404, "there is no such file; the page is at /")
        headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    def _asked(self, query: VoteQuery) -> Asked:
        default = self.model.asked
        n = default.n if query.n is None else query.n
        if n > default.n:
            raise RefusedError(400, f"n is {n}, must be at most {default.n}, the votes of this service; leave it out")
        return Asked(n, default.alpha if query.alpha is None else query.alpha)

    def _image(self, kind: str, body: bytes, ticket: Votes) -> Tensor:
        with ticket.turn():
            return image_of(kind, body, self.model.shape)

    async def _compute(self, request: Request, work: Callable[[Tensor, Votes], Result]) -> Result:
        async with self.bodies.read(request) as (kind, body):

            def whole(ticket: Votes) -> Result:
                return work(self._image(kind, body, ticket), ticket)

            return await _unless_gone(request, self.desk.run(whole))


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Result]) -> Result:
    """Wait for an answer, but not longer than the client does."""
    working, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RefusedError(400, "the client has gone")
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""A request that is refused: a status code and one line of JSON."""

from fastapi.responses import JSONResponse


class RefusedError(Exception):
    """Answer with `status` and the message; `retry` is the number of seconds after which to try again."""

    def __init__(self, status: int, message: str, *, retry: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry = status, retry


def problem(status: int, message: str, *, retry: int | None = None) -> JSONResponse:
    """The answer ``{"error": ...}`` in one line."""
    headers = {} if retry is None else {"Retry-After": str(retry)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": " ".join(message.split())}, status, headers)

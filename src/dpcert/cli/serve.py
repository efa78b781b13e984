"""``dpcert serve``."""

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, DpcertWarning
from . import _options as o

_OPEN = "--host is {} without an API key: everyone who reaches this address can use the model; set {} or --api-key-file"


def serve(
    run: o.RunPath,
    host: Annotated[
        str,
        typer.Option(help="Address to listen at. The default can be reached from this machine only; 0.0.0.0 from all others."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of the smoothing noise.", show_default="from the run")
    ] = None,
    n0: Annotated[int, typer.Option(help="Votes per image that select the class.")] = 100,
    n: Annotated[int, typer.Option(help="Votes per image that bound its probability; requests may ask for fewer.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Each answer is wrong with at most this probability.")] = 0.001,
    queue: Annotated[int, typer.Option(help="Requests that are answered at a time; more get the status 503.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request gets the status 504.")] = 60.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with a key that every request must send as Authorization: Bearer KEY. Or set DPCERT_API_KEY.",
            show_default=False,
        ),
    ] = None,
    gallery: Annotated[
        bool | None,
        typer.Option(
            "--gallery/--no-gallery",
            help="Show test images of the data set. Test images of custom data may be private.",
            show_default="only images of public data sets that are on this machine",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the page and the model to DIR, for any web host, instead of serving. The browser computes the votes.",
            show_default=False,
        ),
    ] = None,
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
) -> None:
    """Serve certified predictions over HTTP, with a page to try them.

    POST /predict takes a PNG, a JPEG or {"image": [[...]]} and answers with class, certified radius and votes. Every answer
    uses new noise and names the SHA-256 of the model. The page is at /.

    Logs are lines of JSON on stderr. Ctrl-C or SIGTERM finishes the requests in progress and exits with 130.

    --export DIR writes a demo without a server. It needs npm, which fetches ONNX Runtime for browsers, and dpcert[fast].

    Example:  dpcert serve runs/mnist-dp-gaussian --port 8000
    """
    from ..serve.settings import Asked, Limits

    asked, limits = Asked(n, alpha), Limits(queue, timeout)
    if export is not None:
        from ..serve.export import write_demo

        with o.opened(run, model, data, device) as opened:
            write_demo(opened, export, sigma, n0, n, alpha, gallery)
        typer.echo(f"demo of {run} ({opened.statement.short}): {export}; try it with: python3 -m http.server -d {export}")
        return
    _require_extra()
    from ..serve import guard, server

    key = guard.read_api_key(api_key_file, os.environ.get(guard.KEY_VARIABLE))
    with server.bound(host, port) as listener:
        local = server.is_loopback(listener)
        if key is None and not local:
            warnings.warn(_OPEN.format(host, guard.KEY_VARIABLE), DpcertWarning, stacklevel=2)
        where = server.address_of(listener)
        with o.opened(run, model, data, device) as opened:
            words = opened.statement.short
            built = server.prepared(
                opened,
                sigma=sigma,
                n0=n0,
                asked=asked,
                limits=limits,
                key=key,
                gallery=gallery,
                ready=lambda workers: typer.echo(f"serving {run} ({words}) at {where}, workers: {workers}; Ctrl-C stops it"),
                hosts=guard.LOCAL_NAMES | {host.lower()} if key is None and local else None,
            )
        del opened  # and its data set: the service needs no training records
        server.answer_until_a_signal(built, listener)


def _require_extra() -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed; install the service with: pip install 'dpcert[serve]'")

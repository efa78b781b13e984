"""What a Ray worker does for one task: checks its node, runs the ``dpcert`` process, returns the outcome.

Only plain values travel through Ray: the words of the command, paths, and the outcome. Data, weights, keys and rows stay in
the run directories.
"""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from .child import Child
from .session import why_not_shared, why_other_code
from .tasks import SECONDS_TO_SAVE, Task

_POLL_SECONDS = 0.2


def run_task(request: dict[str, Any]) -> dict[str, Any]:
    """Run the task of a request. An answer with ``refused`` means that no task can run on this node."""
    node = f"node {socket.gethostname()}"
    refused = why_other_code(request["identity"], node) or why_not_shared(Path(request["folder"]), request["session"], node)
    if refused is not None:
        return {"refused": refused}
    environment = {**os.environ, **request["environment"]}
    _accept_interrupts()
    child = Child(Task.from_json(request["task"]), environment, dies_with_parent=True)
    try:
        while (ended := child.outcome()) is None:
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:  # cancelled by the driver
        child.ask_to_stop()
        ended = child.wait_or_kill(time.monotonic() + SECONDS_TO_SAVE)
    return {"code": ended.code, "error": ended.error, "reason": ended.reason, "seconds": ended.seconds}


def _accept_interrupts() -> None:
    """Let Ray cancel the task. A cluster that a script started in the background ignores SIGINT, and so do its workers."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""A stand-in for Ray that runs tasks in threads and fails as the environment variable FAKE_RAY says."""

import ctypes
import json
import os
import threading
import time

from . import exceptions

_script = json.loads(os.environ.get("FAKE_RAY", "{}"))
_attempts: dict[str, int] = {}


class _Reference:
    def __init__(self):
        self.answer = self.error = None
        self.done = threading.Event()


class _Remote:
    def __init__(self, function):
        self._function = function

    def options(self, **options):
        assert options["max_retries"] == 0 and options["num_cpus"] >= 1
        return self

    def remote(self, request):
        reference = _Reference()
        reference.thread = threading.Thread(target=self._run, args=(reference, request), daemon=True)
        reference.thread.start()
        return reference

    def _run(self, reference, request):
        name = request["task"]["name"]
        _attempts[name] = _attempts.get(name, 0) + 1
        try:
            if _attempts[name] <= _script.get("lose", 0):
                raise getattr(exceptions, _script.get("how", "WorkerCrashedError"))("lost")
            if "error" in _script:
                raise exceptions.RayTaskError(_script["error"])
            if "identity" in _script:
                request["identity"]["torch"] = _script["identity"]
            if "session" in _script:
                request["session"] = _script["session"]
            reference.answer = self._function(request)
        except BaseException as error:
            reference.error = error
        reference.done.set()


def init(**options):
    if "init" in _script:
        raise ConnectionError(_script["init"])
    print("Ray prints to stdout", flush=True)


remote = _Remote


def wait(references, *, num_returns, timeout):
    until = time.monotonic() + timeout
    if "die" in _script and any(_attempts.values()):
        os._exit(1)  # as Ray does when the cluster is lost
    while time.monotonic() < until and not any(reference.done.is_set() for reference in references):
        time.sleep(0.02)
    return [reference for reference in references if reference.done.is_set()], []


def get(reference):
    if reference.error is not None:
        raise reference.error
    return reference.answer


def cancel(reference, *, force):
    thread = ctypes.c_ulong(reference.thread.ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))


def nodes():
    return [{"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}} for cpus, gpus in _script.get("nodes", [[2, 0]])]

"""The exceptions that the bridge tells apart."""


class RayError(Exception): ...


class TaskCancelledError(RayError): ...


class WorkerCrashedError(RayError): ...


class NodeDiedError(RayError): ...


class OutOfMemoryError(RayError): ...


class LocalRayletDiedError(RayError): ...


class ObjectLostError(RayError): ...


class RayTaskError(RayError):
    @property
    def cause(self):
        return ModuleNotFoundError(self.args[0])

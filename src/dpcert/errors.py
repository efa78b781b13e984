"""Error types. Each message says what is wrong, the value, and the remedy, in one line.

Every error that a user can cause derives from `DpcertError`, which is a `ValueError`. The command line prints it as
``error: ...`` and exits with 2. Any other exception is a bug in dpcert and keeps its traceback.
"""


class DpcertError(ValueError):
    """A request, config, data set or run directory that cannot be used."""


class ConfigError(DpcertError):
    """An unknown or ill-typed key, an unknown preset, a value out of range."""


class BudgetError(DpcertError):
    """A privacy budget that is invalid or cannot be met."""


class DataError(DpcertError):
    """A data set that is missing, damaged or out of range."""


class ModelError(DpcertError):
    """A model that mixes examples or does not fit the data."""


class LedgerError(DpcertError):
    """A ledger that is missing, edited or truncated; nothing is computed from it."""


class RunError(DpcertError):
    """A run directory that was made with other options, is in use, or cannot be written."""


class BusyError(RunError):
    """A run directory that another process uses at the moment; it can be used later."""


class AuditError(DpcertError):
    """An audit that found more leakage than the guarantee allows."""


class VerifyError(DpcertError):
    """A run or bundle whose files contradict each other or its claims."""


class RankError(DpcertError):
    """A rank that differs from the others, has ended, or cannot be reached."""


class DpcertWarning(UserWarning):
    """A request that is allowed but probably unintended; the command line prints it as ``warning: ...`` and continues."""

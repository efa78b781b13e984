"""One voice for errors: what is wrong, the value, and the remedy, in one line.

Every error a person can cause derives from `DpcertError`, which is a `ValueError`; the command line prints it as
``error: ...`` and exits with 2. Anything else that escapes is a bug of ours and keeps its traceback.
"""


class DpcertError(ValueError):
    """A request, config, data set or run directory that cannot be used."""


class ConfigError(DpcertError):
    """An unknown or ill-typed key, an unknown preset, a value out of range."""


class BudgetError(DpcertError):
    """A privacy budget that makes no sense or cannot be met."""


class DataError(DpcertError):
    """A data set that is missing, damaged or out of range."""


class ModelError(DpcertError):
    """A model that mixes examples or does not fit the data."""


class LedgerError(DpcertError):
    """A ledger that is missing, edited or cut; nothing is computed from it."""


class RunError(DpcertError):
    """A run directory that belongs to another request, is in use, or cannot be written."""


class AuditError(DpcertError):
    """An audit that found more leakage than was promised."""


class VerifyError(DpcertError):
    """A run or bundle whose files contradict each other, or what it claims."""


class DpcertWarning(UserWarning):
    """A request that is allowed but hardly meant; the command line prints it as ``warning: ...`` and goes on."""

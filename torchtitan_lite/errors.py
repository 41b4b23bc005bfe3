"""Errors that a person can act on. They are shown without a traceback; anything else is a bug of ours."""


class UserError(Exception):
    """The message says what was wrong, with the value, and what to do. The process exits with `exit_code`."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration that can't be run: a file, a key, a value or a combination of values."""


class DataError(UserError):
    """Text that can't be read, or too little of it."""


class CheckpointError(UserError):
    """A checkpoint that can't be read, or that belongs to another model or other data."""


class UnreadableError(CheckpointError):
    """The system could not read a checkpoint (permissions, a disk or network error). It may be undamaged."""


class SaveError(UserError):
    """The last checkpoint of a run could not be written."""

    exit_code = 1


class StuckError(UserError):
    """Another rank was lost, or kept this one waiting for too long."""

    exit_code = 1


class NoMemoryError(UserError):
    """The device or the host has too little memory for this configuration."""

    exit_code = 1


class DivergedError(UserError):
    """Ranks that hold copies of the same parameters hold different ones."""

    exit_code = 1


class NonFiniteError(UserError):
    """The loss or the gradient norm became NaN or infinite. The update of that step was withheld."""

    exit_code = 1

"""What selectconv raises: each error is a `SelectConvError` and a fitting builtin as well."""

from collections.abc import Iterator
from contextlib import contextmanager


class SelectConvError(Exception):
    """Base of every error that is about channel selectivity rather than about one argument."""


class ConversionError(SelectConvError, ValueError):
    """A model could not be converted; it was left as it was."""


class AllocationError(SelectConvError, ValueError):
    """A de- or re-allocation was refused; model and optimizer were left as they were."""


class MeanSourceError(SelectConvError, RuntimeError):
    """A layer does not know the mean of its input: no mean source, or one without data."""


class CompressionError(SelectConvError, ValueError):
    """A model could not be compressed, saved or read back; nothing was changed."""


class ExportError(SelectConvError, RuntimeError):
    """A model could not be exported; no file was written."""


class RunError(SelectConvError, RuntimeError):
    """A run cannot start, go on or be read; the message names the file or folder."""


class DataError(SelectConvError, RuntimeError):
    """A data set is not available, or its files are not what they should be."""


class UsageError(SelectConvError, ValueError):
    """What was typed on the command line is wrong: exit code 2."""


class SelectConvWarning(UserWarning):
    """Something a user can act on, and that did not stop the call."""


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """Raise the block's errors again, with the name of the layer that they are about.

    Example:
        >>> with naming("conv1"):
        ...     raise AllocationError("slots are open already.")
        Traceback (most recent call last):
        selectconv.errors.AllocationError: `conv1`: slots are open already.
    """
    try:
        yield
    except SelectConvError as error:
        raise type(error)(f"`{layer}`: {error}") from error

"""What selectconv raises: each error is a `SelectConvError` and a fitting builtin as well."""

from collections.abc import Iterator
from contextlib import contextmanager


class SelectConvError(Exception):
    """The base class of all errors."""


class BadValue(SelectConvError, ValueError):
    """An argument has a value that is not accepted."""


class BadType(SelectConvError, TypeError):
    """An argument has a type that is not accepted."""


class ConversionError(SelectConvError, ValueError):
    """A model could not be converted. It stays as it was."""


class AllocationError(SelectConvError, ValueError):
    """A de- or re-allocation was refused. Model and optimizer stay as they were."""


class MeanSourceError(SelectConvError, RuntimeError):
    """A layer does not know the mean of its input: it has no mean source, or has seen no input."""


class CompressionError(SelectConvError, ValueError):
    """A model could not be compressed, counted, saved or loaded. Nothing was changed."""


class ExportError(SelectConvError, RuntimeError):
    """A model could not be exported; no file was written."""


class RunError(SelectConvError, RuntimeError):
    """A run cannot start, go on or be read; the message names the file or folder."""


class DataError(SelectConvError, RuntimeError):
    """A data set is not available, or its files are not what they should be."""


class UsageError(SelectConvError, ValueError):
    """What was typed on the command line is wrong: exit code 2."""


class SelectConvWarning(UserWarning):
    """Something that you can act on, but that did not stop the call."""


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

"""What the command line itself refuses."""

from selectconv.errors import SelectConvError


class UsageError(SelectConvError, ValueError):
    """The user's input is wrong: exit code 2."""

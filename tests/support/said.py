"""What a command said."""

import pytest


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr; a traceback or a second line fails."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]

"""A campaign for the tests of the driver: each of its trials ends in another way."""

import os
import time

from soak.driver import LOST, Ended, Wrong

TITLE, WANTED, COUNT, LIMIT_S = "trouble", "none", 5, 3.0


def trial(number, draw, scratch):
    (scratch / "file").write_text("is removed")
    if number == 1:
        raise Wrong("the second", LOST, str(scratch))
    if number == 2:
        os._exit(3)
    if number == 3:
        time.sleep(60)
    if number == 4:
        raise KeyError("a mistake in the trial")
    return Ended("the first", "fine", data={"number": draw.randrange(10**9)})

"""Calls of one client, run by its own interpreter: `python with_NAME.py URL SCRIPTED_URL EMBEDDER_URL`.

It prints a line of JSON for each call. This module and those of the clients import nothing of this project.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version

Call = Callable[[], object]
DEMO, SCRIPTED, EMBEDDER = sys.argv[1:4]
"""Addresses of a server with the demo model, of one whose model calls the function `add` when it has one, and of one
whose demo model makes embeddings."""
MODEL = "demo"
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
ANSWER = "19"
"""Number in the answers of the demo model, and of the scripted model after the result of its call."""
_CALLS: list[tuple[str, Call]] = []


def call(title: str) -> Callable[[Call], Call]:
    """Return a decorator of a call; it fails by raising an error."""

    def add(made: Call) -> Call:
        _CALLS.append((title, made))
        return made

    return add


def run(package: str) -> None:
    """Run the calls and print their results."""
    for title, made in _CALLS:
        problem = None
        try:
            made()
        except BaseException as error:  # a client may end its process
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"package": package, "version": version(package), "call": title, "problem": problem}))

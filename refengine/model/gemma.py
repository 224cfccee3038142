"""Where a fetched Gemma 3 270M lies. Its weights have terms of their own and are never part of this project.

`refengine fetch gemma-3-270m` explains the terms and puts it there; see `refengine.commands.fetch`.
"""

from __future__ import annotations

import os
from pathlib import Path

from refengine.errors import CheckpointError

NAME = "gemma-3-270m"


def cache_directory() -> Path:
    """The folder that `fetch` fills if it is not told another."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "refengine" / NAME


def fetched() -> Path:
    """Raises: CheckpointError, with the command that helps, if it was not fetched yet."""
    directory = cache_directory()
    if not directory.is_dir():
        raise CheckpointError(f"{NAME} is not here yet; `refengine fetch {NAME}` tells how to get it")
    return directory

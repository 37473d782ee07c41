import os
from pathlib import Path

import pytest
from hypothesis import settings

collect_ignore = ["fuzz"]
"""A script of its own, which needs atheris."""

# Compiling a kernel takes seconds the first time; a rerun in CI tries the same examples.
settings.register_profile("routepack", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("routepack")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of recorded traces, which lies beside the repository and is not part of it."""
    folder = Path(os.environ.get("ROUTEPACK_SHARED", Path(__file__).parents[2] / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"no recorded traces at {folder}: set ROUTEPACK_SHARED to the folder that holds data/")
    return folder

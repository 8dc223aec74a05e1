"""What the tests of commands share: a checkpoint, and steps that are compiled once."""

import shutil

import pytest

from tests.support.commands import SIZES, engine_for_any_request, run_command


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.fixture(scope="module")
def shared_steps():
    """Commands make engines whose steps serve any request: two programs for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        for command in ("batch", "chat"):
            patch.setattr(f"models.command.{command}.Engine", engine_for_any_request)
        yield


@pytest.fixture
def run(checkpoint, capsys, shared_steps):
    return lambda *args: run_command(checkpoint, capsys, *SIZES, *args)

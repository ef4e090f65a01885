"""The cache of root file systems removes its own folders and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.platforms import roots
from tests.platforms.__main__ import alone


def test_a_folder_with_files_of_somebody_else_is_no_cache(tmp_path: Path) -> None:
    foreign = tmp_path / "runs" / "file"
    foreign.parent.mkdir()
    foreign.touch()
    with pytest.raises(SystemExit, match="not a cache of this program"), alone(tmp_path):
        pass
    assert [*tmp_path.iterdir()] == [foreign.parent]
    assert foreign.exists()


def test_an_empty_or_new_folder_becomes_a_cache_that_the_next_run_uses(tmp_path: Path) -> None:
    for cache in (tmp_path / "empty", tmp_path / "new" / "cache"):
        if cache.name == "empty":
            cache.mkdir()
        with alone(cache):
            (cache / "runs").mkdir()
        with alone(cache):
            assert not (cache / "runs").exists()
        assert (cache / roots.MARKER).exists()


def test_a_folder_is_removed_although_a_process_still_writes_to_it_for_a_while(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "copy"
    script = """
        end=$((SECONDS + 2))
        while ((SECONDS < end)); do mkdir -p "$0/a/b"; for i in {1..50}; do >"$0/a/b/$i"; done; done
    """
    folder.mkdir()
    with subprocess.Popen(
        ["bash", "-c", script, str(folder / "root")], stderr=subprocess.DEVNULL
    ) as writer:
        while not (folder / "root").exists():
            assert writer.poll() is None
        roots.remove(folder)
        writer.wait(60)
    roots.remove(folder)
    assert not folder.exists()

"""Files are whole or not there, however many write them and whenever they are killed."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import setstream as ss
from setstream._utils.atomic import locked, whole_or_nothing, write_atomically
from setstream.errors import ConfigurationError


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "result.json"
    with whole_or_nothing(path) as slow:
        slow.write_text("half of ")
        write_atomically(path, "the other's")  # begins later, ends first
        assert path.read_text() == "the other's"
        with slow.open("a") as file:
            file.write("mine")
    assert path.read_text() == "half of mine"
    assert os.listdir(tmp_path) == ["result.json"]


def test_many_writers_at_once_leave_one_whole_file(tmp_path):
    path, texts = tmp_path / "a.txt", [str(number) * 100_000 for number in range(8)]
    errors = []

    def write(text):
        try:
            for _ in range(5):
                write_atomically(path, text)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    code = """
import os, sys, pathlib
from setstream._utils.atomic import whole_or_nothing
with whole_or_nothing(pathlib.Path(sys.argv[1])) as hidden:
    hidden.write_text("half")
    os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.h5")], timeout=120)
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".a.")
    lives = left.replace(left.partition("-")[2].partition("-")[0], str(os.getppid()))
    elsewhere = left.replace(left.split(".")[2].partition("-")[0], "00000000")
    for name in (lives, elsewhere, "mine.writing.h5", ".mine"):
        (tmp_path / name).write_text("theirs")
    write_atomically(tmp_path / "a.h5", "whole")
    assert sorted(os.listdir(tmp_path)) == sorted([lives, elsewhere, "mine.writing.h5", ".mine", "a.h5"])


def test_states_are_written_by_the_same_means(tmp_path, monkeypatch):
    encoder = ss.SetEncoder(torch.nn.Linear(2, 4), ss.DeepSets("sum")).eval()
    state = encoder.update(None, torch.ones(1, 3, 2))
    state.save(tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()
    monkeypatch.setattr("setstream._utils.atomic.flush", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        (state + state).save(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_folder_is_held_by_one(tmp_path):
    held = pytest.raises(ConfigurationError, match="another process is training")
    with locked(tmp_path, "training"), held, locked(tmp_path, "training"):
        pass
    with locked(tmp_path, "training"):  # and free again
        pass


def test_files_of_others_are_left_alone(tmp_path):
    """Old files whose names merely look like ours stay."""
    old = time.time() - 10 * 86_400
    (tmp_path / ".creative.writing").mkdir()
    (tmp_path / ".notes.writing.md").write_text("mine")
    for name in (".creative.writing", ".notes.writing.md"):
        os.utime(tmp_path / name, (old, old))
    write_atomically(tmp_path / "a.json", "{}")
    assert (tmp_path / ".creative.writing").is_dir()
    assert (tmp_path / ".notes.writing.md").read_text() == "mine"


def test_threads_that_write_to_a_new_folder_do_not_remove_each_others_files(tmp_path):
    for turn in range(5):
        folder = tmp_path / str(turn)
        folder.mkdir()
        for number in range(500):
            (folder / f"{number}.txt").touch()

        def write(thread, folder=folder):
            for number in range(20):
                write_atomically(folder / f"{thread}-{number}.json", "{}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        assert len(list(folder.glob("*.json"))) == 80

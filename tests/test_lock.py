"""A file system without locks is no reason to stop, and is said."""

import filelock

from fourscale import journal
from fourscale.lock import Lock


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, capsys):
    def refuse(self, *args, **more):
        raise NotImplementedError("FileLock is not implemented for this file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with journal.locked(tmp_path / "data"):
        assert "data: its file system has no locks; start no second prepare.py" in capsys.readouterr().out
    (tmp_path / "run").mkdir()
    lock = Lock(tmp_path / "run", "a")
    assert lock.acquire() is None
    assert "run: its file system has no locks; the heartbeat alone" in capsys.readouterr().out
    lock.check()
    lock.release()

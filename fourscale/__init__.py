"""fourscale: one train.py at four scales. The doors stand at the repository's root; these are their rooms."""

import subprocess
from pathlib import Path

__version__ = "0.1.0"


def code_version() -> str:
    """The git commit of this code (+ with uncommitted changes), or the package's version outside of its repository."""
    root = Path(__file__).resolve().parent.parent
    try:
        git = ["git", "-C", str(root)]
        top = subprocess.run([*git, "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, check=True)
        folder, commit = top.stdout.split("\n")[:2]
        if Path(folder).resolve() != root:  # unpacked within somebody else's repository
            return __version__
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        return commit + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError, ValueError):
        return __version__

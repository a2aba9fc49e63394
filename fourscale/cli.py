"""How doors are called: flags from dataclasses (by tyro), TOML files, and errors as one line. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import io
import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

T = TypeVar("T")

SPEAKER_FIRST_S = 3.0

# What a line is printed within: a progress bar on the same terminal steps aside for it.
aside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class InputError(Exception):
    """The user's input or usage is at fault: one line naming the thing, what was found, what to do (exit code 2)."""


class RunFailed(Exception):
    """A run can't go on though its input was right, as when losses stay non-finite: one line (exit code 1)."""


def is_rank_zero() -> bool:
    """True in a plain process and on torchrun's rank 0: the one that speaks."""
    return int(os.environ.get("RANK", "0")) == 0


def die_with_launcher() -> None:
    """On Linux under torchrun, ask for SIGKILL when the launcher dies: a killed one must leave no rank training.

    To be called before the seconds that importing torch takes; where it has died already, this process ends.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # a libc without prctl
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent or _is_init(os.getppid()):  # it died before we asked
        os._exit(1)


def _is_init(pid: int) -> bool:
    """True for the system's process 1, to which orphans go, and not for a torchrun that is 1 in its container."""
    try:
        return pid == 1 and not any(word in Path("/proc/1/cmdline").read_bytes() for word in (b"python", b"torch"))
    except OSError:
        return False


def door(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a door's main: InputError ends with one line and code 2, RunFailed with code 1, Ctrl-C with 130.

    Under torchrun the first rank of each node prints: all ranks meet most errors, but another node may lack a file. An
    error met by some of them carries `speaks`, True on the rank that is to print it. A file that can't be read or
    written is input too.
    """

    @functools.wraps(main)
    def wrapped() -> None:
        die_with_launcher()
        for stream in (sys.stdout, sys.stderr):  # a terminal that can't show a character must end nothing
            stream.reconfigure(errors="backslashreplace")
        try:
            main()
        except (InputError, RunFailed) as e:
            if getattr(e, "speaks", int(os.environ.get("LOCAL_RANK", "0")) == 0):
                with aside():
                    sys.stderr.write(f"error: {e}\n")  # at once: print hands over the line and its end apart
                    sys.stderr.flush()
            else:  # torchrun ends all ranks when the first has ended: let the one that speaks be first
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(SPEAKER_FIRST_S)
            sys.stdout.flush()
            # os._exit: under torchrun other ranks may be blocked in a collective, and teardown would wait for them.
            os._exit(2 if isinstance(e, InputError) else 1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        except BrokenPipeError:  # `python sample.py | head`
            os._exit(0)
        except OSError as e:
            if e.filename is None or e.strerror is None:
                raise
            print(f"error: {e.filename}: {e.strerror.lower()}", file=sys.stderr, flush=True)
            os._exit(2)

    return wrapped


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the imports of torch and all that stands on it: a fifth of their time goes into looking for garbage among
    what stays for good. Afterwards the collector leaves it alone, in the loop and at the end too."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def say(line: str) -> None:
    """Print a line at once. A reader who has gone (`| head`, a closed terminal) must not end a run of days."""
    try:
        with aside():
            print(f"{line}\n", end="", flush=True)  # at once: threads speak too
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)


# ---- flag types ----------------------------------------------------------------------------------------------------


def parse_count(text: str) -> int:
    """'2e9', '100_000', '1,000' or '42' as an int; ValueError if it's no whole number >= 0."""
    cleaned = text.replace("_", "").replace(",", "")
    try:
        number = int(cleaned)
    except ValueError:
        number = float(cleaned)
        if not number.is_integer():
            raise ValueError(f"{text!r} is not a whole number") from None
    if number < 0:
        raise ValueError(f"{text!r} is negative")
    return int(number)


def _count_from(args: list[str]) -> int | None:
    if args[0].lower() == "none":
        return None
    try:
        return parse_count(args[0])
    except (ValueError, OverflowError):
        raise ValueError(f"expected a whole number such as 2000, 2e9 or 100_000, got {args[0]!r}") from None


def _float_from(args: list[str]) -> float | None:
    if args[0].lower() == "none":
        return None
    try:
        return float(args[0].replace("_", ""))
    except ValueError:
        raise ValueError(f"expected a number, got {args[0]!r}") from None


def _spec(metavar: str, parse: Callable[[list[str]], Any], kinds: tuple[type, ...]) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda x: x is None or isinstance(x, kinds),
        str_from_instance=lambda x: [str(x)],
    )


derived = tyro.conf.arg(help_behavior_hint="")  # the help text itself says what None becomes
Count = Annotated[int, _spec("N", _count_from, (int,))]
MaybeCount = Annotated[int | None, _spec("N", _count_from, (int,)), derived]
MaybeFloat = Annotated[float | None, _spec("X", _float_from, (float, int)), derived]
MaybeText = Annotated[str | None, _spec("TEXT", lambda a: a[0], (str,)), derived]
Repeated = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
# A flag that may be repeated. Its default gives way to what is said, see `parse`.
Texts = Annotated[
    tuple[Annotated[str, _spec("SPEC", lambda a: a[0], (str,))], ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {default})" if default else ""),
]


def _one_line(boxed: str) -> str:
    """The gist of tyro's boxed message: the words above its first rule, and the flag it suggests."""
    words, suggestion = [], ""
    lines = [line.strip("│ ").strip() for line in boxed.splitlines()]
    body = [line for line in lines if line and line[0] not in "╭╰"]
    for i, line in enumerate(body):
        if line.startswith("Perhaps you meant") and i + 1 < len(body):
            suggestion = f"; did you mean {body[i + 1].split(' ')[0].rstrip(',')}?"
    for line in body:
        if line.startswith("──"):
            break
        words.append(line)
    return " ".join(words) + suggestion


def parse(cls: type[T], argv: Sequence[str] | None = None, default: T | None = None, prog: str | None = None) -> T:
    """Parse flags into `cls`; flags that are absent keep `default`'s values. Raises InputError for a usage error.

    `--a-b` and `--a_b` are alike; counts may be written 2e9 or 100_000. `--help` prints on rank 0 and exits with 0.
    """
    err = io.StringIO()
    columns = os.environ.get("COLUMNS")
    argv = sys.argv[1:] if argv is None else list(argv)
    asked_help = "--help" in argv or "-h" in argv
    try:
        if not asked_help:
            os.environ["COLUMNS"] = "4000"  # one message, one line: no wrapping inside the box
        with contextlib.redirect_stderr(err):
            kwargs = {} if default is None else {"default": default}
            parsed = tyro.cli(
                cls,
                args=argv,
                prog=prog or Path(sys.argv[0]).name,
                console_outputs=is_rank_zero() or not asked_help,  # each node names its error, one rank helps
                config=(tyro.conf.OmitArgPrefixes,),
                **kwargs,
            )
    except SystemExit as e:
        if e.code in (0, None):
            raise
        raise InputError(_one_line(err.getvalue()) or "usage error; see --help") from None
    finally:
        if columns is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = columns
    for f in dataclasses.fields(parsed):  # tyro appends to the default of a repeatable flag; what is said replaces it
        before, now = getattr(default, f.name, f.default), getattr(parsed, f.name)
        if isinstance(now, tuple) and len(now) > len(before):
            parsed = dataclasses.replace(parsed, **{f.name: now[len(before) :]})
    return parsed


def from_toml(cls: type[T], path: Path, default: T) -> T:
    """`default` with the flat keys of a TOML file laid over it, checked exactly as flags are. Raises InputError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"--config {path}: {e.strerror.lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise InputError(f"--config {path}: not valid TOML: {e}") from None
    argv = []
    for key, value in table.items():
        if isinstance(value, dict):
            raise InputError(f"--config {path}: [{key}] is a table; write flags as flat keys such as d_model = 768")
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        else:
            for one in value if isinstance(value, list) else [value]:
                argv += [flag, str(one)]
    try:
        return parse(cls, argv, default)
    except InputError as e:
        raise InputError(f"--config {path}: {e}") from None


def flag(name: str) -> str:
    """'n_heads' -> '--n-heads'."""
    return "--" + name.replace("_", "-")

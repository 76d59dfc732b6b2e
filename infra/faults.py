"""When something goes wrong: who reports it, how a run ends, and that no rank is left behind.

The rank that failed reports, on stderr and in torchrun's own report; the others stand by. A rank ends with its torchrun
and with its siblings on the same machine. Left out: going on without the rank that is gone; the same command does, from
the last checkpoint.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from config import Config, UserError
from infra import run_folder


class FailedElsewhere(UserError):
    """A user's error on another rank, which is the one to report it."""


# ---- The end of a run ----

GRACE = 5.0  # seconds that a reward has left when the run is to stop
caught: list[int] = []  # signals that asked to stop
caught_at: list[float] = []  # and when


def run_to_the_end(train: Callable[[Config], int], config: Config) -> int:
    """-> exit code; what went wrong has been reported, and what the same command would do then"""
    with contextlib.suppress(AttributeError):  # in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal cannot show ends no run
    try:
        code = train(config)
        if dist.is_initialized():
            siblings.clear()
            dist.barrier()  # nobody is gone before all are done
            dist.destroy_process_group()
        return code
    except FailedElsewhere:
        return _fail(2)
    except UserError as error:
        context = getattr(error, "__notes__", [])  # frames of a file of the user's
        return _fail(2, "\n".join([*context, f"error: {error}"]))
    except torch.OutOfMemoryError as error:
        return _fail(1, f"error: {error}")
    except OSError as error:  # a full disk, no permission
        return _fail(1, _and_then(f"error: {error}", config))
    except KeyboardInterrupt:  # before the first step
        return _fail(130, "stopped")
    except Exception as error:
        if not _is_lost_contact(error):
            return _fail(1, traceback.format_exc())
        stand_by()  # what the rank that is gone has to say matters more
        return _fail(1, _and_then(f"error: lost contact with another rank: {str(error).splitlines()[0]}", config))


def _and_then(message: str, config: Config) -> str:
    return ". ".join(filter(None, [message, run_folder.goes_on(config)]))


def _fail(code: int, message: str | None = None) -> int:
    """The end of a rank that failed, or stands by where another did. It waits for nobody. -> exit code"""
    if message is None:
        stand_by()
    else:
        report_failure(message)
    if under_torchrun():
        os._exit(code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def leave(code: int) -> None:
    """Ends the process. Threads of PyTorch's own, which shards have, may abort one that ends in the ordinary way."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def stop_requests() -> list[int]:
    """Grows by a signal that asks to stop: the step in progress is finished first. A second one, later than the copies
    of the first that torchrun sends, ends the process at once."""
    caught.clear()
    caught_at.clear()

    def note(number: int, frame: object) -> None:
        caught.append(number)
        caught_at.append(time.monotonic())
        if len(caught) == 1 and os.environ.get("RANK", "0") == "0":  # print may have been interrupted
            os.write(2, b"\nstopping after this step; once more in 3 seconds or later: at once\n")
        if caught_at[-1] - caught_at[0] > 3:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


def time_limit(seconds: float) -> Callable[[str], contextlib.AbstractContextManager]:
    """-> a context for calls of functions that the user wrote. Nothing can interrupt one that hangs, but its process
    can be ended: after these seconds, or some seconds after it was asked to stop."""

    def watch_over(name: str, returned: threading.Event) -> None:
        started = time.monotonic()
        while not returned.wait(min(seconds, 1.0)):
            now = time.monotonic()
            if now - started >= seconds:
                report_failure(f"error: reward function {name} took longer than --reward_timeout {seconds:g} seconds")
                os._exit(2)
            if caught and now - max(started, caught_at[0]) >= GRACE:
                stopped_by = signal.Signals(caught[0]).name
                say(f"stopped by {stopped_by} while reward function {name} was running: this step is lost")
                os._exit(128 + caught[0])

    @contextlib.contextmanager
    def limited(name: str) -> Iterator[None]:
        returned = threading.Event()
        threading.Thread(target=watch_over, args=[name, returned], daemon=True).start()
        # Code in C may let no other thread run. Then this ends the process, and shows where it was.
        faulthandler.dump_traceback_later(min(seconds + GRACE, threading.TIMEOUT_MAX), exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            returned.set()

    return limited


# ---- Speaking ----


def report_failure(message: str, show: bool = True) -> None:
    """On stderr, and in torchrun's own report, which stands last on the screen."""
    if show:
        say(message)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": details}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report))


def warn(message: str) -> None:
    """From any rank: what happens to one may not happen to the first."""
    say(f"note: rank {os.environ.get('RANK', 0)}: {message}")


def say(message: str) -> None:
    """On stderr, the end of the line included in one go: another rank may be writing at the same time."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


# ---- Ranks that depend on each other ----

siblings: set[int] = set()  # process ids of the other ranks on this machine


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def watch() -> None:
    """A rank whose torchrun was killed must not go on, least of all beside its successor. Nor must one whose sibling is
    gone, wherever it is: in a long rollout, or waiting for that sibling on a GPU."""
    parent = os.getppid()

    def end_with_them() -> None:
        while os.getppid() == parent and all(map(_is_alive, list(siblings))):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_them, daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def stand_by() -> None:
    """Another rank failed and is the one to report it. torchrun, having noticed, ends this one."""
    if under_torchrun():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)


def _is_lost_contact(error: Exception) -> bool:
    """A collective call, be it of PyTorch's own (of shards, of a checkpoint), fails so where another rank is gone."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "onnection"))

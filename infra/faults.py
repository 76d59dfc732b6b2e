"""When something goes wrong: who reports it, and how a run ends.

torchrun supervises: it ends the other ranks, and shows last what the first rank that failed has recorded. A rank that
merely lost contact stands by and records nothing. Left out: going on without the rank that is gone; the same command
does, from the last checkpoint.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from tqdm import tqdm

from config import Config, UserError


class FailedElsewhere(UserError):
    """A user's error on another rank, which is the one to report it."""


# ---- The end of a run ----


def run_to_the_end(train: Callable[[Config], int], config: Config) -> int:
    """-> exit code; what went wrong has been reported"""
    with contextlib.suppress(AttributeError):  # in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal cannot show ends no run
    try:
        code = train(config)
        if dist.is_initialized():
            dist.barrier()  # nobody is gone before all are done
    except FailedElsewhere:
        code = stand_by(2)
    except (UserError, torch.OutOfMemoryError) as error:
        error.with_traceback(None).__cause__ = None  # where in this code it was found helps nobody
        error.__suppress_context__ = True
        code = report_failure(error, 2, f"error: {error}")
    except KeyboardInterrupt:  # before the first step
        say("stopped")
        code = 130
    except (Exception, SystemExit) as error:
        if is_lost_contact(error):
            say(f"lost contact with another rank: {str(error).splitlines()[0]}")
            code = stand_by(1)
        else:
            code = report_failure(error, 1, traceback.format_exc())
    if dist.is_initialized() and not (code and under_torchrun()):  # a rank that failed waits for nobody
        dist.destroy_process_group()
    return code


def report_failure(error: BaseException, code: int, message: str) -> int:
    """On stderr, and in torchrun's own report, which stands last on the screen. -> the exit code"""
    say(message.rstrip())
    get_error_handler().record_exception(error)
    return code


def stand_by(code: int) -> int:
    """Another rank failed and is the one to report it. torchrun, having noticed, ends this one."""
    if under_torchrun():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)
    return code


def leave(code: int) -> None:
    """Ends the process. Threads of PyTorch's own, which shards have, may abort one that ends in the ordinary way."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_lost_contact(error: BaseException) -> bool:
    """A collective call, be it of PyTorch's own (of shards, of a checkpoint), fails so where another rank is gone. What
    a user's code raises may read alike."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    reads_so = any(word in str(error) for word in ("gloo", "NCCL", "onnection"))
    return isinstance(error, RuntimeError) and reads_so and raised_in.startswith(os.path.dirname(torch.__file__))


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun() -> None:
    """A rank whose torchrun was killed must not go on, least of all beside its successor: Linux ends it then."""
    if under_torchrun() and sys.platform == "linux":
        torchrun, when_parent_dies = os.getppid(), 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(when_parent_dies, signal.SIGKILL)
        if os.getppid() != torchrun:  # it was gone before Linux was asked
            os._exit(1)


def stop_requests() -> list[int]:
    """Grows by a signal that asks to stop: the step in progress is finished first. A second one, later than the copies
    of the first that torchrun sends, ends the process at once."""
    caught: list[int] = []
    since = math.inf

    def note(number: int, frame: object) -> None:
        nonlocal since
        caught.append(number)
        since = min(since, time.monotonic())
        if len(caught) == 1 and os.environ.get("RANK", "0") == "0":  # print may have been interrupted
            os.write(2, b"\nstopping after this step; once more in 3 seconds or later: at once\n")
        if time.monotonic() - since > 3:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


@contextmanager
def time_limit(seconds: float, name: str) -> Iterator[None]:
    """Around a function that the user wrote, of this name. Nothing can interrupt one that hangs, be it in C, but after
    these seconds its process ends and shows where it was."""
    seconds = min(seconds, threading.TIMEOUT_MAX - 1)
    told = threading.Timer(seconds, say, [f"reward function {name} took longer than --reward_timeout {seconds:g} s"])
    told.daemon = True
    told.start()
    faulthandler.dump_traceback_later(seconds + 1, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        told.cancel()


def warn(message: str) -> None:
    """From any rank: what happens to one may not happen to the first."""
    say(f"note: rank {os.environ.get('RANK', 0)}: {message}")


def say(message: str) -> None:
    """On stderr, the end of the line included in one go: another rank may be writing at the same time."""
    tqdm.write(message + "\n", file=sys.stderr, end="")  # not into the line of a bar

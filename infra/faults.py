"""How a run ends when something goes wrong, and which rank reports it.

When a rank fails, torchrun ends the other ranks, and the last lines on the screen are the error of the rank that failed
first. A rank that has only lost contact with another one records no error, so that the error shown is the real cause.
Left out: carrying on without the failed rank. The same command resumes from the last checkpoint instead.
"""

import atexit
import errno
import faulthandler
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from tqdm import tqdm

from config import SMALLER, UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
caught: list[int] = []  # those that have come since `stop_requests` was called


class FailedElsewhere(UserError):
    """Another rank has raised an error and reports it, so this rank ends without a message."""


def run_to_the_end(train: Callable[[], int]) -> int:
    """Train, report any error, and return the exit code."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None if it was closed when the program started
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        code = train()
        if dist.is_initialized():
            dist.barrier()  # a rank that left earlier would look like one that failed
            dist.destroy_process_group()
        return code
    except FailedElsewhere:
        return stand_by(2)
    except BaseException as error:
        if is_lost_contact(error):
            say(f"lost contact with another rank: {str(error).splitlines()[0]}")
            return stand_by(1)
        if isinstance(error, torch.OutOfMemoryError):
            error = UserError(f"{error}: {SMALLER}")
        if any(os.strerror(number) in str(error) for number in FULL_DISK):  # whichever library has written
            error = UserError(f"{str(error).strip().splitlines()[-1]}; what was saved before is intact")
        is_mistake = isinstance(error, UserError)
        # Before the ranks have met, all those of a machine find the same mistake, for instance in the command line.
        if is_mistake and not dist.is_initialized() and os.environ.get("LOCAL_RANK", "0") != "0":
            return stand_by(2)
        say(f"error: {error}" if is_mistake else traceback.format_exc().rstrip())
        if is_mistake:  # torchrun's report needs no stack trace of it
            error.__traceback__ = error.__cause__ = error.__context__ = None
        get_error_handler().record_exception(error)  # for the report that torchrun prints at the end
        return 2 if is_mistake else 1
    finally:
        for number, handler in handlers.items():  # in a notebook, the process continues after the run
            signal.signal(number, handler)


def stand_by(code: int) -> int:
    """Wait, so that the rank that failed exits first, and return the exit code. torchrun shows the rank that exited
    first as the cause. Then it sends SIGTERM to the others, which need not wait any longer."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from now on, it ends this process at once
        time.sleep(5)
    return code


def leave(code: int) -> None:
    """End the process without waiting for its threads. With sharding, PyTorch has threads that may abort a process that
    exits in the ordinary way."""
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # stdout may be closed
        sys.stdout.flush()
    os._exit(code)


def is_lost_contact(error: BaseException) -> bool:
    """Return whether a collective call failed because another rank is gone. Only errors raised inside PyTorch count,
    because a user's own network code may fail with a similar message. An NCCL error that says "out of memory" does not
    count, because then it is this rank that failed."""
    message, raised_in = str(error).lower(), traceback.extract_tb(error.__traceback__)[-1].filename
    matches = any(word in message for word in ("gloo", "nccl", "connection")) and "out of memory" not in message
    return isinstance(error, RuntimeError) and matches and raised_in.startswith(os.path.dirname(torch.__file__))


def stop_requests() -> list[int]:
    """Return a list to which the number of each of these signals is appended from now on. The caller stops after the
    current step once the list is not empty. Later signals have no further effect. This matters because torchrun passes
    signals on to the ranks, so one Ctrl-C may arrive several times."""
    caught.clear()

    def note(number: int, frame: object) -> None:
        caught.append(number)
        if len(caught) == 1 and os.environ.get("RANK", "0") == "0":
            # The signal may have arrived in the middle of a print, and Python does not allow a print inside a print.
            # In `train.py 2>&1 | tee log`, Ctrl-C ends tee as well, and nobody reads stderr any more.
            with suppress(OSError):
                os.write(2, b"\nstopping after this step; Ctrl-\\ (SIGQUIT) stops at once, without saving\n")

    for number in SIGNALS:
        if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):  # under nohup, it stays ignored
            signal.signal(number, note)
    return caught


def seconds_to_stop() -> float:
    """Return how long this process may go on after a signal: torchrun kills its ranks after a while."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return math.inf
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


def not_interrupted(call: Callable, *args: Any) -> Any:
    """Return call(*args). If a signal comes during the call, call again, with the same random numbers. Ctrl-C or a
    scheduler may send the signal to all processes, and so end those that a reward has started. The reward would then
    find a right answer wrong."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    while True:
        signals_before = len(caught)
        made = call(*args)
        if len(caught) == signals_before:
            return made
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """End the process if a user's function takes longer than this, and print where it was.

    The watchdog of faulthandler prints a stack trace and ends the process, even while the function is inside C code
    that never returns, such as the match of a regular expression. The stack trace does not show a function that is
    awaited, so one second earlier a timer prints what it is."""
    timer = threading.Timer(seconds, say, [f"{what} took longer than --reward_timeout {seconds:g} s"])
    timer.start()
    faulthandler.dump_traceback_later(seconds + 1, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def warn(message: str) -> None:
    """Print a note with the number of this rank. Unlike most output, it may come from any rank."""
    say(f"note: rank {os.environ.get('RANK', 0)}: {message}")


def say(message: str) -> None:
    """Print to stderr without breaking a progress bar. The message and its line end go out in one write, because other
    ranks may print at the same time."""
    tqdm.write(message + "\n", file=sys.stderr, end="")

"""When something goes wrong: which rank reports it, and how a run ends.

torchrun ends the other ranks, and its report ends with what the first rank that failed has recorded. A rank that only
lost contact waits to be ended and records nothing. Left out: going on without the failed rank. The same command
continues from a checkpoint.
"""

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from tqdm import tqdm

from config import Config, UserError


class FailedElsewhere(UserError):
    """Another rank has raised a UserError, and reports it."""


def run_to_the_end(train: Callable[[Config], int], config: Config) -> int:
    """Train, and report what goes wrong. -> exit code"""
    try:
        code = train(config)
        if dist.is_initialized():
            dist.barrier()  # a rank that left earlier would look like one that failed
            dist.destroy_process_group()
        return code
    except KeyboardInterrupt as stopped:  # before the first step
        if os.environ.get("RANK", "0") == "0":
            say("stopped before a step was made; the same command starts again")
        return 128 + (stopped.args or [signal.SIGINT])[0]
    except FailedElsewhere:
        return stand_by(2)
    except (UserError, torch.OutOfMemoryError) as error:
        error.with_traceback(None).__cause__ = None  # torchrun would show where in this code it was raised
        return report_failure(error, 2, f"error: {error}")
    except BaseException as error:
        if is_lost_contact(error):
            say(f"lost contact with another rank: {str(error).splitlines()[0]}")
            return stand_by(1)
        return report_failure(error, 1, traceback.format_exc())


def report_failure(error: BaseException, code: int, message: str) -> int:
    """Write to stderr, and to torchrun's own report, which comes last on the screen. -> the exit code"""
    say(message.rstrip())
    get_error_handler().record_exception(error)
    return code


def stand_by(code: int) -> int:
    """Give the rank that failed time to report it. torchrun shows the rank that ended first as the cause."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(5)
    return code


def leave(code: int) -> None:
    """End the process. With shards PyTorch has threads that may abort a process which ends in the ordinary way."""
    atexit._run_exitfuncs()
    with suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
    os._exit(code)


def is_lost_contact(error: BaseException) -> bool:
    """Whether a collective call failed because another rank is gone. The error must come from PyTorch, because a user's
    code may raise one that reads the same. NCCL's error reads the same if memory runs out."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    reads_so = any(word in str(error) for word in ("gloo", "NCCL", "onnection")) and "out of memory" not in str(error)
    return isinstance(error, RuntimeError) and reads_so and raised_in.startswith(os.path.dirname(torch.__file__))


def end_with_torchrun() -> None:
    """Let Linux end this rank if its torchrun is killed. Otherwise it would still run when the next torchrun starts."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        torchrun, when_parent_dies = os.getppid(), 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(when_parent_dies, signal.SIGKILL)
        if os.getppid() != torchrun:  # torchrun was gone before Linux was asked
            os._exit(1)


@contextmanager
def handlers_put_back() -> Iterator[None]:
    """Until `stop_requests` is called, a signal ends the run at once. At its end, restore the handlers of a notebook,
    which goes on. With several ranks the process ends, and until then torchrun may send it further copies of a signal.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items() if not dist.is_initialized() else ():
            signal.signal(number, handler)


def stop_requests() -> list[int]:
    """-> a list that grows when a signal asks to stop after the step. A second signal ends the process, if it comes
    more than 3 seconds later: torchrun passes on copies of the first."""
    caught: list[int] = []
    times: list[float] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        times.append(time.monotonic())
        if len(caught) == 1 and os.environ.get("RANK", "0") == "0":  # the signal may have interrupted a print
            os.write(2, b"\nstopping after this step; once more in 3 seconds or later: at once\n")
        if times[-1] - times[0] > 3:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


@contextmanager
def time_limit(seconds: float, name: str, what: str = "reward function") -> Iterator[None]:
    """Limit the time of a user's function. After these seconds the process ends and shows where it was, even if the
    function runs in C."""
    timer = threading.Timer(seconds, say, [f"{what} {name} took longer than --reward_timeout {seconds:g} s"])
    timer.start()
    faulthandler.dump_traceback_later(seconds + 1, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def warn(message: str) -> None:
    """Show a note of any rank, because what happens to one rank may not happen to the first."""
    say(f"note: rank {os.environ.get('RANK', 0)}: {message}")


def say(message: str) -> None:
    """Write to stderr, in one call with the end of the line, because another rank may write at the same time."""
    tqdm.write(message + "\n", file=sys.stderr, end="")  # keeps the line of a progress bar whole

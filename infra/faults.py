"""When something goes wrong: who reports it, and how a run ends.

torchrun ends the other ranks, and shows last what the first rank that failed has recorded. A rank that merely lost
contact stands by and records nothing. Left out: going on without that rank; the same command does, from a checkpoint.
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
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from tqdm import tqdm

from config import Config, UserError


class FailedElsewhere(UserError):
    """A user's error on another rank, which is the one to report it."""


def run_to_the_end(train: Callable[[Config], int], config: Config) -> int:
    """-> exit code; what went wrong has been reported"""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal cannot show ends no run
    try:
        code = train(config)
        if dist.is_initialized():
            dist.barrier()  # nobody is gone before all are done
            dist.destroy_process_group()
        return code
    except FailedElsewhere:
        return stand_by(2)
    except (UserError, torch.OutOfMemoryError) as error:
        error.with_traceback(None).__cause__ = None  # where in this code it was found helps nobody
        return report_failure(error, 2, f"error: {error}")
    except BaseException as error:
        if is_lost_contact(error):
            say(f"lost contact with another rank: {str(error).splitlines()[0]}")
            return stand_by(1)
        return report_failure(error, 1, traceback.format_exc())


def report_failure(error: BaseException, code: int, message: str) -> int:
    """On stderr, and in torchrun's own report, which stands last on the screen. -> the exit code"""
    say(message.rstrip())
    get_error_handler().record_exception(error)
    return code


def stand_by(code: int) -> int:
    """Another rank failed and is the one to report it. torchrun, having noticed, ends this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)
    return code


def leave(code: int) -> None:
    """Ends the process. Threads of PyTorch's own, which shards have, may abort one that ends in the ordinary way."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def is_lost_contact(error: BaseException) -> bool:
    """A collective call, be it of PyTorch's own (of shards, of a checkpoint), fails so where another rank is gone. What
    a user's code raises may read alike, and so does NCCL where memory runs out."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    reads_so = any(word in str(error) for word in ("gloo", "NCCL", "onnection")) and "out of memory" not in str(error)
    return isinstance(error, RuntimeError) and reads_so and raised_in.startswith(os.path.dirname(torch.__file__))


def end_with_torchrun() -> None:
    """A rank whose torchrun was killed must not go on, least of all beside its successor: Linux ends it then."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        torchrun, when_parent_dies = os.getppid(), 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(when_parent_dies, signal.SIGKILL)
        if os.getppid() != torchrun:  # it was gone before Linux was asked
            os._exit(1)


@contextmanager
def handlers_put_back() -> Iterator[None]:
    """A notebook goes on after the run; other ranks may still be sent copies of a signal."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items() if not dist.is_initialized() else ():
            signal.signal(number, handler)


def stop_requests() -> list[int]:
    """Grows by a signal asking to stop after the step. A second one, later than torchrun's copy, ends the process."""
    caught: list[int] = []
    times: list[float] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        times.append(time.monotonic())
        if len(caught) == 1 and os.environ.get("RANK", "0") == "0":  # print may have been interrupted
            os.write(2, b"\nstopping after this step; once more in 3 seconds or later: at once\n")
        if times[-1] - times[0] > 3:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


@contextmanager
def time_limit(seconds: float, name: str, what: str = "reward function") -> Iterator[None]:
    """Around a function of the user's. After these seconds its process ends, be it in C, and shows where it was."""
    told = threading.Timer(seconds, say, [f"{what} {name} took longer than --reward_timeout {seconds:g} s"])
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

"""What several test files share: tiny models, whole runs in forked processes, and faults that a test causes in a run.

Each process has one thread, because a test may start more processes than there are cores. GPUs are hidden, because
otherwise all processes would share the same one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import multiprocessing
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from config import SETTINGS, Config, kind_of
from infra.command_line import contradictions, ready, wrong_values
from loss import SWITCHES_READ, policy_loss
from tasks import sorting
from tasks._characters import char_tokenizer, small_config

# ---- Models of every family, small enough to run in milliseconds; gradients as vectors ----

EOS = PAD = 2  # the same id, as in many real models
VOCAB = 61
BASE = dict(vocab_size=VOCAB, tie_word_embeddings=False)
TOKENS = BASE | dict(pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS)
SIZES = TOKENS | dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip
GPT = TOKENS | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
HYBRID = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
FAMILIES = {  # name: model type, settings
    **{name: (name, SIZES) for name in ("qwen2", "qwen3", "llama", "gemma", "cohere", "phi")},
    **{f"{name} tied": (name, SIZES | {"tie_word_embeddings": True}) for name in ("qwen2", "llama")},
    "mistral": ("mistral", SIZES | {"sliding_window": 4}),
    "gemma2": ("gemma2", SIZES | {"final_logit_softcapping": 20.0}),
    "gemma3": ("gemma3_text", SIZES | {"sliding_window": 4}),
    "granite": ("granite", SIZES | {"logits_scaling": 8.0}),
    "gpt2": ("gpt2", GPT),
    "gpt2 tied": ("gpt2", GPT | {"tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    **{name: (name, SIZES | EXPERTS) for name in ("mixtral", "qwen3_moe")},
    "gpt_oss": ("gpt_oss", SIZES | EXPERTS | {"sliding_window": 4}),
    "bloom": ("bloom", BASE | dict(hidden_size=32, n_layer=2, n_head=4)),  # no position ids
    "mamba": ("mamba", SIZES | {"state_size": 4}),  # no attention
    "falcon_h1": ("falcon_h1", SIZES | HYBRID | {"lm_head_multiplier": 0.5}),
}


def tiny_model(name: str = "qwen2", dtype: torch.dtype = torch.float64, spread: float = 4.0, **settings) -> nn.Module:
    """Make a model in train mode, without dropout. `spread` is the standard deviation of its logits."""
    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes | settings))
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        # Weights are enlarged, so that the context matters. Noise is added, so that no bias or scale is exactly 0 or 1.
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.02)
        logits = model(torch.arange(3, 15)[None]).logits
        model.get_output_embeddings().weight.mul_(spread / logits.std())
    return model.train()


def save_chat_model(folder: Path, alphabet: str, template: str | None, **generation) -> None:
    """Save a small random Llama with a tokenizer of single characters, a chat template and generation settings."""
    tokenizer = char_tokenizer(alphabet)
    tokenizer.chat_template = template
    config = small_config(tokenizer, hidden_size=32, intermediate_size=48)
    config.max_position_embeddings = 1024
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for weights in model.parameters():
        weights.data *= 3 if weights.dim() > 1 else 1  # large enough for the prompt to matter
    if generation:
        model.generation_config = GenerationConfig(**generation)
    for part in (model, tokenizer):
        part.save_pretrained(folder)


def as_lists(completions: list) -> list[tuple]:
    """Return all values of the completions as numbers and lists, which can be compared with ==."""
    arrays = [(one.ids, one.logp, one.written, *(one.kept or ())) for one in completions]
    lists = [[None if x is None else np.asarray(x).tolist() for x in each] for each in arrays]
    return [(one.truncated, one.kept is None, each) for one, each in zip(completions, lists)]


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters as one vector. A parameter without a gradient counts as 0."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error of a hundred roundings."""
    return 100 * torch.finfo(dtype).eps


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the length of the difference, divided by the length of the expected vector."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# ---- Whole runs ----

ROOT = Path(__file__).parent
# Metrics that differ from run to run.
MEASURED = {"seconds_rollout", "seconds_update", "tokens_per_second", "peak_memory_gb", "peak_memory_reserved_gb"}
MEASURED |= {"seconds_handover", "seconds_waited"}

# Runs are forked from a server that has already imported everything, so that each starts in milliseconds. It has also
# loaded a model, for which transformers compiles nine hundred patterns, and drawn the rows of the most used task.
# Nothing waits for the disk, which would take a third of the time: only a loss of power could show the difference.
os.fsync = lambda file: None
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["conftest", "train", "torch.distributed.launcher.api", "transformers.trainer_utils"]
PROCESSES.set_forkserver_preload(PRELOADED)
disable_progress_bar()
AutoModelForCausalLM.from_pretrained(ROOT / "models/addition")
sorting.split = functools.cache(sorting.split)
sorting.split(sorting.draw_row)


@pytest.fixture(scope="session")
def sorting(tmp_path_factory) -> dict:
    """Return the settings of a small run that learns to sort the letters of a word. Its data are about forty words."""
    path, r = tmp_path_factory.mktemp("data") / "rows.jsonl", random.Random(0)
    # A dict has no duplicates and keeps the order.
    words = dict.fromkeys("".join(r.choices("abcdef", k=r.randint(1, 6))) for _ in range(40))
    path.write_text("".join(json.dumps({"prompt": f"{w}>", "answer": "".join(sorted(w))}) + "\n" for w in words))
    # With samples_per_step=-1, all completions are saved. With max_grad_norm=1e6, no gradient is clipped.
    return dict(
        task="sorting", data=path, prompts_per_step=3, num_generations=4, steps=2, warmup_steps=0, eval_every=0,
        samples_per_step=-1, max_grad_norm=1e6,
    )  # fmt: skip


def flags(settings: dict, out: Path) -> list[str]:
    """Return the command line of a run with these settings."""
    words = []
    for name, value in (settings | {"out": out}).items():
        if name != "eval_k" or settings.get("eval_every") != 0:  # it is refused in a run that does not evaluate
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def work(before: tuple[Callable, ...], args: list[str]) -> None:
    """Run train.py with these arguments. The functions in `before` are called first. They may cause a fault."""
    for prepare in before:
        prepare()
    # Look the modules up only now, because a function in `before` may have replaced them, as `in_a_copy` below does.
    exit_code = resolve_name("train:main")(args)
    resolve_name("infra.faults:leave")(exit_code)


def forked(screen: Path, env: dict[str, str], do: Callable, *args: object) -> None:
    """Call do(*args) in a forked process. What it prints goes to the file `screen`."""
    os.environ.update(env)
    with screen.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A process ignores SIGINT if pytest was started as a background job of a shell, and SIGHUP if nohup started it.
    # This undoes that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    do(*args)


def screen_of(out: Path) -> Path:
    """Return the file for everything that the run in the folder `out` prints."""
    return out.with_name(f"{out.name}.screen")


def exit_codes(processes: list) -> list[int]:
    """Wait for all processes and return their exit codes."""
    end = time.monotonic() + 900  # seconds; long enough for a busy machine
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [process for process in processes if process.exitcode is None]
    for process in hanging:
        process.kill()
    assert not hanging, f"{len(hanging)} of {len(processes)} processes did not end in time"
    return [process.exitcode for process in processes]


def run(settings: dict, out: Path, *before: Callable, code: Any = 0, world: int = 1) -> str:
    """Make a whole run, with a process for each rank, and return what it printed. `code` is the expected exit code of
    every rank, or a list with one code for each rank, or None if any code will do. Several ranks get the environment
    that a launcher would give them; a single one gets none."""
    screen_of(out).write_text("")
    # Open a socket for a moment, to find a free port.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(world)}
    ranks = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)] if world > 1 else [{}]
    call = work, before, flags(settings, out)  # the function that `forked` calls, and its arguments
    processes = [PROCESSES.Process(target=forked, args=(screen_of(out), rank_env, *call)) for rank_env in ranks]
    for process in processes:
        process.start()
    codes, shown = exit_codes(processes), screen_of(out).read_text()
    assert code is None or codes == (code if isinstance(code, list) else [code] * world), (codes, shown)
    return shown


def run_supervised(settings: dict, out: Path, *before: Callable, restarts: int = 0) -> tuple[int, str]:
    """Run two ranks under the agent of torchrun. Return the exit code of the agent and what was printed."""
    screen_of(out).write_text("")
    # Agent and ranks keep the writing end of this pipe open. When the last of these processes has ended, the pipe is
    # closed, and poll() returns True.
    reading_end, writing_end = PROCESSES.Pipe(duplex=False)
    call = supervise, before, flags(settings, out), restarts, writing_end  # the function that `forked` calls
    agent = PROCESSES.Process(target=forked, args=(screen_of(out), {}, *call))
    agent.start()
    writing_end.close()
    try:
        assert reading_end.poll(200), screen_of(out).read_text()
        return exit_codes([agent])[0], screen_of(out).read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)  # the agent and its ranks, see os.setsid() in `supervise`


def supervise(before: tuple[Callable, ...], args: list[str], restarts: int, writing_end: object) -> None:
    """Be the agent of torchrun. It forks its ranks, so that nothing is imported again. `writing_end` is only kept
    open."""
    launcher = resolve_name("torch.distributed.launcher.api")
    os.setsid()  # so that agent and ranks are a process group, and can be killed together
    rendezvous = dict(run_id="test", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
    # At least one node and at most one, with two ranks.
    config = launcher.LaunchConfig(1, 1, 2, **rendezvous, max_restarts=restarts, start_method="fork")
    launcher.elastic_launch(config, work)(before, args)


def in_a_copy(folder: Path, module: str) -> None:
    """Make this process import the project from `folder`, which has a copy of it. After this, `import train` returns
    the copy's file `module`, which is "train" or another one that takes its place."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    torch.library.register_autocast = lambda *args: None  # it was called before, and torch 2.11 refuses a second call
    copied = {path.stem for path in folder.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in copied]:
        del sys.modules[name]
    sys.modules["train"] = importlib.import_module(module)


# ---- Settings that go together ----


def allowed_pairs() -> Iterator[tuple[dict, dict]]:
    """Yield each objective, ratio, old policy and KL estimator with each value of every other switch of policy_loss
    that is allowed with it. A pair is two dictionaries of settings: the first choice with what the two need, and the
    switch. A number is 0.8 or 1.3. A new switch joins by its name."""
    needs = dict(kl_estimator={"beta": 0.5}, kl_importance={"beta": 0.5}, cispo={"epsilon_high": 2.0})
    needs["tis_mode"] = {"tis_floor": 0.8, "tis_cap": 1.3}
    settings = [SETTINGS[name] for name in [*policy_loss.__kwdefaults__, "score_centering"] if name in SETTINGS]
    values = {x.name: x.metadata["names"] or {kind_of(x)(0.8), kind_of(x)(1.3)} for x in settings}
    switches = [(name, x) for name in values for x in values[name]]
    choices = [(name, x) for name in SWITCHES_READ for x in SWITCHES_READ[name]]
    default = ready(Config(), on_gpu=False)
    for (choice, x), (name, y) in itertools.product(choices, switches):
        chosen = needs.get(choice, {}) | needs.get(x, {}) | needs.get(name, {}) | needs.get(y, {}) | {choice: x}
        without = dataclasses.replace(default, **chosen)
        pair = dataclasses.replace(without, **{name: y})
        is_refused = any([*wrong_values(pair), *contradictions(pair)])
        if name != choice and pair != without and not is_refused:
            yield chosen, {name: y}


# ---- Faults in a run ----


def replace(name: str, make: Callable[[Callable], Callable], rank: int | None = None) -> None:
    """Replace the function of this name by make(function), on every rank or on one."""
    owner, _, attribute = name.rpartition(".")
    if rank is None or os.environ.get("RANK", "0") == str(rank):
        setattr(resolve_name(owner), attribute, make(resolve_name(name)))


def at(name: str, n: int, action: Callable, after: bool = False, rank: int | None = None, of: str = "") -> None:
    """Call `action` before (or after) the n-th call of the function with this name. If the function takes a path, `of`
    limits this to some files: only calls whose first argument, as a string, ends with `of` are counted."""
    calls = itertools.count(1)

    def watched(call: Callable) -> Callable:
        def calling(*args, **kwargs):
            # Without `of`, every call counts. next(calls) counts it.
            is_the_nth = (not of or str(args[0]).endswith(of)) and next(calls) == n
            if is_the_nth and not after:
                action()
            result = call(*args, **kwargs)
            if is_the_nth and after:
                action()
            return result

        return calling

    replace(name, watched, rank)


def fail(error: Exception) -> None:
    raise error


oom = functools.partial(fail, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


def die() -> None:
    """Kill this process, which gets no chance to clean up."""
    os.kill(os.getpid(), signal.SIGKILL)


# ---- What a GPU would have to do: operations and waits, counted on a CPU; and CUDA graphs ----

NO_KERNEL = {
    "promote_types",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "set_",
}
WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}  # the host needs their results
COPIES = {"cpu", "tolist", "tensor", "as_tensor"}  # between host and GPU


class Operations(TorchDispatchMode):
    """Counts, by name, the operations inside a `with` block for which Python would launch a kernel on a GPU (views need
    none), and those for which the host would wait."""

    def __init__(self):
        super().__init__()
        self.launches, self.waits, self.copies = Counter(), Counter(), Copies(self)
        self.bytes = 0  # read and written by these operations

    def __enter__(self) -> "Operations":
        self.copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.copies.__exit__(*error)

    def wait(self, name: str) -> None:
        self.waits[name] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        indices = args[1] if name.startswith("index") and isinstance(args[1], list) else []
        if name in WAITS or any(x is not None and x.dtype == torch.bool for x in indices):
            self.wait(name)
        out = func(*args, **(kwargs or {}))
        if not func.is_view and name not in NO_KERNEL and name not in WAITS:
            self.launches[name] += 1
            read = () if name == "gather" else args  # it reads as much as it writes
            self.bytes += sum(x.nbytes for x in tree_leaves((read, out)) if isinstance(x, Tensor))
        return out


class Copies(TorchFunctionMode):
    """Counts copies between the host and the device, which are no operations if the device is a CPU. `F.rms_norm`, for
    which a CPU makes several operations, is one."""

    def __init__(self, operations: Operations):
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in COPIES and (name in ("cpu", "tolist") or "device" in (kwargs or {})):
            self.operations.wait(name)
        if name != "rms_norm":
            return func(*args, **(kwargs or {}))
        launches = self.operations.launches
        before = launches + Counter({name: 1})
        out = func(*args, **(kwargs or {}))
        launches.clear()
        launches.update(before)
        return out


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`: records the operations of a capture, and repeats them on its tensors. A
    number that was read on the host keeps its recorded value."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.shared_pool, self.recording = pool, Recording()
        self.recording.__enter__()

    def capture_end(self) -> None:
        self.recording.__exit__(None, None, None)
        self.launches = self.recording.launches

    def pool(self) -> object:
        return self.shared_pool or self

    def replay(self) -> None:
        with _disable_current_modes():  # for `Operations`, a replay is no operation
            for func, args, kwargs, out in self.recording.calls:
                for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    # A result in new memory goes where the recorded one is. An operation in place has put it there.
                    if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


class Recording(Operations):
    """Records operations, and raises an error where the host would wait. A GPU would not run them. Here they run, so
    the tensors that they change are put back at the end."""

    def __init__(self):
        super().__init__()
        self.calls, self.changed = [], []

    def wait(self, name: str) -> None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {name}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            self.changed.append((args[0], args[0].clone()))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for tensor, before in reversed(self.changed):
            tensor.copy_(before)


@pytest.fixture
def graphs(monkeypatch) -> list[Graph]:
    """Let `--decode graph` capture graphs on a CPU, and return the list of all graphs that are made."""
    made = []
    stand_ins = dict(CUDAGraph=lambda: made.append(Graph()) or made[-1], Stream=object, synchronize=lambda: None)
    stand_ins |= dict(stream=contextlib.nullcontext, mem_get_info=lambda: (3e9, 8e10), empty_cache=pytest.fail)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("infra.decoding.CAPTURING", {"cpu"})
    return made


# ---- Calls, updates of the weights, and what a run writes ----


@pytest.fixture
def watch(monkeypatch):
    """Return a function that replaces the function `name` of `owner` by one that records its calls. The record of each
    call has its arguments, its keyword arguments and its result."""

    def watched(owner: object, name: str) -> list[SimpleNamespace]:
        calls, function = [], getattr(owner, name)

        @functools.wraps(function)
        def calling(*args, **kwargs):
            calls.append(SimpleNamespace(args=args, kwargs=kwargs, result=function(*args, **kwargs)))
            return calls[-1].result

        calling.__kwdefaults__ = getattr(
            function, "__kwdefaults__", None
        )  # which name the settings that are passed to it
        monkeypatch.setattr(owner, name, calling)
        return calls

    return watched


@pytest.fixture
def updates():
    """Record the gradient and the learning rates that the optimizer gets in each update."""
    seen: list[tuple[Tensor, list[float]]] = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append((gradient_of(optimizer), [group["lr"] for group in optimizer.param_groups]))
    )
    yield seen
    hook.remove()


def gradient_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the gradient of the first group of parameters as one vector. Most optimizers here have only that one."""
    return torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]).double()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(out: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without times and memory, which differ from run to run."""
    return [{name: x for name, x in line.items() if name not in MEASURED} for line in lines(out / "metrics.jsonl")]


def samples(out: Path, kind: str = "train") -> list[dict]:
    return [line for line in lines(out / "samples.jsonl") if line["kind"] == kind]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file in the folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def errors(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith("error: ")]


def assert_same_files(out: Path, whole: Path) -> None:
    """Assert that the run in `out` wrote the same files, bit for bit, as the run in `whole`. In most tests, `out` was
    interrupted and resumed, and `whole` was not. Times and memory may differ."""
    assert metrics(out) == metrics(whole)
    assert (out / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert contents(out / "model") == contents(whole / "model")
    assert not list(out.rglob("*.partial"))


def assert_same_run(out: Path, whole: Path, tolerance: float = 1e-4) -> None:
    """Compare two runs. Their completions must be identical. Advantages, metrics and weights may differ by rounding in
    float32. Adam makes such differences larger, because it scales all entries of a gradient to a similar size, even
    tiny ones that are mostly rounding errors. The log-probs of tokens may differ by 0.01 more, because samples.jsonl
    rounds them to two decimals."""
    for ours, theirs in zip(lines(out / "samples.jsonl"), lines(whole / "samples.jsonl"), strict=True):
        # The first entry of a token is its text. The others are numbers, such as its log-prob.
        for token, other in zip(ours.pop("tokens"), theirs.pop("tokens"), strict=True):
            assert token == [other[0], *(pytest.approx(x, abs=0.01 + tolerance) for x in other[1:])]
        assert ours == theirs | {"advantage": pytest.approx(theirs["advantage"], abs=tolerance)}
    for ours, theirs in zip(metrics(out), metrics(whole), strict=True):
        # Without a delay, the sampler and the trainer differ by nothing but rounding in float32.
        for name in ("sampler_gap", "sampler_gap/first", "sampler_gap/last"):
            gaps = ours.pop(name, 0.0), theirs.pop(name, 0.0)
            assert (ours.get("delay") or max(gaps) < 1e-5) and gaps[0] == pytest.approx(gaps[1], tolerance, 1e-5)
        assert ours == {name: x if x is None else pytest.approx(x, tolerance, 1e-6) for name, x in theirs.items()}
    ours, theirs = (load_file(*folder.glob("model/*.safetensors")) for folder in (out, whole))
    assert ours.keys() == theirs.keys()
    ours, theirs = (torch.cat([weights[name].flatten() for name in sorted(weights)]) for weights in (ours, theirs))
    assert distance(ours, theirs) <= tolerance

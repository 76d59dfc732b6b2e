"""Print the equation that a combination of flags minimises, read out of loss.py and advantage.py themselves.

    python -m tools.equation --algorithm gspo --beta 0.04

Takes the flags of train.py. `combine_rewards`, `group_advantages`, `token_weights` and `policy_loss` are called with
symbols in place of tensors. A symbol is a small tensor that remembers the operations that made it, so the result is the
equation of the code as it is, also in a fork. Every token is taken to be trained on, every completion to have a reward,
and the task to have one reward function. A condition on data stands as `[a if condition else b]`.
"""

import inspect
import itertools
import linecache
import math
import re
import sys
import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from advantage import advantage_switches, combine_rewards, group_advantages
from config import Config
from infra import command_line
from loss import policy_loss, token_weights
from train import LOSS_SWITCHES, accumulate

P, G, T, K = 3, 4, 7, 5  # all sizes and their products differ, so that a size tells what a sum is over
OVER = {G: "j", P * G: "all", T: "t", P * G * T: "it", K: "v"}
COUNTS = {"j": "G", "all": "N", "t": "|o_i|", "it": (("Σ", "all"), "|o_i|")}
# Operations that change nothing that an equation shows.
KEEPS = """__getitem__ __get__ to float double bool reshape view flatten squeeze unsqueeze expand expand_as unbind
    contiguous clone""".split()
TO_PYTHON = "item tolist numpy numel size __len__ __bool__ __float__ __int__ __index__ __setitem__".split()
REDUCTIONS = dict(sum="Σ", nansum="Σ", nanmean="mean", amax="max", amin="min", std="std", logsumexp="logsumexp")
REDUCTIONS |= {name: name for name in ("mean", "max", "min", "any", "all")}
SIGNS = dict(add="+", sub="-", mul="*", div="/", pow="^", lt="<", gt=">", le="<=", ge=">=", eq="==", ne="!=")
SIGNS |= dict(invert="not", maximum="max", minimum="min", detach="sg")
LEVELS = {"or": 0, "and": 1, "not": 2, "<": 3, ">": 3, "<=": 3, ">=": 3, "==": 3, "!=": 3, "+": 4, "-": 4, "neg": 5}
LEVELS |= {"*": 5, "/": 5, "^": 7}

# A number, the name of a symbol, or a tuple of an operation and its arguments. A sum over t is (("Σ", "t"), argument).
Node = Any

places: set[tuple[str, int]] = set()  # the files and lines of the code that was traced
untraced: dict[str, None] = {}  # the same line only once


class Symbol(Tensor):
    """A tensor with the expression that its values stand for."""

    node: Node

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return remember(func, func(*args, **(kwargs or {})), args, kwargs or {})


def symbol(values: Tensor, node: Node) -> Symbol:
    made = values.as_subclass(Symbol)
    made.node = node
    return made


def remember(func: Any, out: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of an operation as a symbol, or as it is if it is no tensor."""
    name, x = func.__name__, node_of(args[0])
    if name == "numel" and isinstance(x, tuple) and x[:2] == ("unique", "prompt"):
        return symbol(torch.tensor(out), "P")
    if name in TO_PYTHON or isinstance(out, torch.Size):
        not_traced("shape" if isinstance(out, torch.Size) else name)
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):  # that of topk has names for its parts
        node = apply(func, out[0], args, kwargs)
        if len(out) > 1:
            not_traced(name)
        return type(out)([symbol(part, node if len(out) == 1 else ("part", node, k)) for k, part in enumerate(out)])
    if not isinstance(out, Tensor):
        return out
    out = symbol(out, apply(func, out.as_subclass(Tensor), args, kwargs))
    if name.endswith("_") and not name.endswith("__"):  # it changed its first argument
        args[0].node = out.node
    places.update(lines_traced())
    return out


def not_traced(what: str) -> None:
    """Remember that the equation lacks what this operation did."""
    file, line = lines_traced()[0]
    code = linecache.getline(file, line).strip()
    if what != "shape" or not code.startswith("if "):  # in a condition, it only decides what is computed
        untraced[f"not traced: {what} at {file.rsplit('/', 1)[-1]}:{line}: {code}"] = None


def lines_traced() -> list[tuple[str, int]]:
    """Return the files and lines of the code that is being traced, the innermost call first."""
    stack = itertools.takewhile(lambda at: at[0].f_code is not trace.__code__, traceback.walk_stack(sys._getframe()))
    lines = [(frame.f_code.co_filename, line) for frame, line in stack]
    return [(file, line) for file, line in lines if file != __file__ and "/torch/" not in file]


def node_of(x: Any) -> Node:
    if isinstance(x, Symbol):
        return x.node
    if isinstance(x, Tensor):
        return x.flatten()[0].item() if x.numel() and (x == x.flatten()[0]).all() else "tensor"
    return tuple(node_of(y) for y in x) if isinstance(x, list | tuple) else x


def apply(func: Any, out: Any, args: tuple, kwargs: dict) -> Node:
    """Return the expression of the result of an operation."""
    name = func.__name__.strip("_")
    a, by_name = [node_of(x) for x in args], {key: node_of(x) for key, x in kwargs.items()}
    if name == "stack" and len(a[0]) == 1:
        return a[0][0]
    if func.__name__ in KEEPS:
        return a[0]
    if name in REDUCTIONS and (len(args) == 1 or not isinstance(args[1], Tensor)):
        node = reduce(REDUCTIONS[name], a[0], args[0].numel() // out.numel())
    elif name == "where":
        node = make("if", *a) if func is torch.where else make("if", a[1], a[0], a[2])
    elif name == "masked_fill":
        node = make("if", a[1], a[2], a[0])
    elif name in ("clamp", "clip"):
        bounds = dict(zip(("min", "max"), a[1:])) | by_name
        node = make("clip", a[0], bounds.get("min"), bounds.get("max"))
        node = a[0] if is_certain(a[0]) and bool((out == args[0]).all()) else node
    elif name == "matmul" and a[0] == ("==", "prompt", "prompt"):
        node = reduce("Σ", a[1], G)
    elif name == "matmul" and a[0] == "tensor" and bool((args[0] == args[0].bool()).all()):  # of 0 and 1
        node = (("Σ", "some"), a[1])
    elif name in ("cat", "stack"):
        node = (name, *a[0])
    elif name.startswith("r") and name[1:] in SIGNS:  # as in 1 - x, which calls __rsub__ of x
        node = make(SIGNS[name[1:]], a[1], a[0])
    else:
        node = make(SIGNS.get(name, name), *(x for x in [*a, *by_name.values()] if x is not None))
    value = node_of(out)  # a number, if all its elements are equal
    is_constant = name.endswith("_like") or not leaves(node)
    is_fact = isinstance(value, bool) and is_certain(node)
    return value if (is_constant or is_fact) and value != "tensor" else node


def reduce(kind: str, x: Node, size: int) -> Node:
    """Return a sum, a mean and so on of `size` values."""
    if size == K + 1:  # the head and all other ids together
        return make("+", reduce(kind, part_of(x, 1), K), part_of(x, 2))
    if size == 1:
        return x
    over = OVER.get(size, f"axis{size}")
    if isinstance(x, str | tuple):
        return ((kind, over), x)
    return make("*", float(x), COUNTS.get(over, over)) if kind == "Σ" else x


def part_of(x: Node, k: int) -> Node:
    """Return an expression over concatenated tensors for the k-th of them alone."""
    if not isinstance(x, tuple):
        return x
    return x[k] if x[0] == "cat" else make(x[0], *(part_of(y, k) for y in x[1:]))


def make(op: str, *a: Node) -> Node:
    """Return an expression without what changes nothing."""
    match op, *a:
        case ("if", True, x, _) | ("if", False, _, x):
            return x
        case ("and", True, x) | ("and", x, True) | ("or", False, x) | ("or", x, False):
            return x
        case ("+" | "-", x, 0) | ("+", 0, x) | ("*" | "/", x, 1) | ("*", 1, x):
            return x
        case ("if", _, x, y) | ("min" | "max", x, y) if x == y:
            return x
        case "*", x, int() | float() as number if isinstance(x, str | tuple):
            return (op, number, x)
        case ("isnan", _) | ("<" | "==", ("exp", _), 0) | (">", _, math.inf):
            return False
        case "clip", ("exp", _) as x, low, math.inf if low in (0, -math.inf):
            return x
        case "clip", x, None, high:
            return ("min", x, high)
        case "clip", x, low, None | math.inf:
            return ("max", x, low)
        case "square", x:
            return ("^", x, 2)
        case "expm1", x:
            return make("-", make("exp", x), 1)
        case "sqrt", ("/", (("Σ", "j" | "all" as over), ("^", ("-", r, mean), 2)), ("-", n, 1)):
            return (("std", over), r) if mean == (("mean", over), r) and n == COUNTS[over] else (op, *a)
    return (op, *a)


def inside(x: Node) -> list[Node]:
    """Return all expressions in x, itself among them."""
    children = x[1:] if isinstance(x, tuple) else ()
    return [x, *(y for child in children for y in inside(child))]


def leaves(x: Node) -> set[str]:
    return {y for y in inside(x) if isinstance(y, str)}


def is_certain(x: Node) -> bool:
    """Return whether an expression is about numbers of tokens and completions alone, not about data."""
    return leaves(x) <= {*COUNTS.values()}


# ---- Tracing ----


def trace(cfg: Config) -> dict[str, Node]:
    """Call the functions of a training step with symbols. Return advantages, weights, and the loss of all completions
    together."""

    def leaf(name: str, *shape: int) -> Symbol:
        return symbol(torch.randn(shape, dtype=torch.float64), name)

    places.clear()
    untraced.clear()
    torch.manual_seed(0)  # numbers that cannot be traced are the same every time
    rewards = combine_rewards(leaf("r_i", P, G)[..., None], [1.0], cfg.combine_rewards)
    lengths = symbol(torch.full((P, G), T), "|o_i|")
    switches = advantage_switches(cfg)
    advantages = group_advantages(rewards, cfg.scale_rewards, lengths=lengths, **switches)
    mask = symbol(torch.ones(P * G, T, dtype=torch.bool), True)
    prompts = symbol(torch.arange(P).repeat_interleave(G), "prompt")
    weights = token_weights(mask, cfg.normalization, cfg.max_completion_length, prompts)
    logp, old, A, w, sampler = (leaf(x, P * G, T) for x in ("log π", "log π_old", "A_i", "w_it", "log μ"))
    given = {name: getattr(cfg, name) for name in LOSS_SWITCHES} | {"sampler_logp": sampler}
    if cfg.beta:
        given["ref_logp"] = leaf("log π_ref", P * G, T)
    if cfg.entropy_coef:
        given["entropy"] = leaf("H_it", P * G, T)
    if cfg.score_centering:
        given |= dict(head_logp=leaf("log π_v", P * G, T, K), sampler_head_logp=leaf("log μ_v", P * G, T, K))
    loss, _ = policy_loss(logp, old, A, w, mask, **given)
    return {"A_i": advantages.node, "w_it": weights.node, "L": loss.node}


# ---- Writing ----


def text(x: Node, names: dict[Node, str], index: str = "i", level: int = 0) -> str:
    """Write an expression as a person would. `index` is the letter of the completion that it is about."""
    if isinstance(x, str) or x in names:
        return names.get(x, x).replace("_i", f"_{index}")
    if not isinstance(x, tuple):
        return f"({x:.12g})" if level > 4 and not isinstance(x, bool) and x < 0 else f"{x:.12g}"
    op, *a = x
    if isinstance(op, tuple):
        kind, over = op
        letter = chr(ord(index) + 1) if over in ("j", "all", "some") else index
        over = {"j": letter, "all": f"all_{letter}", "some": f"some_{letter}"}.get(over, over)
        return f"{kind}_{over}({text(a[0], names, letter)})"
    if op in LEVELS and len(a) < 3:  # torch.sub has a third argument, alpha
        mine, sign = LEVELS[op], {"*": " · ", "^": "^", "neg": "-", "not": "not "}.get(op, f" {op} ")
        left = text(a[0], names, index, mine + (op == "^"))
        right = text(a[-1], names, index, mine + (op in ("-", "/", "<", ">", "^")))
        out = left + sign + right if len(a) == 2 else sign + right
        return f"({out})" if mine < level else out
    parts = [text(y, names, index) for y in a]
    return f"[{parts[1]} if {parts[0]} else {parts[2]}]" if op == "if" else f"{op}({', '.join(parts)})"


def varies_by_token(x: Node) -> bool:
    if isinstance(x, str):
        return x.startswith(("log", "w_it", "H_it"))
    return isinstance(x, tuple) and x[0] != ("Σ", "t") and any(map(varies_by_token, x[1:]))


def named(x: Node, letter: str) -> dict[Node, str]:
    """Give names to ratios and cases that occur more than once, the innermost first."""
    names: dict[Node, str] = {}
    distinct = dict.fromkeys(inside(x))
    used = Counter(child for node in distinct if isinstance(node, tuple) for child in node[1:])
    for node in reversed(distinct):
        if isinstance(node, tuple) and used[node] > 1 and node[0] in ("exp", "if", "clip"):
            name = letter
            if node[0] == "exp" and "log π" in leaves(node):
                name = "s" if any(isinstance(y, tuple) and y[0] == ("Σ", "t") for y in inside(node)) else "ρ"
            number = sum(other.startswith(name) for other in names.values())
            names[node] = f"{name}{number + 1 if number else ''}_i{'t' * varies_by_token(node)}"
    return names


def written(equation: dict[str, Node]) -> dict[str, str]:
    """Return the lines of the equation, each by the name of what it defines."""
    lines = {}
    for (name, x), letter in zip(equation.items(), "bux"):
        names = named(x, letter)
        for node, its_name in (names | {x: name}).items():
            lines[its_name] = text(node, {other: its for other, its in names.items() if other != node})
    return lines


def papers() -> list[str]:
    """Return the papers that comments name at the lines that were traced, and at the branches these are in."""
    found: dict[str, None] = {}
    for file, line in sorted(places):
        indent = math.inf
        for code in reversed(linecache.getlines(file)[:line]):
            its_indent = len(code) - len(code.lstrip())
            if code.strip() and its_indent < indent:
                indent = its_indent
                for paper in re.findall(r"#.*?((?:[A-Z][\w.+-]*,? (?:\w+\. )?)*\d{4}\.\d{5})", code):
                    found[paper.replace(",", "")] = None
    return list(found)


def changes_of_the_loss() -> list[str]:
    """Return the lines of `accumulate` in train.py that change the loss of a micro-batch after policy_loss."""
    source = inspect.getsource(accumulate)
    return re.findall(r"^ *(part_loss(?!, ).*(?<![=!<>])=(?!=).*)$", source, re.MULTILINE)


def main(words: list[str]) -> None:
    cfg = command_line.ready(command_line.parse(words, torch.cuda.is_available()), torch.cuda.is_available())
    equation = trace(cfg)
    for name, line in written(equation).items():
        print(f"{name:5} = {line}")
    print(f"papers: {'; '.join(papers()) or 'none named'}")
    print("j: the completions of the same prompt; all: those of the update, or of the step in A; sg: a constant")
    if cfg.top_entropy < 1.0:
        print("not in the equation: --top_entropy, which sets advantages to 0")
    for line in changes_of_the_loss():
        print(f"not in the equation: {line}")
    print(*untraced, sep="\n", end="\n" if untraced else "")


if __name__ == "__main__":
    main(sys.argv[1:])

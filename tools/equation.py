"""Print the equation that a combination of flags minimises, read out of loss.py and advantage.py themselves.

    python -m tools.equation --algorithm gspo --beta 0.04

Takes the flags of train.py. `combine_rewards`, `group_advantages`, `token_weights` and `policy_loss` are called with
symbols in place of tensors. A symbol is a small tensor that remembers the operations that made it, so the result is the
equation of the code as it is, also in a fork. Every token is taken to be trained on, every completion to have a reward,
and the task to have one reward function. A condition on data stands as `[a if condition else b]`.
"""

import linecache
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage import combine_rewards, group_advantages
from config import Config
from infra import command_line
from loss import policy_loss, token_weights
from train import LOSS_SWITCHES

P, G, T, K = 3, 4, 7, 5  # all sizes of dimensions differ, so that a size tells what a sum is over
OVER = {G: "j", P * G: "all", T: "t", K: "v"}
COUNTS = {"j": "G", "all": "N", "t": "|o_i|"}
# Operations that change nothing that an equation shows.
KEEPS = """__getitem__ __get__ to float double bool long int type type_as reshape view flatten squeeze unsqueeze expand
    expand_as contiguous clone nan_to_num broadcast_to requires_grad_ cpu""".split()
NAMES = dict(
    add="+", sub="-", mul="*", div="/", true_divide="/", truediv="/", pow="^", lt="<", gt=">", le="<=", ge=">="
)
NAMES |= dict(eq="==", ne="!=", logical_and="and", bitwise_and="and", logical_or="or", bitwise_or="or", invert="not")
NAMES |= dict(
    bitwise_not="not", logical_not="not", multiply="*", subtract="-", divide="/", negative="neg", absolute="abs"
)
REDUCTIONS = dict(sum="Σ", nansum="Σ", mean="mean", nanmean="mean", amax="max", amin="min", max="max", min="min")
REDUCTIONS |= {"any": "any", "all": "all", "logsumexp": "logsumexp"}
LEVELS = {"or": 0, "and": 1, "not": 2, "<": 3, ">": 3, "<=": 3, ">=": 3, "==": 3, "!=": 3, "+": 4, "-": 4, "neg": 5}
LEVELS |= {"*": 5, "/": 5, "^": 7}

Node = Any  # a number, or a tuple of an operation and its arguments; ("leaf", name) is a symbol without arguments


class Tracer:
    def __init__(self) -> None:
        self.places: dict[Node, set] = {}  # the lines of code that made each expression
        self.untraced: dict[str, None] = {}  # the same line only once


tracer = Tracer()


class Symbol(Tensor):
    """A tensor with the expression that its values stand for."""

    node: Node

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return remember(func, func(*args, **(kwargs or {})), args, kwargs or {})


def remember(func: Any, out: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of an operation as a symbol, or as it is if it is no tensor."""
    name, x = func.__name__, node_of(args[0])
    if name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__setitem__"):
        if not (name == "__bool__" and isinstance(x, bool)):
            file, line = places()[0]
            code = linecache.getline(file, line).strip()
            tracer.untraced[f"not traced: {name} at {file.rsplit('/', 1)[-1]}:{line}: {code}"] = None
        return x if name == "__bool__" and isinstance(x, bool) else out
    if name == "numel" and isinstance(x, tuple) and x[:2] == ("unique", ("leaf", "prompt")):
        return symbol(torch.tensor(out), ("leaf", "P"))
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        node = apply(func, args, kwargs)
        return tuple(symbol(part, node if len(out) == 1 else (node, k)) for k, part in enumerate(out))
    if not isinstance(out, Tensor):
        return out
    out = symbol(out.as_subclass(Tensor), apply(func, args, kwargs))
    if name.endswith("_") and not name.endswith("__"):  # it changed its first argument
        args[0].node = out.node
    tracer.places.setdefault(out.node, set()).update(places())
    return out


def symbol(values: Tensor, node: Node) -> Symbol:
    made = values.as_subclass(Symbol)
    made.node = node
    return made


def places() -> list[tuple[str, int]]:
    """Return the files and lines of the code that is being traced, the innermost call first."""
    frame, found = sys._getframe(1), []
    while frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != __file__:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def node_of(x: Any) -> Node:
    if isinstance(x, Symbol):
        return x.node
    if isinstance(x, Tensor):
        return x.flatten()[0].item() if x.numel() and (x == x.flatten()[0]).all() else ("leaf", "tensor")
    return tuple(node_of(y) for y in x) if isinstance(x, list | tuple) else x


def apply(func: Any, args: tuple, kwargs: dict) -> Node:
    """Return the expression of the result of an operation."""
    name = func.__name__.strip("_")
    a = [node_of(x) for x in args]
    if func.__name__ in KEEPS or (name == "unbind" and args[0].shape[-1] == 1) or (name == "stack" and len(a[0]) == 1):
        return a[0][0] if name == "stack" else a[0]
    if name.endswith("_like") or name.startswith("new_"):
        return {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0}.get(name, a[-1])
    if name == "where":
        condition, x, y = a if func is torch.where else (a[1], a[0], a[2])
        return make("if", condition, x, y)
    if name == "masked_fill":
        return make("if", a[1], a[2], a[0])
    if name in ("clamp", "clip", "clamp_min", "clamp_max"):
        low, high = (*a[1:], None, None)[:2] if name != "clamp_max" else (None, a[1])
        return make("clip", a[0], node_of(kwargs.get("min", low)), node_of(kwargs.get("max", high)))
    if name in ("max", "min", "maximum", "minimum") and len(args) > 1 and isinstance(args[1], Tensor):
        return make(name[:3], a[0], a[1])
    if name in REDUCTIONS:
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        sizes, shape = [], list(args[0].shape)
        for d in range(len(shape)) if dims is None else ([dims] if isinstance(dims, int) else dims):
            sizes.append(shape[d])
        return reduce(REDUCTIONS[name], a[0], [P * G] if sizes == [P, G] else sizes)
    if name == "matmul" and a[0] == ("same prompt",):
        return reduce("Σ", a[1], [G])
    if name in ("cat", "concat"):
        return ("cat", *a[0])
    if name in ("rsub", "rdiv", "rtruediv", "rpow", "radd", "rmul"):
        return make(NAMES.get(name[1:], name[1:]), a[1], a[0])
    return make(NAMES.get(name, name), *a, *(node_of(x) for x in kwargs.values()))


def reduce(kind: str, x: Node, sizes: list[int]) -> Node:
    for size in reversed([size for size in sizes if size != 1]):
        over = OVER.get(size, f"axis{size}")
        if size == K + 1:  # the head and all other ids together
            x = make("+", reduce(kind, part_of(x, 1), [K]), part_of(x, 2))
        elif isinstance(x, bool | int | float):
            x = make("*", float(x), ("leaf", COUNTS.get(over, over))) if kind == "Σ" else x
        else:
            x = (kind, over, x)
    return x


def part_of(x: Node, k: int) -> Node:
    """Return an expression over concatenated tensors for the k-th of them alone."""
    if not isinstance(x, tuple) or x[0] == "leaf":
        return x
    return x[k] if x[0] == "cat" else make(x[0], *(part_of(y, k) for y in x[1:]))


def make(op: str, *a: Node) -> Node:
    """Return an expression without what changes nothing."""
    number = [isinstance(x, int | float) for x in a]
    x, y = (*a, None, None)[:2]
    if op == "if":
        return (a[1] if x else a[2]) if number[0] else x if a[1] == a[2] else (op, *a)
    if op in ("and", "or"):
        for one, other in ((x, y), (y, x)):
            if isinstance(one, bool):
                return other if one == (op == "and") else one
    if op == "not" and isinstance(x, bool):
        return not x
    if op in ("isnan", "isinf"):
        return False
    if op == "==" and x == y == ("leaf", "prompt"):
        return ("same prompt",)
    if op in ("<", "<=", "==") and y == 0 and (x[0] == "exp" or is_count(x)):
        return False
    if op in (">", ">=", "!=") and y == 0 and is_count(x):
        return True
    if (op in ("<", "<=") and is_count(x) and number[1] and y <= 2) or (
        op in (">", "<") and y in (math.inf, -math.inf)
    ):
        return False
    if op == "clip":
        low, high = (None if bound in (None, math.inf, -math.inf) else bound for bound in a[1:])
        if low == (1 if is_count(x) else 0) and (is_count(x) or (not number[0] and x[0] == "exp")):
            low = None  # such an x is never lower
        if low is None and high is None:
            return x
        if not number[0]:
            return ("max", x, low) if high is None else ("min", x, high) if low is None else (op, x, low, high)
        return min(max(x, -math.inf if low is None else low), math.inf if high is None else high)
    if (op == "+" and y == 0) or (op == "-" and y == 0) or (op in "*/" and y == 1):
        return x
    if (op == "+" and x == 0) or (op == "*" and x == 1):
        return y
    if (op == "*" and 0 in (x, y)) or (op == "-" and x == y):
        return 0.0
    if op == "*" and number[1] and not number[0]:
        return (op, y, x)
    if op in ("min", "max") and x == y:
        return x
    if op == "neg" and number[0]:
        return -x
    if op in ("exp", "log", "detach") and number[0]:
        return x if op == "detach" else getattr(math, op)(x)
    if op == "square":
        return ("^", x, 2)
    if op == "expm1":
        return make("-", make("exp", x), 1)
    if op == "sqrt" and (match := spread_of(x)):
        return match
    return (op, *a)


def is_count(x: Node) -> bool:
    return x in [("leaf", name) for name in COUNTS.values()] or (
        isinstance(x, tuple) and x[0] == "Σ" and is_count(x[2])
    )


def spread_of(x: Node) -> Node | None:
    """Return the standard deviation whose square x is written out as, if it is one."""
    match x:
        case ("/", ("Σ", over, ("^", ("-", r, ("mean", _, _) as mean), 2)), ("-", ("leaf", n), 1)):
            return ("std", over, r) if mean == ("mean", over, r) and n == COUNTS.get(over) else None


# ---- Tracing ----


@dataclass
class Equation:
    advantage: Node
    weight: Node
    loss: Node  # of all completions


def trace(cfg: Config) -> Equation:
    """Call the functions of a training step with symbols."""

    def leaf(name: str, *shape: int) -> Symbol:
        return symbol(torch.randn(shape, dtype=torch.float64), ("leaf", name))

    tracer.__init__()
    torch.manual_seed(0)  # numbers that cannot be traced are the same every time
    rewards = combine_rewards(leaf("r_i", P, G)[..., None], [1.0], cfg.combine_rewards)
    lengths = symbol(torch.full((P, G), T), ("leaf", "|o_i|"))
    advantages = group_advantages(rewards, cfg.scale_rewards, cfg.baseline, lengths=lengths)
    mask = symbol(torch.ones(P * G, T, dtype=torch.bool), True)
    prompts = symbol(torch.arange(P).repeat_interleave(G), ("leaf", "prompt"))
    weights = token_weights(mask, cfg.normalization, cfg.max_completion_length, prompts)
    is_given = {"ref_logp": cfg.beta != 0.0}
    is_given |= dict.fromkeys(("head_logp", "sampler_head_logp"), bool(getattr(cfg, "score_centering", False)))
    known = dict(ref_logp="log π_ref", sampler_logp="log μ", head_logp="log π_v", sampler_head_logp="log μ_v")
    tensors = {
        name: leaf(known.get(name, name), P * G, T, *([K] if "head" in name else []))
        for name in policy_loss.__kwdefaults__
        if name not in LOSS_SWITCHES and is_given.get(name, True)
    }
    logp, old, A, w = (leaf(x, P * G, T) for x in ("log π", "log π_old", "A_i", "w_it"))
    switches = {name: getattr(cfg, name) for name in LOSS_SWITCHES}
    loss, _ = policy_loss(logp, old, A, w, mask, **tensors, **switches)
    return Equation(advantages.node, weights.node, loss.node)


# ---- Writing ----


def inside(x: Node) -> list[Node]:
    """Return all expressions in x, itself among them."""
    children = x[1:] if isinstance(x, tuple) and x[0] != "leaf" else ()
    return [x, *(y for child in children for y in inside(child))]


def text(x: Node, names: dict[Node, str], index: str = "i", level: int = 0) -> str:
    """Write an expression as a person would. `index` is the letter of the completion that it is about."""
    if not isinstance(x, tuple):
        return f"({x:.12g})" if level > 4 and not isinstance(x, bool) and x < 0 else f"{x:.12g}"
    op, *a = x
    if x in names:
        return names[x].replace("_i", f"_{index}")
    if op == "leaf":
        return a[0].replace("_i", f"_{index}")
    if op == "neg":
        out = f"-{text(a[0], names, index, 5)}"
    elif op == "not":
        out = f"not {text(a[0], names, index, 3)}"
    elif op == "^":
        out = f"{text(a[0], names, index, 8)}^{text(a[1], names, index, 8)}"
    elif op in LEVELS:
        mine, sign = LEVELS[op], {"*": "·"}.get(op, op)
        left, right = text(a[0], names, index, mine), text(a[1], names, index, mine + (op in "-/<>"))
        out = f"{left} {sign} {right}"
    elif op in ("Σ", "mean", "max", "min", "std", "any", "all", "logsumexp") and isinstance(a[0], str):
        letter = {"j": chr(ord(index) + 1), "all": chr(ord(index) + 1)}.get(a[0], index)
        over = {"j": letter, "all": f"all_{letter}"}.get(a[0], a[0])
        return f"{op}_{over}({text(a[1], names, letter)})"
    elif op == "if":
        condition, yes, no = a
        return f"[{text(yes, names, index)} if {text(condition, names, index)} else {text(no, names, index)}]"
    else:
        return f"{'sg' if op == 'detach' else op}({', '.join(text(y, names, index) for y in a)})"
    return f"({out})" if LEVELS[op] < level else out


def varies_by_token(x: Node) -> bool:
    if not isinstance(x, tuple) or x[:2] == ("Σ", "t"):
        return False
    return x[1].startswith(("log", "w_it")) if x[0] == "leaf" else any(map(varies_by_token, x[1:]))


def named(x: Node, letter: str) -> dict[Node, str]:
    """Give names to ratios and cases that occur more than once, the innermost first."""
    names: dict[Node, str] = {}
    distinct = dict.fromkeys(inside(x))
    used = Counter(child for node in distinct if isinstance(node, tuple) for child in node[1:])
    for node in reversed(distinct):
        if isinstance(node, tuple) and used[node] > 1 and node[0] in ("exp", "if", "clip"):
            name = letter
            if node[0] == "exp" and ("leaf", "log π") in inside(node):
                name = "s" if any(isinstance(y, tuple) and y[:2] == ("Σ", "t") for y in inside(node)) else "ρ"
            number = sum(other.startswith(name) for other in names.values())
            names[node] = f"{name}{number + 1 if number else ''}_i{'t' * varies_by_token(node)}"
    return names


def papers(x: Node) -> list[str]:
    """Return the papers that comments name at the lines of these expressions, and at the branches these are in."""
    found: dict[str, None] = {}
    for file, line in sorted(set().union(*(tracer.places.get(node, set()) for node in inside(x)))):
        source = linecache.getlines(file)
        if line > len(source):  # code without a file
            continue
        indent = len(source[line - 1]) - len(source[line - 1].lstrip())
        comments, k = [source[line - 1]], line - 2
        while k >= 0 and not source[k].startswith("def "):
            its_indent = len(source[k]) - len(source[k].lstrip())
            is_above = source[k].lstrip().startswith("#") and its_indent == indent and k == line - 2
            if (source[k].strip() and its_indent < indent) or is_above:
                comments.append(source[k])
                indent = its_indent
            k -= 1
        for comment in comments:
            for match in re.finditer(r"#.*?((?:[A-Z][\w.+-]*,? (?:\w+\. )?)*\d{4}\.\d{5})", comment):
                found[match[1].replace(",", "")] = None
    return list(found)


def written(cfg: Config) -> dict[str, str]:
    """Return the lines of the equation, each by the name of what it defines."""
    equation, lines = trace(cfg), {}
    loss = equation.loss
    is_sum = isinstance(loss, tuple) and loss[:2] == ("Σ", "all") and loss[2][:2] == ("Σ", "t")
    for name, x, letter in (("A_i", equation.advantage, "b"), ("w_it", equation.weight, "u"), ("L", loss, "x")):
        names = named(x, letter)
        for node, its_name in names.items():
            lines[its_name] = text(node, {other: its for other, its in names.items() if other != node})
        lines[name] = f"Σ_it({text(loss[2][2], names)})" if name == "L" and is_sum else text(x, names)
    return lines


def main(words: list[str]) -> None:
    cfg = command_line.ready(command_line.parse(words, torch.cuda.is_available()), torch.cuda.is_available())
    lines = written(cfg)
    for name, equation in lines.items():
        print(f"{name:5} = {equation}")
    equation = trace(cfg)
    print(f"papers: {'; '.join(papers((None, equation.advantage, equation.weight, equation.loss))) or 'none named'}")
    print("j: the completions of the same prompt; all: those of the update, or of the step in A; sg: a constant")
    for name in ("top_entropy", "entropy_coef"):
        if getattr(cfg, name) != Config.__dataclass_fields__[name].default:
            print(f"not in the equation: --{name}, which train.py applies outside of policy_loss")
    print(*tracer.untraced, sep="\n", end="\n" if tracer.untraced else "")


if __name__ == "__main__":
    main(sys.argv[1:])

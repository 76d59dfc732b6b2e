"""The printed equations, read back and evaluated on plain Python numbers, are what the code computes.

A derivative is read off a complex number: where the log-probs have 1e-30 i times a direction added, the imaginary part
of the loss is 1e-30 times its derivative in this direction. So `sg`, which drops it, must stand in the right places.
"""

import ast
import cmath
import itertools
import re
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
import torch

from advantage import BASELINES, SCALES, advantage_switches, group_advantages
from config import ALGORITHMS, Config
from conftest import allowed_pairs
from infra.command_line import ready
from loss import NORMALIZATIONS, policy_loss, token_weights
from tools import equation
from train import LOSS_SWITCHES

LENGTHS = [1, 7, 3, 5, 2, 7, 4, 6]
REWARDS = [[0.0, 1.0, 0.5, 1.0], [1.0, 0.25, 0.5, 0.5]]
N, G, T, K = 8, 4, 7, 3
LOG_PROBS = {"log π": "logp", "log π_old": "old", "log π_ref": "ref", "log μ": "sampler"}
LOG_PROBS |= {"log π_v": "head", "log μ_v": "sampler_head", "w_it": "w", "H_it": "entropy"}


def real(x):
    return x.real


FUNCTIONS = vars(cmath) | {
    "log": lambda x: cmath.log(x) if x else -float("inf"),
    "log1p": lambda x: cmath.log(1 + x),
    "abs": lambda x: x if real(x) >= 0 else -x,
    "min": lambda *x: min(*x, key=real),
    "max": lambda *x: max(*x, key=real),
    "sg": real,
    "sigmoid": lambda x: 1 / (1 + cmath.exp(-x)),
    "clip": lambda x, low, high: min(max(x, low, key=real), high, key=real),
}


class ByRealPart(ast.NodeTransformer):
    """Lets a condition compare the real parts of its numbers."""

    def visit_Compare(self, node):
        call = [ast.Call(ast.Name("sg", ast.Load()), [self.visit(x)], []) for x in (node.left, *node.comparators)]
        return ast.Compare(call[0], node.ops, call[1:])


class Reader:
    """Evaluates printed lines for one completion i and one token t after another."""

    def __init__(self, lines, numbers):
        self.at = {"i": 0, "t": 0, "v": 0}
        self.numbers = numbers
        trees = {
            name: ByRealPart().visit(ast.parse(self.to_python(x, lines), mode="eval")) for name, x in lines.items()
        }
        self.code = {name: compile(ast.fix_missing_locations(tree), name, "eval") for name, tree in trees.items()}

    def to_python(self, line, lines):
        for name in sorted(LOG_PROBS, key=len, reverse=True):
            line = line.replace(name, f"number('{LOG_PROBS[name]}')")
        line = re.sub(r"(Σ|mean|std|min|max)_(\w+)\(", r"over('\1', '\2', lambda: ", line)
        for name in lines:  # b_i of another completion is printed as b_j
            printed = f"{name[:-1]}[ijkl]" if name.endswith("_i") else name
            line = re.sub(rf"(?<![\w']){printed}(?!\w)", f"value('{name}')", line)
        line = re.sub(r"\|o_\w\|", "length()", line)
        line = re.sub(r"\br_\w\b", "number('r')", line)
        return line.replace("[", "(").replace("]", ")").replace("·", "*").replace("^", "**")

    def value(self, name):
        if name == "A_i" and "A" in self.numbers:
            return self.number("A")
        scope = dict(number=self.number, over=self.over, value=self.value, length=lambda: LENGTHS[self.at["i"]])
        # If a name is not defined, a fork's equation has a new function: write it into FUNCTIONS.
        return eval(self.code[name], FUNCTIONS | scope | dict(N=N, G=G, P=N // G))

    def number(self, name):
        x = self.numbers[name][self.at["i"]]
        for index in ("t", "v"):
            x = x[self.at[index]] if isinstance(x, list) else x
        return x

    def over(self, kind, what, term):
        before, i = dict(self.at), self.at["i"]
        first = i - i % G
        places = {
            "t": [{"t": t} for t in range(LENGTHS[i])],
            "v": [{"v": v} for v in range(K)],
            "it": [{"i": k, "t": t} for k in range(N) for t in range(LENGTHS[k])],
        }.get(what, [{"i": k} for k in (range(N) if what.startswith("all") else range(first, first + G))])
        values = []
        for place in places:
            self.at.update(place)
            values.append(term())
            self.at.update(before)
        if kind in ("min", "max"):
            return FUNCTIONS[kind](*values)
        return {"Σ": sum, "mean": lambda x: sum(x) / len(x), "std": lambda x: stdev(map(real, x))}[kind](values)


def is_what_the_code_computes(cfg) -> bool:
    """Assert that the printed equation is what the code computes. Return False if the tool itself says that the
    equation lacks something, which only that of a fork may."""
    lines = equation.written(equation.trace(cfg))
    if equation.untraced:
        return False
    generator = torch.Generator().manual_seed(1)
    logp = -0.1 - 3 * torch.rand(N, T, generator=generator, dtype=torch.float64)
    noise = 0.4 * torch.randn(3, N, T, generator=generator, dtype=torch.float64)
    old, ref, sampler = (logp + noise).clamp(max=-0.1)  # no probability of 1, because gate_kl has a log of 1 minus it
    entropy = torch.rand(N, T, generator=generator, dtype=torch.float64)
    head, sampler_head = (torch.randn(N, T, K + 1, generator=generator).double().log_softmax(-1)[..., :K] for _ in "12")
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    prompts = torch.arange(N) // G
    rewards, lengths = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(LENGTHS).view(-1, G)
    parts = equation.combine_rewards(rewards[..., None], [1.0], cfg.combine_rewards)
    how = advantage_switches(cfg)
    A = group_advantages(parts, cfg.scale_rewards, lengths=lengths, **how).flatten()
    w = token_weights(mask, cfg.normalization, cfg.max_completion_length, prompts)
    heads = dict(head_logp=head, sampler_head_logp=sampler_head) if cfg.score_centering else {}
    switches = {name: getattr(cfg, name) for name in LOSS_SWITCHES}
    given = dict(ref_logp=ref if cfg.beta else None, sampler_logp=sampler, entropy=entropy, **heads)
    leaves = [logp.requires_grad_(), head.requires_grad_(), entropy.requires_grad_()]
    loss, _ = policy_loss(logp, old, A, w, mask, **given, **switches)
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in leaves]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions) if g is not None)

    tensors = dict(logp=logp, old=old, ref=ref, sampler=sampler, entropy=entropy, w=w)
    tensors |= dict(head=head, sampler_head=sampler_head)
    numbers = {name: x.tolist() for name, x in tensors.items()}
    reader = Reader(lines, numbers | dict(r=rewards.flatten().tolist()))
    for reader.at["i"] in range(N):
        # The tolerances are above the rounding of sums of 40 float64 numbers, and of the 12 digits that are printed.
        assert reader.value("A_i") == pytest.approx(A[reader.at["i"]].item(), rel=1e-9, abs=1e-9)
        assert reader.value("w_it") == pytest.approx(w[reader.at["i"], 0].item(), rel=1e-9)
    reader.numbers["A"] = A.tolist()
    for name, x, d in zip(("logp", "head", "entropy"), leaves, directions, strict=True):
        reader.numbers[name] = (x.detach() + 1e-30j * d).tolist()
    printed = reader.value("L")
    assert printed.real == pytest.approx(loss.item(), rel=1e-8, abs=1e-9)
    assert printed.imag * 1e30 == pytest.approx(slope, rel=1e-8, abs=1e-9)
    return True


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_preset(algorithm):
    assert is_what_the_code_computes(ready(Config(algorithm=algorithm, beta=0.04), False))


def test_the_page_shows_what_is_printed(capsys):
    page = (Path(__file__).parent.parent / "docs" / "instruments.md").read_text()
    command, shown, *_ = page.split("```\n")[1::2]
    equation.main(command.split()[3:])  # the words after `python -m tools.equation`
    assert capsys.readouterr().out.strip() == shown.strip()


def test_every_normalization_scale_and_baseline_and_every_allowed_pair():
    switches = [dict(normalization=x) for x in NORMALIZATIONS]
    switches += [dict(scale_rewards=s, baseline=b) for s, b in itertools.product(SCALES, BASELINES)]
    switches += [chosen | switch for chosen, switch in allowed_pairs()]
    default = ready(Config(), False)
    are_whole = [is_what_the_code_computes(replace(default, **chosen)) for chosen in switches]
    assert sum(are_whole) >= 545, "those of this repository"


def test_a_fork(monkeypatch, capsys):
    """A new branch needs no code here, and what cannot be traced is named."""

    def forked(logp, old_logp, advantages, weights, mask, **others):
        rate = (advantages > 0).double().mean().item()
        rate = rate / len(logp.topk(2).values)
        if logp.shape[1] > 1:  # only decides what is computed
            rate = rate / logp.shape[1]
            weights = torch.eye(12, dtype=weights.dtype) @ weights
        return (weights * torch.tanh(logp - old_logp.detach()) * advantages * rate).sum(), {}

    def accumulate(loss, logp, part_loss=None):
        for _ in range(2):
            part_loss, _ = forked(logp, logp, logp, logp, logp)
            part_loss = part_loss + 0.1 * logp.sum()
            part_loss -= logp.mean()
            if part_loss >= 0:
                part_loss.backward()

    forked.__kwdefaults__ = policy_loss.__kwdefaults__
    monkeypatch.setattr(equation, "policy_loss", forked)
    equation.main(["--top_entropy", "0.5", "--entropy_coef=-1"])
    printed = capsys.readouterr().out
    assert re.findall("not in the equation: (.*)", printed) == ["--top_entropy, which sets advantages to 0"]
    monkeypatch.setattr(equation, "accumulate", accumulate)
    equation.main([])
    added = ["part_loss = part_loss + 0.1 * logp.sum()", "part_loss -= logp.mean()"]
    assert re.findall("not in the equation: (.*)", capsys.readouterr().out) == added
    assert "tanh(log π - sg(log π_old)) · A_i" in printed
    lacks = re.findall(r"not traced: (\w+) at test_equation.py:\d+: rate = ", printed)
    assert lacks == ["item", "topk", "__len__", "shape"]
    assert "Σ_some_j(w_jt)" in printed

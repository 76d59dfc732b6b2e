"""The comparison of gradients, held to plain loops over the completions."""

import re

import numpy as np
import pytest
import torch

import train
from config import ALGORITHMS
from tasks import addition
from tools import compare

FLAGS = "--task sorting --prompts_per_step 3 --num_generations 4".split()


def test_norms_and_cosines_are_those_of_plain_loops(watch):
    """At the policy that sampled, the gradient is that of −Σ w A log π. It is not clipped by --max_grad_norm."""
    drawn = watch(train, "finish_sampling")
    variants = compare.variants_of([*FLAGS, "--max_grad_norm", "1e-3"], "normalization=sequence,global,sum")
    ((norms, matrix, error),) = compare.measure(variants, updates=0, kept=None)
    (call,) = drawn
    model, rows = call.args[0].model, []
    for group in call.result[0]:
        r = group.rewards.double()
        A = (r - r.mean()) / (r.std() + 1e-4)
        rows += [(group.prompt_ids, one.ids.tolist(), a) for one, a in zip(group.completions, A.tolist())]
    tokens, expected = sum(len(ids) for _, ids, _ in rows), []
    model.double()
    for weight_of in (lambda n: 1 / (12 * n), lambda n: 1 / tokens, lambda n: 1 / 12):
        loss = 0.0
        for prompt, ids, a in rows:
            logp = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            loss = loss - weight_of(len(ids)) * a * logp[range(len(ids)), ids].sum()
        expected.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])]))
    expected = torch.stack(expected)
    np.testing.assert_allclose(norms, expected.norm(dim=1).numpy(), rtol=1e-4)  # ours are in float32
    directions = expected / expected.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(matrix, (directions @ directions.T).numpy(), atol=1e-5)
    assert error == 0.0 and matrix[0, 1] < 0.999 < matrix[1, 2]


ORDERS = [
    ("--baseline none --scale_rewards none", "mask_truncated", "false,true", "true,false"),  # no A depends on the mask
    ("--task addition --num_generations 2", "algorithm", "grpo,dapo", "dapo,grpo"),  # some groups have no signal
    ("--shard", "top_entropy", "1,0.3", "0.3,1"),  # compare shards nothing
]


@pytest.mark.parametrize(("words", "name", "values", "turned"), ORDERS)
def test_no_variant_chooses_the_completions_of_the_others(words, name, values, turned):
    grids = [compare.variants_of([*FLAGS, *words.split()], f"{name}={order}") for order in (values, turned)]
    (norms, cosines, _), (others, _, _) = (compare.measure(variants, 0, None)[0] for variants in grids)
    np.testing.assert_allclose(norms, others[::-1], rtol=1e-4)
    assert cosines[0, 1] < 0.99


def test_a_variant_that_trains_on_nothing_has_no_gradient():
    variants = compare.variants_of([*FLAGS, "--max_completion_length", "1"], "mask_truncated=false,true")
    ((norms, _, _),) = compare.measure(variants, 0, None)
    assert norms[0] > norms[1] == 0.0


def test_a_table_has_the_means_over_the_seeds():
    of_seeds = np.array([[1.0, 2.0], [3.0, 6.0]]), np.array([[[1.0, x], [x, 1.0]] for x in (0.9, 0.8)])
    *_, second, directions = compare.table(["a", "b"], *of_seeds)
    assert second.split() == ["b", "4", "0.850", "(0.800", "to", "0.900)"] and directions == "2 directions: a; b"
    assert len(compare.classes(np.array([[1.0, -1.0], [-1.0, 1.0]]))) == 2, "opposite directions are not one"


def test_presets_are_eight_directions_and_more_after_updates(capsys, tmp_path, watch):
    """Completions of one length would make `sequence` and `global` one direction. The picture shows the means over the
    seeds that the table has, each at the place of its two names."""
    pictures = watch(compare, "picture")
    words = "--seeds 1,2 --updates 4 --learning_rate 5e-3".split()
    assert compare.main([*FLAGS, *words, "--picture", str(tmp_path / "compare.png")]) == 0
    shown = capsys.readouterr().out
    first, second = (line for line in shown.splitlines() if " directions: " in line)
    classes = [{*own.split(" = ")} for own in first.partition(": ")[2].split("; ")]
    assert len(classes) == 8 and {name for own in classes for name in own} == {*ALGORITHMS}
    assert {"grpo", "gspo", "sapo", "gmpo", "gdpo"} in classes and {"dr_grpo", "rloo"} in classes
    assert {"dapo", "cispo", "luspo", "dppo", "vespo"} in classes and int(second.split()[0]) > 8
    assert re.search(r"\((.*) to (?!\1)", shown) and (tmp_path / "compare.png").stat().st_size > 0, "seeds differ"
    left, right, _ = pictures[0].result.axes  # the last one is the colour bar
    names = [[label.get_text() for label in labels] for labels in (right.get_xticklabels(), left.get_yticklabels())]
    row = right.images[0].get_array()[names[1].index("grpo")]
    there = {name: f"{x:.3f}" for name, x in zip(names[0], row)}
    assert there == dict(re.findall(r"^(\S+) +\S+  (-?\d\.\d+) \(", shown.partition("after 4")[2], re.MULTILINE))


def test_random_entries_give_the_cosines_within_their_error():
    """Here they are entries of adapters: frozen weights have no gradient."""
    words = [*FLAGS, "--task", "addition", "--model", addition.model(None), "--lora_rank", "8"]
    variants = compare.variants_of(words, "algorithm=grpo,dapo,rloo")
    ((norms, whole, _),) = compare.measure(variants, updates=0, kept=None)
    ((same_norms, part, error),) = compare.measure(variants, updates=0, kept=5000)
    assert norms.tolist() == same_norms.tolist() and 0.0 < np.abs(whole - part).max() < 4 * error < 0.05


WRONG = ["reference=a,b --beta 1", "overlong_buffer=4,8 --reward overlong", "dynamic_sampling=0,3", "top_p=0.9,1"]
WRONG += ["ref_sync_every=1,2 --beta 1", "kl-estimator=k2,k3", "beta=0,1 --vary delta=2,3"]
WRONG = [*((f"--vary {words}", f"--vary {words.partition('=')[0]}: ") for words in WRONG)]


@pytest.mark.parametrize(("words", "message"), [*WRONG, ("--nope 3", "--nope"), ("--vary delta=0.5", "--delta 0.5: ")])
def test_wrong_flags_are_refused_as_train_refuses_them(words, message, capsys):
    """And so is what all variants share."""
    with pytest.raises(SystemExit) as exit_code:
        compare.main(words.split())
    assert exit_code.value.code == 2 and message in capsys.readouterr().err


def test_each_variant_has_its_own_head_and_the_reference_that_it_needs():
    """Whatever the first variant needs. Only away from the policy that sampled do they have other gradients.
    The updates are made at the rate after the warm-up."""
    words = [*FLAGS, "--learning_rate", "5e-3", "--warmup_steps"]
    grids = "score_centering=0,3", "score_centering=0,3,99", "beta=0,0.5"
    variants = [compare.variants_of([*words, str(n)], grid) for n, grid in enumerate(grids)]
    few, more, kl = (compare.measure(grid, updates=3, kept=None)[1][0] for grid in variants)
    assert few == pytest.approx(more[:2], rel=1e-4) and kl[0] == pytest.approx(few[0], rel=1e-4)  # float32
    assert len({*more.round(3)}) == 3 and kl[1] > 2 * kl[0]

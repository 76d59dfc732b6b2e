"""The report of the first hour on a GPU, here a pretended one."""

import pytest

from infra import pretend_gpu
from tools import first_hour


@pytest.mark.skipif(bool(pretend_gpu.WHY_NOT), reason=str(pretend_gpu.WHY_NOT))
def test_the_first_hour(sorting, tmp_path):
    words = f"--task sorting --data {sorting['data']} --prompts_per_step 2 --num_generations 2 --out {tmp_path}/out"
    found = pretend_gpu.on_pretended_gpu(first_hour.figures, words.split())
    assert found.pop("dtype") == "bfloat16"
    assert all(value > 0 for value in found.values())

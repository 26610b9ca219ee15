"""On a CUDA device: the whole product once. Run with ``pytest -m gpu``; nothing here runs without one."""

import pytest
import torch
from runs import place, run, small

from stagebreaker.executor.profiling import profile_workload
from stagebreaker.profiles.table import TASK_KINDS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_profile_has_every_task_and_its_peak_memory(dtype):
    profile = profile_workload(small(), "cuda", dtype, repeats=2)
    assert {task.kind for task in profile.tasks} == set(TASK_KINDS) - {"ref_replay"}
    assert all(task.peak_memory_bytes for task in profile.tasks)
    assert profile.gpu_kinds[0].memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_training_on_the_device_follows_training_on_the_cpu(tmp_path):
    workload, placement = small(), place("stagebreaker", train_moved=(0, 1), vae_moved=2)
    cpu = run(workload, placement, tmp_path / "cpu", steps=1)
    cuda = run(workload, placement, tmp_path / "cuda", steps=1, device="cuda")
    for name in ("critic/rewards/mean", "actor/grad_norm"):
        assert cuda.metrics[0][name] == pytest.approx(cpu.metrics[0][name], rel=2e-2), name


def test_same_bits_for_any_placement_on_the_device(tmp_path):
    workload = small()
    shas = {
        run(
            workload, place("stagebreaker", vae_moved=v, train_moved=t), tmp_path / str(v), 2, device="cuda"
        ).adapter_sha256
        for v, t in ((0, (0, 0)), (3, (1, 1)))
    }
    assert len(shas) == 1

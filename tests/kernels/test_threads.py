"""Pools on chosen cores."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading

import pytest
import torch
from paged import paged_case
from tasks import ROOT, TIMEOUT_S, python

import kernels

CORES = sorted(os.sched_getaffinity(0))


def attention(case, **options) -> torch.Tensor:
    out = torch.empty(case.q.shape)
    kernels.decode_attention(*case.arguments, out, scale=case.scale, **options)
    return out


def test_threads_run_on_the_chosen_cores():
    assert kernels.ThreadPool(cores=CORES).cores_in_use() == CORES
    assert kernels.ThreadPool(cores=CORES[-1:]).cores_in_use() == CORES[-1:]


def test_pool_sizes():
    assert kernels.ThreadPool(num_threads=3).num_threads == 3
    assert kernels.ThreadPool(num_threads=1).num_threads == 1
    assert kernels.ThreadPool(cores=CORES[:1]).num_threads == 1


@pytest.mark.parametrize("options", [{"cores": CORES}, {"num_threads": 3}, {"num_threads": 1}])
def test_kernels_give_the_same_on_a_pool(options):
    case = paged_case([900, 3, 40])
    expected = attention(case)
    pool = kernels.ThreadPool(**options)
    assert torch.allclose(attention(case, pool=pool), expected, atol=2e-6, rtol=0)


def test_callers_of_one_pool_take_turns():
    cases = [paged_case([200, 30], seed=seed) for seed in range(4)]
    expected = [attention(case) for case in cases]
    pool, results = kernels.ThreadPool(num_threads=2), {}

    def work(index: int) -> None:
        for _ in range(30):
            results[index] = attention(cases[index], pool=pool)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, out in enumerate(expected):
        assert torch.allclose(results[index], out, atol=2e-6, rtol=0)


def test_a_forked_child_gets_threads_of_its_own():
    case = paged_case([600, 600])
    expected = attention(case, num_threads=2)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(attention(case, num_threads=2), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("num_threads", {}),
        ("num_threads", {"num_threads": 0}),
        ("num_threads", {"num_threads": 2, "cores": [0]}),
        ("cores", {"cores": []}),
        ("cores", {"cores": [max(CORES) + 1]}),
        ("cores", {"cores": [CORES[0], CORES[0]]}),
    ],
)
def test_bad_pools_are_refused(field, arguments):
    with pytest.raises(ValueError, match=f"^{field}"):
        kernels.ThreadPool(**arguments)


def test_something_else_as_a_pool_is_refused():
    with pytest.raises(TypeError, match="^pool"):
        attention(paged_case([3]), pool=2)


FORK_SETUP = """
import os, signal, sys, threading, time
import torch
from eventually import eventually
from paged import paged_case
from tasks import threads
import kernels
def attend(case, **options):
    out = torch.empty(case.q.shape)
    kernels.decode_attention(*case.arguments, out, scale=case.scale, **options)
    return out
def succeeds(in_child):
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)  # ends a child that hangs
        code = 1
        try:
            code = 0 if in_child() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
case = paged_case([600, 600])
"""


@pytest.mark.parametrize("options", [{"cores": CORES[:1]}, {"num_threads": 2}])
def test_a_forked_child_is_refused_the_parents_pool(options):
    result = python(
        FORK_SETUP
        + f"""
pool = kernels.ThreadPool(**{options})
expected = attend(case, pool=pool)
def in_child():
    global pool
    for call in (pool.cores_in_use, lambda: attend(case, pool=pool), lambda: attend(paged_case([1]), pool=pool)):
        try:
            call()
            return False
        except RuntimeError as error:
            assert "this ThreadPool belongs to the process that made it" in str(error), error
    del pool
    return torch.equal(attend(case, pool=kernels.ThreadPool(**{options})), expected)
assert succeeds(in_child)
assert torch.equal(attend(case, pool=pool), expected)
"""
    )
    assert result.returncode == 0, result.stderr


def test_a_fork_while_a_default_pool_is_being_made():
    result = python(
        FORK_SETUP
        + """
base = len(threads())
maker = threading.Thread(target=attend, args=(case,), kwargs={"num_threads": 3000})
maker.start()
while maker.is_alive() and len(os.listdir("/proc/self/task")) < base + 100:
    pass
assert succeeds(lambda: attend(case, num_threads=2).isfinite().all())
maker.join()
"""
    )
    if "Resource temporarily unavailable" in result.stderr:
        pytest.skip("this machine has no 3000 threads to give")
    assert result.returncode == 0, result.stderr


def test_threads_that_cannot_start_are_an_error():
    result = python(
        FORK_SETUP
        + """
import resource
attend(case)
base = threads().keys()
used_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (256 << 20), resource.RLIM_INFINITY))
for make in (lambda: kernels.ThreadPool(num_threads=5000), lambda: attend(case, num_threads=5000)):
    try:
        make()
        sys.exit("no error")
    except RuntimeError as error:
        print(error)
    eventually(lambda: threads().keys() <= base)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.allclose(attend(case, num_threads=2), attend(case), atol=2e-6, rtol=0)
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("unavailable") == 2, result.stdout


def test_what_a_share_throws_is_thrown_in_the_caller(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler for the driver")
    sources = [ROOT / "tests/kernels/pool_errors.cpp", ROOT / "kernels/csrc/pool/thread_pool.cpp"]
    driver = tmp_path / "pool_errors"
    include = f"-I{ROOT / 'kernels/csrc'}"
    subprocess.run([compiler, "-std=c++17", "-O1", "-pthread", include, *sources, "-o", driver], check=True)
    result = subprocess.run([driver, str(CORES[0])], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (result.returncode, result.stderr) == (0, "")

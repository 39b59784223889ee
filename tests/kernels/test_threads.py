"""The kernels' pools of threads: shared by callers, in forked children, and where threads fail."""

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


def attention(case, **options) -> torch.Tensor:
    out = torch.empty(case.q.shape)
    kernels.decode_attention(*case.arguments, out, scale=case.scale, **options)
    return out


def test_callers_of_one_pool_take_turns():
    cases = [paged_case([200, 30], seed=seed) for seed in range(4)]
    expected = [attention(case) for case in cases]
    results = {}

    def work(index: int) -> None:
        for _ in range(30):
            results[index] = attention(cases[index], num_threads=2)

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


def test_a_fork_while_a_default_pool_is_being_made():
    result = python(
        FORK_SETUP
        + """
base = len(threads())
maker = threading.Thread(target=attend, args=(case,), kwargs={"num_threads": 1000})
maker.start()
while maker.is_alive() and len(os.listdir("/proc/self/task")) < base + 100:
    pass
assert succeeds(lambda: attend(case, num_threads=2).isfinite().all())
maker.join()
"""
    )
    if "Resource temporarily unavailable" in result.stderr:
        pytest.skip("this machine has no 1000 threads to give")
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
try:
    attend(case, num_threads=1024)
    sys.exit("no error")
except RuntimeError as error:
    print(error)
eventually(lambda: threads().keys() <= base)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.allclose(attend(case, num_threads=2), attend(case), atol=2e-6, rtol=0)
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("unavailable") == 1, result.stdout


def test_what_a_share_throws_is_thrown_in_the_caller(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler for the driver")
    sources = [ROOT / "tests/kernels/pool_errors.cpp", ROOT / "kernels/csrc/pool/thread_pool.cpp"]
    driver = tmp_path / "pool_errors"
    include = f"-I{ROOT / 'kernels/csrc'}"
    subprocess.run([compiler, "-std=c++17", "-O1", "-pthread", include, *sources, "-o", driver], check=True)
    result = subprocess.run([driver], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (result.returncode, result.stderr) == (0, "")


def test_threads_watch_for_work_as_long_as_they_are_told_and_then_sleep():
    """A thread that watches uses its core: in all of the ten calls, some of the time that it may."""
    result = python(
        FORK_SETUP
        + """
def worker_cpu_s():
    [worker] = threads().keys() - before
    fields = open(f"/proc/self/task/{worker}/schedstat").read().split()
    return int(fields[0]) / 1e9
def sleeps(worker):
    return open(f"/proc/self/task/{worker}/stat").read().rsplit(") ", 1)[1][0] == "S"
attend(case)
before = threads().keys()
attend(case, num_threads=2)
[worker] = threads().keys() - before
used_s = worker_cpu_s()
for _ in range(10):
    attend(case, num_threads=2)
    eventually(lambda: sleeps(worker))
print(worker_cpu_s() - used_s)
""",
        KERNELS_SPIN_US="10000",
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) > 0.01


@pytest.mark.parametrize("value", ["-1", "10001", "long", "1e3"])
def test_a_wrong_time_of_watching_is_named(value):
    result = python(FORK_SETUP + "attend(case, num_threads=2)", KERNELS_SPIN_US=value)
    assert f"ValueError: KERNELS_SPIN_US: expected 0 to 10000, got '{value}'" in result.stderr

"""Clocks, NUMA nodes, and what the machine asks of its runtime while it is planned."""

from __future__ import annotations

import os
import time

import pytest

from harness.machine.base import CPU, GPU, LaneKind
from harness.machine.cuda import Config
from harness.machine.device import clock as clock_module
from harness.machine.device import pinned
from harness.machine.device.clock import PERIOD_S, DeviceClock
from harness.machine.device.facts import driver_facts
from harness.machine.device.numa import Node, cores_of, node_of
from tests.fake_device import CLOCK_RATE, cuda_machine
from tests.unit.machine.ops import Quick, Sleeping


def test_device_times_are_on_the_hosts_clock(device, monkeypatch):
    """The device's clock starts elsewhere and runs fast; setting it anew keeps the error at that of one setting."""
    monkeypatch.setattr(clock_module, "PERIOD_S", 0.05)
    clock, stream, longest_s = DeviceClock(device), device.stream(), 0.0
    for _ in range(6):
        event, mark = device.event(), clock.mark
        before_s = time.monotonic()
        device.record(event, stream)
        device.synchronize(event)
        after_s = time.monotonic()
        slack_s = mark.error_s + (CLOCK_RATE - 1) * (after_s - mark.host_s) + 1e-6
        assert before_s - slack_s <= clock.seconds(mark, event) <= after_s + slack_s
        time.sleep(0.03)
        clock.refresh()
        longest_s = max(longest_s, clock.mark.host_s - mark.host_s)
    assert clock.mark.host_s > after_s - 0.05
    assert clock.drift_s <= longest_s * (CLOCK_RATE - 1) + 2 * clock.error_s + 1e-6


def test_spans_of_device_and_host_lanes_fit_together(cuda):
    machine = cuda()
    begun_s = machine.now()
    first = machine.submit(GPU, Sleeping(0.02), after=())
    second = machine.submit(CPU, Sleeping(0.01), after=[first])
    machine.wait(second)
    ended_s = machine.now()
    slack_s = machine.clock_error_s + (CLOCK_RATE - 1) * PERIOD_S + 1e-3
    assert begun_s - slack_s <= first.started_s
    assert 0.02 - slack_s <= first.finished_s - first.started_s <= ended_s - begun_s + slack_s
    assert first.finished_s <= second.started_s + slack_s
    assert second.finished_s <= ended_s
    assert {s.lane.kind for s in machine.spans} == {LaneKind.GPU, LaneKind.CPU}


def test_room_for_temporaries_is_taken_while_planning_and_has_no_memory_of_its_own(cuda, device):
    machine = cuda(poison=True)
    device.blocking.clear()
    room = machine.tiers["device"].reserve("workspace", 4096, backed=False)
    machine.wait(machine.submit(GPU, Quick()))  # the room is taken on the stream where temporaries are
    assert device.blocking == ["allocate"]
    assert machine.tiers["device"].used_bytes == 4096
    with pytest.raises(KeyError):
        machine._memory.bytes_of(room)
    machine.tiers["device"].release(room)


def test_the_nearest_node_as_sysfs_tells(tmp_path):
    mine = sorted(os.sched_getaffinity(0))

    def put(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert node_of("0000:01:00.0", tmp_path) is None, "nothing is told"
    put("bus/pci/devices/0000:01:00.0/numa_node", "1\n")
    put("devices/system/node/node0/cpulist", "900-950\n")
    assert node_of("0000:01:00.0", tmp_path) is None, "there is one node only"
    put("devices/system/node/node1/cpulist", f"{mine[0]},1000\n")
    assert node_of("0000:01:00.0", tmp_path) == Node(1, (mine[0],))
    assert node_of("0000:02:00.0", tmp_path) is None
    assert node_of(None, tmp_path) is None
    put("bus/pci/devices/0000:01:00.0/numa_node", "0\n")
    assert node_of("0000:01:00.0", tmp_path) is None, "none of the node's cores is ours"
    put("bus/pci/devices/0000:01:00.0/numa_node", "-1\n")
    assert node_of("0000:01:00.0", tmp_path) is None


def test_lists_of_cores():
    assert cores_of("0-3,8") == {0, 1, 2, 3, 8}
    assert cores_of("") == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [("copies_in_flight", 0), ("gpu_ops_in_flight", 0), ("launch_mb", -1.0), ("staging_mb", 0.0),
     ("cpu_threads", 0), ("watchdog_s", 0.0)],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Config(**{field: value})


def test_a_driver_is_asked_about_the_gpu(tmp_path, monkeypatch):
    """By the tool that comes with it, and what this one does not know is left out."""
    tool, uuid = tmp_path / "nvidia-smi", "1234"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_facts(uuid) == {}, "there is no tool"
    answer = "550.54, 5, 5, 16, 16, 1980 MHz, [N/A], N/A, 700.00 W"
    tool.write_text(f'#!/bin/sh\ncase "$1" in --id=GPU-{uuid}) echo "{answer}";; *) exit 6;; esac\n')
    tool.chmod(0o755)
    assert driver_facts("of another GPU") == {}
    assert driver_facts(uuid) == {
        "driver": "550.54", "PCIe generation": "5", "most PCIe generation": "5", "PCIe lanes": "16",
        "most PCIe lanes": "16", "SM clock": "1980 MHz", "power limit": "700.00 W",
    }  # fmt: skip


def test_links_are_measured_by_the_machine_once_they_are_at_speed_and_reported(cuda, device, monkeypatch):
    monkeypatch.setattr(device, "ramp_s", 0.02)
    begun_s = time.monotonic()
    machine = cuda()
    assert time.monotonic() - begun_s >= 2 * 0.02
    assert machine.facts["GPU"] == "fake device"
    assert machine.facts["measured h2d ceiling"] == f"{machine.link_ceilings_gb_s['h2d']:.2f} GB/s"
    assert set(machine.link_ceilings_gb_s) == {"h2d", "d2h"}
    assert all(rate > 0 for rate in machine.link_ceilings_gb_s.values())


def test_large_pinned_memory_waits_for_the_next_machine(device, monkeypatch):
    monkeypatch.setattr(pinned, "_KEEP_FROM_BYTES", 1 << 20)
    capacities = {"pinned": 1 << 26}

    def addresses(*sizes: int) -> list[int]:
        machine = cuda_machine(capacities, device=device)
        buffers = [machine.tiers["pinned"].reserve(f"buffer {n}", size) for n, size in enumerate(sizes)]
        found = [machine._memory.bytes_of(buffer).data_ptr() for buffer in buffers]
        assert [machine._memory.bytes_of(buffer).nbytes for buffer in buffers] == list(sizes)
        machine.close()
        return found

    with pinned.keeping():
        large, small = addresses(3 << 20, 5000)
        assert set(device.pinned) == {large}, "what is small is taken anew, fast"
        again, much_less, other = addresses((3 << 20) - 4096, 1 << 20, 3 << 20)
        assert again == large
        assert large not in (much_less, other, small)
        assert set(addresses(3 << 20, 3 << 20)) == {large, other}
    assert not device.pinned

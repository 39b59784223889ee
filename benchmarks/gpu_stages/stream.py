"""Stream weights and nothing else through the machine of the runs: what the link and the launching threads give."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_stages.plan import Scale
from harness.cli.overrides import composed_values
from harness.engine.engine import Engine
from harness.machine.build import load_machine
from harness.memory.weights import WeightStream
from harness.run.session import Session
from harness.settings import parse_settings

_DEPTH = 2  # layers on the device, as in the strategies


def measure(scale: Scale, rates: list[str]) -> dict[str, Any]:
    """Measure the stream with packets of each size, over as many layers as a pass has (of few: over some passes)."""
    settings = parse_settings(
        composed_values([*scale.workload(), *rates, "model.path=random", f"machine={scale.machine}"])
    )
    rows = {}
    with Session(settings, load_machine(settings.machine)) as session:
        session.load_model()
        machine = session.build_machine()
        engine = session.build_engine()
        ceiling_gb_s = (machine.link_ceilings_gb_s or settings.hardware.link_ceilings_gb_s)["h2d"]
        for packet_mb in scale.stream_packets_mb:
            rate_gb_s = weights_gb_s(engine, int(packet_mb * 1e6), max(16, engine.spec.num_layers))
            rows[f"packets of {packet_mb:g} MB"] = {"gb_s": rate_gb_s, "of_ceiling": rate_gb_s / ceiling_gb_s}
            print(f"   packets of {packet_mb:g} MB: {rate_gb_s:.2f} GB/s, {rate_gb_s / ceiling_gb_s:.1%}", flush=True)
    return {"packets": rows}


def weights_gb_s(engine: Engine, packet_bytes: int, num_layers: int) -> float:
    """Return the rate at which `num_layers` layers arrive, one behind the other, while nothing else runs. The first one
    is not counted: before it the link stood idle."""
    machine = engine.machine
    stream = WeightStream(machine, engine.store, depth=_DEPTH, packet_bytes=packet_bytes, name="stream")
    try:
        arrived = [stream.request_layer(index) for index in range(_DEPTH)]
        ended_s, nbytes = [], 0
        for index in range(num_layers + 1):
            for ticket in arrived[index]:
                machine.wait(ticket)
            ended_s.append(max(ticket.finished_s or 0.0 for ticket in arrived[index]))
            nbytes += sum(int(ticket.op.work().link_bytes) for ticket in arrived[index]) if index else 0
            for name in stream.part_names(index):
                stream.release(index, name)
            arrived.append(stream.request_layer(index + _DEPTH) if index + _DEPTH <= num_layers else [])
        return nbytes / (ended_s[-1] - ended_s[0]) * 1e-9
    finally:
        stream.close()

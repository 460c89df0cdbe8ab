"""`watch`: predicted beside measured peaks, on the console and in TensorBoard's files."""

import dataclasses
import struct

import jax
import jax.numpy as jnp
import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto import event_pb2

from jaxcomp.memory import watch

STEP, X = jax.jit(jnp.sin), jax.ShapeDtypeStruct((1024,), jnp.float32)


@dataclasses.dataclass
class Device:
    peak: int
    device_kind: str = "NVIDIA H200"

    def memory_stats(self):
        return {"peak_bytes_in_use": self.peak, "bytes_in_use": 0}


def test_both_peaks_are_shown(capsys):
    devices = [Device(4096), Device(1024)]
    with watch(STEP, X, devices=devices) as found:
        devices[1].peak = 8602
    assert found.peak_before == 4096
    assert capsys.readouterr().out == (
        "peak memory: 8.0 KiB predicted, 8.4 KiB measured on NVIDIA H200 (1.05 of the prediction)\n"
    )
    lines = []
    with pytest.raises(MemoryError), watch(STEP, X, devices=devices, show=lines.append):
        raise MemoryError
    (line,) = lines
    assert line.endswith("8.4 KiB measured on NVIDIA H200, which was reached before the block")


def test_a_device_that_does_not_measure_says_so(capsys):
    with watch(STEP, X) as found:
        pass
    assert found.measured_bytes is None
    assert capsys.readouterr().out.endswith("not measured: cpu has no memory statistics\n")
    with pytest.raises(ValueError, match=r"writer=None: expected watch\(..., writer=...\)"):
        found.log(1)


def test_tensorboard_gets_both(tmp_path):
    device = Device(4096)
    writer = SummaryWriter(str(tmp_path))
    with writer, watch(STEP, X, devices=[device], writer=writer) as found:
        device.peak = 9000
        found.log(3)
    (file,) = tmp_path.iterdir()
    data, scalars = file.read_bytes(), {}
    while data:  # the length of an event, its sum, the event and its sum
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        scalars |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        data = data[16 + length :]
    assert scalars == {
        "memory/predicted_peak_bytes": (3, 8192),
        "memory/measured_peak_bytes": (3, 9000),
    }

"""Public device properties of NVIDIA GPUs, for ahead-of-time compilation without the device.

To add a GPU, append a `Gpu` to `GPUS`. The CUDA sample `deviceQuery` prints most of its fields. The
bandwidth, the tensor throughput and the PCI Express generation are in NVIDIA's data sheet. For
example:

    Gpu("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), cores=82, fpus_per_core=128, clock_ghz=1.695,
        memory_bytes=25_447_170_048, bandwidth=936_096_000_000, l2_bytes=6 * 2**20,
        tensor_tflops=71.2, link_bandwidth=32 * 10**9),

`_CAPABILITIES` holds the limits of each compute capability: threads and shared memory of a
multiprocessor. They are in the table of technical specifications of the CUDA programming guide.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The public properties of a GPU that XLA's compiler needs.

    Attributes:
        name: the target's name.
        device_kind: the name that the driver reports.
        capability: CUDA compute capability, (major, minor).
        cores: streaming multiprocessors.
        fpus_per_core: FP32 units of one multiprocessor.
        clock_ghz: highest clock rate in GHz.
        memory_bytes: device memory that CUDA reports, in bytes.
        bandwidth: peak memory bandwidth in bytes per second.
        l2_bytes: L2 cache in bytes.
        tensor_tflops: peak throughput of dense bfloat16 matrix products with float32
            accumulation, in 10^12 operations per second. It is that of float16 before Ampere.
        link_bandwidth: peak bandwidth of the PCI Express link to the host, in bytes per second and
            direction.
    """

    name: str
    device_kind: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    tensor_tflops: float
    link_bandwidth: int


@dataclasses.dataclass(frozen=True)
class _Capability:
    """The limits of all GPUs of one compute capability.

    Attributes:
        threads_per_core: threads of one multiprocessor.
        shared_per_core: shared memory of one multiprocessor in bytes.
        shared_per_block: shared memory of one block in bytes, if the kernel opts in.
        features: XLA's name of the feature extension.
    """

    threads_per_core: int
    shared_per_core: int
    shared_per_block: int
    features: str = "NONE"


_CAPABILITIES = {
    (7, 5): _Capability(1024, 65536, 65536),
    (8, 0): _Capability(2048, 167936, 166912),
    (8, 6): _Capability(1536, 102400, 101376),
    (8, 9): _Capability(1536, 102400, 101376),
    (9, 0): _Capability(2048, 233472, 232448, "ACCELERATED_FEATURES"),
}

# The memory is that reported by CUDA on Linux. For the RTX 4060s it is that of `nvidia-smi`, which
# is slightly more.
GPUS = (
    Gpu("h100", "NVIDIA H100 80GB HBM3", (9, 0), cores=132, fpus_per_core=128, clock_ghz=1.98,
        memory_bytes=84_942_979_072, bandwidth=3_352_320_000_000, l2_bytes=50 * 2**20,
        tensor_tflops=989.4, link_bandwidth=64 * 10**9),
    Gpu("h200", "NVIDIA H200", (9, 0), cores=132, fpus_per_core=128, clock_ghz=1.98,
        memory_bytes=151_397_597_184, bandwidth=4_800_000_000_000, l2_bytes=50 * 2**20,
        tensor_tflops=989.4, link_bandwidth=64 * 10**9),
    Gpu("a100", "NVIDIA A100-SXM4-80GB", (8, 0), cores=108, fpus_per_core=64, clock_ghz=1.41,
        memory_bytes=85_100_068_864, bandwidth=2_039_040_000_000, l2_bytes=40 * 2**20,
        tensor_tflops=312.0, link_bandwidth=32 * 10**9),
    Gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), cores=108, fpus_per_core=64, clock_ghz=1.41,
        memory_bytes=42_298_834_944, bandwidth=1_555_200_000_000, l2_bytes=40 * 2**20,
        tensor_tflops=312.0, link_bandwidth=32 * 10**9),
    Gpu("l4", "NVIDIA L4", (8, 9), cores=58, fpus_per_core=128, clock_ghz=2.04,
        memory_bytes=23_583_784_960, bandwidth=300_048_000_000, l2_bytes=48 * 2**20,
        tensor_tflops=121.0, link_bandwidth=32 * 10**9),
    Gpu("t4", "Tesla T4", (7, 5), cores=40, fpus_per_core=64, clock_ghz=1.59,
        memory_bytes=15_843_721_216, bandwidth=320_064_000_000, l2_bytes=4 * 2**20,
        tensor_tflops=65.1, link_bandwidth=16 * 10**9),
    Gpu("rtx3060-12gb", "NVIDIA GeForce RTX 3060", (8, 6), cores=28, fpus_per_core=128,
        clock_ghz=1.777, memory_bytes=12_629_049_344, bandwidth=360_048_000_000,
        l2_bytes=3 * 2**20, tensor_tflops=25.5, link_bandwidth=32 * 10**9),
    Gpu("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), cores=82, fpus_per_core=128, clock_ghz=1.695,
        memory_bytes=25_447_170_048, bandwidth=936_096_000_000, l2_bytes=6 * 2**20,
        tensor_tflops=71.2, link_bandwidth=32 * 10**9),
    Gpu("rtx4060-8gb", "NVIDIA GeForce RTX 4060", (8, 9), cores=24, fpus_per_core=128,
        clock_ghz=2.46, memory_bytes=8_585_740_288, bandwidth=272_032_000_000,
        l2_bytes=24 * 2**20, tensor_tflops=30.2, link_bandwidth=16 * 10**9),
    Gpu("rtx4060ti-16gb", "NVIDIA GeForce RTX 4060 Ti", (8, 9), cores=34, fpus_per_core=128,
        clock_ghz=2.535, memory_bytes=17_175_674_880, bandwidth=288_032_000_000,
        l2_bytes=32 * 2**20, tensor_tflops=44.1, link_bandwidth=16 * 10**9),
    Gpu("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), cores=128, fpus_per_core=128, clock_ghz=2.52,
        memory_bytes=25_250_627_584, bandwidth=1_008_096_000_000, l2_bytes=72 * 2**20,
        tensor_tflops=165.2, link_bandwidth=32 * 10**9),
)  # fmt: skip


def target_config(gpu: Gpu) -> str:
    """Writes a GPU as the text of XLA's `GpuTargetConfigProto`.

    `jax.experimental.topologies` accepts this text as its option `target_config`.

    Example:
        >>> "core_count: 132" in target_config(GPUS[0])
        True
    """
    major, minor = gpu.capability
    limits = _CAPABILITIES[gpu.capability]
    return f"""
        gpu_device_info {{
          name: "{gpu.device_kind}"
          cuda_compute_capability {{
            major: {major} minor: {minor} feature_extension: {limits.features}
          }}
          core_count: {gpu.cores}
          fpus_per_core: {gpu.fpus_per_core}
          clock_rate_ghz: {gpu.clock_ghz}
          device_memory_size: {gpu.memory_bytes}
          memory_bandwidth: {gpu.bandwidth}
          l2_cache_size: {gpu.l2_bytes}
          threads_per_core_limit: {limits.threads_per_core}
          shared_memory_per_core: {limits.shared_per_core}
          shared_memory_per_block_optin: {limits.shared_per_block}
          shared_memory_per_block: 49152
          threads_per_block_limit: 1024
          threads_per_warp: 32
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          device_address_bits: 64
          driver_version: "13.0.0"
          runtime_version: "12.8.0"
          compile_time_toolkit_version: "12.8.0"
          dnn_version: "9.10.0"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{gpu.device_kind}"
    """

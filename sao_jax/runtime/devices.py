"""Which devices a program runs on; called by entry points before anything touches a JAX backend."""

import contextlib
import ctypes
import os
import pathlib

GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia")  # there is an NVIDIA driver where one of them is


def has_nvidia() -> bool:
    return any(pathlib.Path(path).exists() for path in GPU_FILES)


def prepare_backend(num_devices: int | None = None, num_hosts: int = 1) -> None:
    """Chooses the platform, and on CPU the number of virtual devices of each host (default: one per usable core).

    Compiled programs are kept in the user's cache folder (JAX_COMPILATION_CACHE_DIR names another), so that the next
    start, a resume or a replay does not compile again.

    Without an NVIDIA device the CUDA plugin would print a traceback, so the CPU platform is chosen explicitly unless
    JAX_PLATFORMS is set. One virtual device per core is faster than one device with a pool of threads: each core then
    works on its own rows, and a reduction joins them once per update.
    """
    if not has_nvidia():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        _keep_freed_memory()
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "sao_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    if num_devices and has_nvidia():  # memory of the others is not to be taken: rollout processes may use them
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(num_devices))))
    if os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        devices = num_devices or len(os.sched_getaffinity(0))
        jax.config.update("jax_num_cpu_devices", devices)
        # XLA runs programs of all virtual devices, and their dispatch, on one pool with a thread per core. A program
        # that waits for its other devices in a reduction keeps its thread; with no thread to spare the next dispatch
        # blocks, or the reduction waits for ever. NPROC is where XLA reads the size of that pool.
        os.environ.setdefault("NPROC", str(2 * devices + 2))
        # With a device per core, splitting one product over threads gains nothing, and that pool of XLA's has been seen
        # to stop for ever on a busy machine. Over several hosts too, since it changes how a product is rounded: as many
        # devices then give the same bits wherever they are.
        flags = os.environ.get("XLA_FLAGS", "")
        if devices * num_hosts > 1 and "xla_cpu_multi_thread_eigen" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, else the numbers of all NVIDIA GPUs of this machine."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(pathlib.Path("/proc/driver/nvidia/gpus").glob("*"))]


def _keep_freed_memory() -> None:
    """Lets glibc reuse what programs free instead of giving it back to the kernel.

    Each call of a compiled program takes tens of megabytes of temporaries; as fresh pages they cost up to a third of an
    update. One arena, as several would each keep their own. Elsewhere than on glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def data_mesh(num_devices: int | None = None):
    """A one-dimensional mesh with axis "data" over the first `num_devices` devices of each process (default: all)."""
    import jax

    by_process = [jax.local_devices(process) for process in range(jax.process_count())]
    count, available = num_devices or max(map(len, by_process)), min(map(len, by_process))
    if count > available:
        where = " on each of the hosts" if len(by_process) > 1 else ""
        raise ValueError(f"{count} devices asked for, {available} available{where}")
    devices = [device for its in by_process for device in its[:count]]
    return jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


class CompileCounter:
    """Counts XLA compilations of this process from its construction on."""

    def __init__(self):
        from jax import monitoring

        self.count = 0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1

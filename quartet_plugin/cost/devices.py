"""The library of devices: figures of the data sheets, and the highest measured matrix products.

One JSON file a device in `hardware/`; a user's own files are read the same way and go first. Bandwidths
are bytes/s of one device in one direction; `peak_flops` is dense, FLOP/s; `matmul_ceiling` is the highest
measured matrix product as a fraction of the nominal peak (peaks are power-limited in practice).
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.cluster import Name, Positive, Precision
from quartet_plugin.model.files import shown
from quartet_plugin.model.schema import ADDED, Bounds, nearest_word, read_record, record

ScaleUpTopology = Literal["switch", "mesh"]
Count = Annotated[int, Bounds(ge=1, le=2**20)]
# A page of figures.
MAX_DEVICE_BYTES = 2**16

DEFAULT_MATMUL_CEILING = 0.85
# fp8 over bf16, as fractions of nominal: 0.88 on H100, 0.98 on B200.
NARROW_FORMAT = 0.93
# PCIe 5 x16, and a device's share of the host's memory: 8 devices on two Xeon 8480C with 8 channels of
# DDR5-4800 each (MLPerf Inference v4.1, system description of H200-SXM-141GBx8; Intel's data sheet).
HOST_LINK_BYTES_PER_S = 63e9
HOST_MEMORY_BYTES_PER_S = 2 * 8 * 4.8e9 * 8 / 8
# The relative difference of a device's memory from the data sheet's, of which a driver keeps some.
MEMORY_TOLERANCE = 0.12
# A driver's words beside the model and the memory; any other (PCIe, NVL, MIG, ...) means another device.
_MAKERS = frozenset({"NVIDIA", "TESLA", "AMD", "INSTINCT"})
_FORM, _SAME_FORM = re.compile(r"SXM\d?"), re.compile(r"OAM|AC|VF|HBM\d\w*")
_GIB = re.compile(r"(\d+)GB")
# fp32 products run beside the matrix units: 1/16 of the half-precision peak on A100 and H100.
SINGLE_PRECISION = 1 / 16


@record
class DeviceSpec:
    """One kind of accelerator, with the links it usually comes with.

    `scale_up_bandwidth_bytes_per_s` is the sum over all peers; a "mesh" reaches one peer with only its
    share of it. `scale_up_devices` is how many the fast links join, `devices_per_node` how many share a host,
    `compute_units` how many tiles of a matrix product it works on at once. `host_link_bytes_per_s` is that of
    its copies to and from the host, `host_memory_bytes_per_s` its share of the host's memory bandwidth; None
    is a usual host's.
    """

    schema_version: Literal[1]
    name: Name
    generation: Name
    peak_flops: Mapping[Precision, Positive]
    memory_bytes: Annotated[int, Bounds(ge=1, le=2**50)]
    memory_bandwidth_bytes_per_s: Positive
    scale_up_bandwidth_bytes_per_s: Positive
    scale_up_topology: ScaleUpTopology
    scale_up_devices: Count
    scale_out_bandwidth_bytes_per_s: Positive
    devices_per_node: Count
    compute_units: Count
    source: Name
    power_watts: Positive | None = None
    matmul_ceiling: Mapping[Precision, Annotated[float, Bounds(gt=0, le=1)]] = field(default_factory=dict)
    aliases: tuple[Name, ...] = ()
    host_link_bytes_per_s: Positive | None = field(default=None, metadata=ADDED)
    host_memory_bytes_per_s: Positive | None = field(default=None, metadata=ADDED)

    @property
    def resolved_host_link_bytes_per_s(self) -> float:
        """Bytes/s of the device's copies to or from its host; a usual host's where the file has none."""
        return self.host_link_bytes_per_s or HOST_LINK_BYTES_PER_S

    @property
    def resolved_host_memory_bytes_per_s(self) -> float:
        """The device's share of the host's memory bandwidth; a usual host's where the file has none."""
        return self.host_memory_bytes_per_s or HOST_MEMORY_BYTES_PER_S

    def peak_flops_of(self, precision: Precision) -> float:
        """Dense FLOP/s; a format the device lacks runs at the rate of the next wider one it has.

        fp32 where only narrower formats are known: a fixed share of half precision's.
        """
        name = self.format_of(precision)
        if name in self.peak_flops:
            return self.peak_flops[name]
        halves = [self.peak_flops[name] for name in ("bf16", "fp16") if name in self.peak_flops]
        half = max(halves or self.peak_flops.values())
        return half * SINGLE_PRECISION if precision == "fp32" else half

    def format_of(self, precision: Precision) -> Precision:
        """The format whose rate stands for `precision`: the next wider one where the device lacks it.

        Itself where the device has it, or only narrower ones.
        """
        wider: tuple[Precision, ...] = ("fp4", "fp8", "bf16", "fp16", "fp32")
        formats = wider[wider.index(precision) :]
        return next((name for name in formats if name in self.peak_flops), precision)

    def ceiling_flops(self, precision: Precision) -> float:
        """The highest rate a matrix product reaches in practice, FLOP/s.

        A format that was not measured takes the widest measured one's fraction, less what narrower formats
        lose where both were measured.
        """
        measured = self.matmul_ceiling
        if precision in measured:
            return self.peak_flops_of(precision) * measured[precision]
        widest = next((measured[name] for name in ("bf16", "fp16") if name in measured), None)
        fraction = DEFAULT_MATMUL_CEILING if widest is None else widest
        narrow = NARROW_FORMAT if precision in ("fp8", "fp4") else 1.0
        return self.peak_flops_of(precision) * fraction * narrow


def read_device(path: str | os.PathLike[str]) -> DeviceSpec:
    """The device in the JSON file `path`; raises ConfigError naming field, value and rule."""
    return read_record(DeviceSpec, path, max_bytes=MAX_DEVICE_BYTES)


@functools.cache
def library() -> Mapping[str, DeviceSpec]:
    """The devices that come with the package, by name and alias in lower case."""
    folder = resources.files("quartet_plugin.cost") / "hardware"
    with resources.as_file(folder) as path:
        return index(read_device(file) for file in sorted(path.glob("*.json")))


def index(devices: Iterable[DeviceSpec]) -> Mapping[str, DeviceSpec]:
    """Devices by their names and aliases in lower case; raises ConfigError where two share one."""
    by_name: dict[str, DeviceSpec] = {}
    for device in devices:
        for name in (device.name, *device.aliases):
            if by_name.setdefault(name.lower(), device) is not device:
                raise ConfigError(f"device {name!r}: the name is taken twice; rename one of the files")
    return by_name


def device_named(name: str, *, extra: Mapping[str, DeviceSpec] | None = None) -> DeviceSpec:
    """The device called `name`; a remark in parentheses after the name is ignored.

    `extra` (see `index`) goes before the library. Raises ConfigError for an unknown name.
    """
    plain = name.split("(")[0].strip().lower()
    for devices in (extra or {}, library()):
        if plain in devices:
            return devices[plain]
    names = sorted({device.name for device in (*(extra or {}).values(), *library().values())})
    known = [*names, *(alias for alias in (*(extra or {}), *library()) if alias not in names)]
    near = nearest_word(plain, known=known)
    advice = f"{near} or" if near else f"; use one of {', '.join(names)}, or"
    raise ConfigError(f"device {shown(name)}: unknown{advice} add a hardware file for it")


def match_device(name: str, *, memory_bytes: int | None = None) -> DeviceSpec | None:
    """The library's device that `name` means, a name or alias of the library or a driver's name.

    A driver's name means the device of its model and form, whose memory is that of the name and
    `memory_bytes`, as far as they say it. None unless exactly one fits: an H100 PCIe is no H100 SXM, and a
    slice of a device (MIG) no device of the library.
    """
    known = library().get(name.lower())
    devices = {device.name: device for device in library().values()} if known is None else {name: known}
    words = _words_of(name)
    sizes = [int(size[1]) * 2**30 for word in words if (size := _GIB.fullmatch(word))]
    sizes += [] if memory_bytes is None else [memory_bytes]
    fits = [
        device
        for device in devices.values()
        if (device is known or _is_model(device, words))
        and all(abs(size / device.memory_bytes - 1) <= MEMORY_TOLERANCE for size in sizes)
    ]
    return fits[0] if len(fits) == 1 else None


def _words_of(name: str) -> list[str]:
    return name.upper().replace("-", " ").split()


def _is_model(device: DeviceSpec, words: Sequence[str]) -> bool:
    """Whether a driver's name is of the device's model and form, and of nothing else."""
    model, *rest = _words_of(device.name)
    forms = [word for word in rest if _FORM.fullmatch(word)]
    return model in words and all(
        word in (model, *rest)
        or word in _MAKERS
        or _GIB.fullmatch(word)
        or _SAME_FORM.fullmatch(word)
        # The library's SXM is any generation's.
        or (_FORM.fullmatch(word) and any(word.startswith(form) for form in forms))
        for word in words
    )


def read_folder(folder: str | os.PathLike[str]) -> Mapping[str, DeviceSpec]:
    """All devices of the JSON files in `folder`, for `device_named(extra=...)`.

    Raises ConfigError where there is no such folder or no such file in it.
    """
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        state = "no device file (*.json) in it" if Path(folder).is_dir() else "no such folder"
        raise ConfigError(f"{folder}: {state}; name a folder of device files")
    return index(read_device(file) for file in files)

"""Describe a GPU by cuDNN's properties.

With such a description, plans for the GPU can be made on a machine without it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from handlepool._util.arguments import as_integer
from handlepool._util.names import shown
from handlepool.errors import ArgumentError, DriverNotAvailableError

VERSION = "cudnnVersion"
"""Key for the cuDNN version that wrote the properties.

This library adds the key. cuDNN ignores keys that it does not know.
"""
KEYS = (
    "maxGridSize",
    "maxBlockSize",
    "regsPerBlock",
    "multiProcessorCount",
    "warpSize",
    "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin",
    "reservedSharedMemoryPerBlock",
    "maxRegistersPerSM",
    "maxCtasPerSM",
    "maxThreadsPerBlock",
    "maxThreadsPerSM",
    "pciDeviceId",
    "isTccDriver",
    "supportCoopLaunch",
    "totalGlobalMem",
    "smClockRateKHz",
    "memClockRateKHz",
    "l2CacheSize",
    "cudaDeviceId",
    "deviceVer",
    "driverVer",
    "deviceName",
)
"""Keys that every tested cuDNN requires, from 9.19 on."""
KIND = (
    "deviceName",
    "deviceVer",
    "driverVer",
    "l2CacheSize",
    "maxSharedMemoryPerBlockOptin",
    "multiProcessorCount",
    "totalGlobalMem",
)
"""Keys that together identify a kind of device.

CUDA's driver gives the values of these keys at once. cuDNN takes over a millisecond for the values of all keys.
"""
LATER = ("memoryBusWidth",)
"""Keys that a later cuDNN requires.

cuDNN 9.28 refuses a description without them, but cuDNN 9.19 does not write them.
"""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Describe a GPU by the properties that cuDNN's heuristics read.

    Parameters
    ----------
    text : str
        A JSON object, such as the content of a file that ``handlepool info --device-properties`` wrote.

    Attributes
    ----------
    text : str
        The same JSON with its keys in order, so that equal descriptions have equal texts.

    Raises
    ------
    ArgumentError
        For text that is no JSON object, and for a missing key. The message names the key.
    """

    text: str
    _values: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = self.text
        try:
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"properties of a device must be JSON, not {shown(text)} ({error}); describe the device by DeviceProperties.of"
            ) from None
        if not isinstance(found, dict):
            raise ArgumentError(
                f"properties of a device must be a JSON object, not {shown(found)}; describe the device by DeviceProperties.of"
            )
        if VERSION not in found:
            raise ArgumentError(
                f"properties of a device lack {VERSION!r}, the number of the cuDNN version that wrote them (91900 for 9.19.0); "
                "describe the device again by DeviceProperties.of"
            )
        missing = [key for key in KEYS if key not in found]
        if missing:
            raise ArgumentError(
                f"properties of a device lack {', '.join(map(repr, missing))}, which cuDNN needs; describe the device again by "
                f"DeviceProperties.of"
            )
        # This library computes with these two values. cuDNN itself checks all other values.
        for key in (VERSION, "deviceVer"):
            if type(found[key]) is not int:
                raise ArgumentError(f"properties of a device have {found[key]!r} as {key!r}; the value must be an integer")
        # The class is frozen, so `object.__setattr__` sets the attributes.
        object.__setattr__(self, "text", json.dumps(found, sort_keys=True))
        object.__setattr__(self, "_values", found)

    @classmethod
    def of(cls, ordinal: int = 0) -> "DeviceProperties":
        """Return cuDNN's description of a GPU of this machine.

        Raises
        ------
        ArgumentError
            For a value that is no ordinal.
        DriverNotAvailableError
            If there is no such GPU, or no libcudnn.
        """
        import cudnn

        number = as_integer(ordinal, -1)
        if not 0 <= number < 1 << 31:
            raise ArgumentError(f"ordinal={shown(ordinal)}; it must be an integer from 0 to {(1 << 31) - 1}")
        try:
            found = json.loads(cudnn.create_device_properties(number).serialize())
            return cls(json.dumps(found | {VERSION: cudnn.backend_version()}))
        except RuntimeError as error:
            raise DriverNotAvailableError(f"cuDNN cannot describe device {number}: {error}") from error

    @property
    def name(self) -> str:
        """The device's name, such as "NVIDIA H200"."""
        return str(self._values["deviceName"])

    @property
    def architecture(self) -> int:
        """The GPU's architecture, for compilers of kernels: 90 means sm_90."""
        return int(self._values["deviceVer"]) // 10

    @property
    def cudnn_version(self) -> int:
        """The version of the cuDNN that wrote the text: 91900 means 9.19.0."""
        return int(self._values[VERSION])

    @property
    def native(self) -> Any:
        """The frontend's object for planning graphs.

        The property raises ArgumentError if the installed cuDNN requires a key that this description lacks. It raises
        DriverNotAvailableError if libcudnn, or a library that libcudnn loads, is missing.
        """
        import cudnn

        try:
            return cudnn.create_device_properties(self.text)
        except RuntimeError as error:
            try:
                version = cudnn.backend_version()
            except RuntimeError as absent:
                raise DriverNotAvailableError(
                    f"libcudnn, which makes plans, was not found ({absent}); install nvidia-cudnn-cu12 or nvidia-cudnn-cu13"
                ) from error
            # The frontend has no class for this error, so only the text gives the status.
            if "SUBLIBRARY_LOADING_FAILED" in str(error):
                raise DriverNotAvailableError(
                    f"cuDNN {version} loads CUDA's driver library to plan, and found no libcuda.so.1. The CUDA toolkit has "
                    "such a library for machines without a GPU, lib64/stubs/libcuda.so: make it available as libcuda.so.1 by "
                    f"LD_LIBRARY_PATH ({error})"
                ) from error
            missing = ", ".join(repr(key) for key in LATER if key not in self._values)
            what = f"because they lack {missing}" if missing else f"({error})"
            raise ArgumentError(
                f"cuDNN {version} refuses the properties of {self.name!r} that cuDNN {self.cudnn_version} wrote "
                f"{what}; describe the device again with cuDNN {version} or later"
            ) from error

    @property
    def kind(self) -> dict[str, Any]:
        """The properties that identify this kind of device (`KIND`).

        Devices of the same kind have equal values, because `KIND` names neither the device's place in the machine nor the
        version of cuDNN.
        """
        return {key: self._values[key] for key in KIND}

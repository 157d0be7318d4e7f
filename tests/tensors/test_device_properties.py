"""Descriptions of a device: what is read, and what is refused before cuDNN sees it."""

import json
from pathlib import Path

import pytest

from handlepool import ArgumentError, DriverNotAvailableError
from handlepool.tensors.device_properties import KEYS, KIND, VERSION, DeviceProperties

TEXT = (Path(__file__).parents[1] / "data" / "h200_device_properties.json").read_text()
VALUES = json.loads(TEXT)


def test_a_description_says_what_it_is_of_and_who_wrote_it():
    device = DeviceProperties(TEXT)
    assert (device.name, device.architecture, device.cudnn_version) == ("NVIDIA H200", 90, 91900)
    assert json.loads(device.text) == VALUES


def test_descriptions_are_equal_whatever_the_order_of_their_keys():
    turned = json.dumps(dict(reversed(VALUES.items())), indent=1)
    assert DeviceProperties(turned) == DeviceProperties(TEXT)
    assert DeviceProperties(json.dumps(VALUES | {"warpSize": 33})) != DeviceProperties(TEXT)


@pytest.mark.parametrize("key", KEYS)
def test_a_kind_of_device_is_told_from_others_by_what_the_driver_tells_at_once(key):
    value = VALUES[key]
    other = f"{value}, another" if isinstance(value, str) else [*value, 1] if isinstance(value, list) else value + 10
    same = DeviceProperties(json.dumps(VALUES | {key: other})).kind == DeviceProperties(TEXT).kind
    assert same is (key not in KIND)


def test_the_kind_says_what_a_plan_depends_on_and_not_where_the_device_is():
    assert {"deviceName", "deviceVer", "driverVer", "multiProcessorCount", "totalGlobalMem"} <= set(KIND)
    assert not {VERSION, "cudaDeviceId", "pciDeviceId"} & set(KIND)


@pytest.mark.parametrize("key", [*KEYS, VERSION])
def test_a_missing_key_is_named(key):
    with pytest.raises(ArgumentError, match=repr(key)):
        DeviceProperties(json.dumps({name: value for name, value in VALUES.items() if name != key}))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", b"\xff", None, json.dumps(VALUES | {VERSION: "9.19"})])
def test_what_is_no_description_is_refused(text):
    with pytest.raises(ArgumentError, match="properties of a device"):
        DeviceProperties(text)


@pytest.mark.parametrize("ordinal", [-1, 2**31, 10**20, None, 1.5, True, "0"])
def test_what_is_no_ordinal_is_refused(ordinal):
    with pytest.raises(ArgumentError, match=f"ordinal={ordinal!r}; it must be an integer from 0 to"):
        DeviceProperties.of(ordinal)


def test_where_there_is_no_gpu_none_is_described():
    with pytest.raises(DriverNotAvailableError, match="cuDNN cannot describe device 99: "):
        DeviceProperties.of(99)

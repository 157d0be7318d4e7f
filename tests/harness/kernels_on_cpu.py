"""Runs the CUDA kernels' own source on the CPU: compiled as C++, each thread of each block in turn, or as a thread of its own."""

import ctypes
import shutil
import subprocess

import pytest

from handlepool.drivers.cuda import kernels, network_kernels

COMPILER = shutil.which("g++")
SHIM = r"""
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

struct Dim { unsigned x, y; };
static Dim gridDim, blockDim, blockIdx;
static thread_local Dim threadIdx;
static std::barrier<>* in_step_with;
#define __device__
#define __shared__ static
#define __syncthreads() in_step_with->arrive_and_wait()
#define ENTRY static
#define __launch_bounds__(threads)
#define BY_VALUE const

static float half_to_float(unsigned short x) { _Float16 value; memcpy(&value, &x, 2); return value; }
static unsigned short float_to_half(float x) { _Float16 value = x; unsigned short bits; memcpy(&bits, &value, 2); return bits; }
static float __uint_as_float(unsigned x) { float value; memcpy(&value, &x, 4); return value; }
static float __int_as_float(int x) { return __uint_as_float(x); }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static float normcdff(float x) { return erfcf(-x * 0.70710678f) / 2; }

static float __shfl_xor_sync(unsigned, float value, int offset) {  // by all threads of a block together
    static float given[1024];
    given[threadIdx.x] = value;
    __syncthreads();
    const float found = given[threadIdx.x ^ offset];
    __syncthreads();
    return found;
}

template <class Run> static void launch(unsigned across, unsigned down, unsigned threads, bool in_step, Run run) {
    gridDim = {across, down};
    blockDim = {threads, 1};
    std::barrier<> barrier(threads);
    in_step_with = &barrier;
    for (unsigned y = 0; y < down; ++y)
        for (unsigned x = 0; x < across; ++x) {
            blockIdx = {x, y};
            std::vector<std::thread> running;
            for (unsigned t = 0; t < threads; ++t) {
                auto one = [&run, t] { threadIdx = {t, 0}; run(); };
                if (in_step) running.emplace_back(one); else one();
            }
            for (auto& each : running) each.join();
        }
}
"""
GEOMETRIES = {
    "add": "Sum",
    "concat": "Parts",
    "windows": "Windows",
    "whole": "Whole",
    "depthwise": "Depthwise",
    "elementwise": "Elements",
}
GEOMETRIES |= {name: name.capitalize() for name in ("normalise", "affine", "gather", "resample", "squeeze", "layer", "excite")}
# Their threads wait for each other.
IN_STEP = ("whole", "depthwise", "normalise", "squeeze", "layer", "excite")
OWN_MACROS = ("FOR_EACH_INDEX", "LOADED", "HELPER", "NOTHING", "FOR_EACH_PACK", "PACK_AT")


def _variant(number, launch):
    names = [name for name, _ in launch.macros]
    geometry = GEOMETRIES[launch.entry]
    return "\n".join(
        [
            f"namespace variant_{number} {{",
            *(f"#define {name} {value}" for name, value in launch.macros),
            kernels.source(launch.code),
            *(f"#undef {name}" for name in (*names, *OWN_MACROS)),
            "}",
            f'extern "C" long run_{number}',
            "(void* at, void* geometry, long bytes, unsigned across, unsigned down, unsigned threads) {",
            f"    using namespace variant_{number};",
            f"    Pointers p; {geometry} g;",
            "    if (bytes != sizeof g) return sizeof g;",
            "    memcpy(&p, at, sizeof p); memcpy(&g, geometry, sizeof g);",
            f"    launch(across, down, threads, {int(launch.entry in IN_STEP)}, [&] {{ {launch.entry}(p, g); }});",
            "    return 0;",
            "}",
        ]
    )


def planned(kernel, operands, limits, *, wide=False):
    """Plan a launch of packs as large as there may be, however few threads are left, within other limits.

    With ``wide``, the offsets have 64 bits.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PLENTY": 0, **limits}.items():
            patch.setattr(kernels if hasattr(kernels, name) else network_kernels, name, value)
        if wide:
            plain = kernels.launch_of
            patch.setattr(kernels, "launch_of", lambda *args, wide=False, **options: plain(*args, wide=True, **options))
        return kernels.plan(kernel, operands)


def _key(launch):
    return launch.entry, launch.macros, launch.code


class Compiled:
    """The variants that some launches need, in one library."""

    def __init__(self, launches, folder):
        self._numbers = {key: number for number, key in enumerate(dict.fromkeys(_key(each) for each in launches))}
        of = {_key(each): each for each in launches}
        text = "\n".join([SHIM, *(_variant(number, of[key]) for key, number in self._numbers.items())])
        source, library = folder / "variants.cpp", folder / "variants.so"
        source.write_text(text, encoding="utf-8")
        flags = ["-std=c++20", "-shared", "-fPIC", "-pthread", "-w", "-ffp-contract=off"]
        subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def run(self, launch, arrays):
        """Launch over NumPy's arrays: inputs, then the output."""
        addresses = (ctypes.c_uint64 * 64)(*(array.__array_interface__["data"][0] for array in arrays))
        where, count = launch.geometry.buffer_info()
        entry = self._library[f"run_{self._numbers[_key(launch)]}"]
        entry.restype = ctypes.c_long
        of_geometry = ctypes.c_void_p(where), ctypes.c_long(count * launch.geometry.itemsize)
        expected = entry(addresses, *of_geometry, *launch.grid, launch.threads)
        assert not expected, f"the geometry of {launch.entry} has {expected} bytes, and was given {of_geometry[1].value}"

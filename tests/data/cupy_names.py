"""Write the public names of CuPy's arrays to ``cupy_names.json``; run it where CuPy is. It needs no GPU."""

import json
import pathlib

import cupy

names = sorted(name for name in dir(cupy.ndarray) if not name.startswith("_"))
found = {"cupy": cupy.__version__, "names": names}
pathlib.Path(__file__).with_name("cupy_names.json").write_text(json.dumps(found, indent=1) + "\n")

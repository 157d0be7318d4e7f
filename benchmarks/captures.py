"""Find the calls that a CUDA-graph capture survives, by mode of capture, thread and operation, the pool's beside plain calls.

A capture survives if it can be ended and its graph replays right. For the pool's operations, eager work of another thread
during the capture must be right as well. The operations include a fork over the captured stream, whose branches are replayed,
and a `trim(captured=True)`. They are in tests/gpu/capture_operations.py. Needs a GPU.
"""

import json
import sys
from pathlib import Path

from common import conditions, print_table, progress
from options import arguments, parse

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))


def main() -> int:
    parser = arguments(__doc__)
    options = parse(parser)
    from handlepool import HandlePool, drivers

    problem = drivers.available("cuda")
    if problem or options.driver == "host":
        parser.error(f"a capture of a GPU's stream is needed: {problem or 'the host driver has none'}")
    from capture_operations import MODES, OURS, PLAIN, WHO, survives
    from conftest import Kernels

    kernels = Kernels()
    cases = [
        (kind, name, mode, who)
        for kind, names in (("ours", OURS), ("plain", PLAIN))
        for name in names
        for mode in MODES
        for who in WHO
    ]
    found = []
    for kind, name, mode, who in progress(cases):
        if kind == "ours":
            with HandlePool(driver="cuda") as pool:
                trouble = survives(kernels, OURS[name], mode, who, pool)
        else:
            trouble = survives(kernels, PLAIN[name], mode, who)
        found.append({"calls": kind, "operation": name, "mode": mode, "who": who, "survived": not trouble, "trouble": trouble})
    columns = [(mode, who) for who in WHO for mode in MODES]
    print_table(
        ("survived", *(f"{mode}, {who}" for mode, who in columns)),
        [
            (
                f"{kind}: {name}",
                *(
                    next(
                        "yes" if case["survived"] else "no"
                        for case in found
                        if (case["calls"], case["operation"], case["mode"], case["who"]) == (kind, name, mode, who)
                    )
                    for mode, who in columns
                ),
            )
            for kind, name in dict.fromkeys((case["calls"], case["operation"]) for case in found)
        ],
    )
    lost = [case for case in found if case["calls"] == "ours" and not case["survived"]]
    for case in lost:
        print("NOT SURVIVED:", case)
    if options.json is not None:
        results = {"benchmark": "captures", "conditions": conditions("cuda"), "cases": found}
        results |= {"bound": "captures survive every operation of the pool", "kept": not lost}
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())

"""Networks of torchvision by both doors of handlepool's torch integration and by `together`, beside torch's own ways.

Each network runs in a process of its own and adds its figures to the file of `--json`. A second call leaves out the networks
that have figures there, so one network a call is a way to run all: `--networks googlenet`. `torch_ways.py` describes the ways.
"""

import json
from typing import Any

from torch_ways import Work, measured, options_of, run_each, show_times, weighted

NETWORKS = (
    *("googlenet", "inception_v3", "squeezenet1_1", "resnet18", "resnet50", "densenet121", "mobilenet_v3_large"),
    *("efficientnet_b0", "convnext_tiny", "shufflenet_v2_x1_0", "regnet_y_400mf", "vit_b_16", "ensemble", "unlike"),
)
ENSEMBLES = {
    "ensemble": ("resnet18",) * 8,
    "unlike": ("googlenet", "squeezenet1_1", "resnet18", "mobilenet_v3_large", "shufflenet_v2_x1_0", "regnet_y_400mf"),
}
BOUNDS = {"googlenet": (0.60, 0.70), "inception_v3": (0.62, 1.0), "ensemble": (0.28, 0.40), "shufflenet_v2_x1_0": (0.80, 1.0)}
"""Of Inductor: the most for the device, and the most for a call by the clock. Of others 0.95 and 1.0."""
SIDES = {"inception_v3": 299}


def main() -> None:
    """Run the networks one after the other."""
    parser = options_of("torch_networks", __doc__, NETWORKS)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(figures(options.one, options)))
        return
    run_each(__file__, options, {network: f"{network}, batch {options.batch}" for network in options.networks}, show)


def show(network: str, key: str, found: dict[str, Any]) -> None:
    """Print the figures of a network."""
    print(f"\n{key}, {found['gpu']}, torch {found['torch']}")
    show_times(found)
    base = found["device"].get("inductor")
    if base is not None and (ours := found["device"].get("replay") or found["device"].get("together")):
        most, most_clock = BOUNDS.get(network, (0.95, 1.0))
        clock = (found["clock"].get("ours") or found["clock"]["together"]) / found["clock"]["inductor"]
        print(f"  device {ours / base:.2f} of at most {most}; clock {clock:.2f} of at most {most_clock}")


def figures(name: str, options: Any) -> dict[str, Any]:
    """Return the figures of a network."""
    import torch

    parts = ENSEMBLES.get(name, (name,))
    torch.manual_seed(0)
    side = SIDES.get(name, 224)
    work = Work(torch, [built(torch, part) for part in parts], [(options.batch, 3, side, side)])
    return measured(torch, work, options.ways, options.samples, torch.float16)


def built(torch: Any, name: str) -> Any:
    """Return a network with random weights that lead to values of a usual size."""
    import torchvision

    more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = weighted(torch, getattr(torchvision.models, name)(weights=None, **more))
    return model.cuda().half().to(memory_format=torch.channels_last)


if __name__ == "__main__":
    main()

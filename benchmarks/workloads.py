"""Wide models of other packages by handlepool's torch integration, beside torch's own ways.

The models are as torchvision, timm, MONAI, segmentation-models-pytorch and transformers have them, with random weights. They
run at batch 1, in float16 unless the name ends in "float32". Detectors give the raw tensors of their heads, because the values
of these tensors decide the number of boxes. Each workload runs in a process of its own and adds its figures to the file of
`--json`. A second call leaves out the workloads that have figures there, so one workload a call is a way to run all:
`--networks hrnet_w18`. A workload whose package or model is missing becomes a line. `torch_ways.py` describes the ways.

MONAI and segmentation-models-pytorch are pure Python, so their wheels can be carried to a machine without a package index, and
installed there by `pip install --no-deps --no-index`.
"""

import json
import warnings
from collections.abc import Callable
from typing import Any

from torch_ways import LANES, Work, flat, measured, options_of, run_each, scaled, show_times, weighted

Parts = list[tuple[Any, tuple[int, ...] | None]]
"""Modules, each with the shape of its input, or None for the input of the first module."""
BOUNDS = {
    **dict.fromkeys(("unets", "cameras", "eight_unlike"), ("peers", 0.80)),
    "hrnet_w18": ("inductor", 0.55),
    "nasnetalarge": ("inductor", 0.60),
    **dict.fromkeys(("hifigan", "hifigan_float32"), ("inductor", 0.70)),
    **dict.fromkeys(("retinanet", "fcos", "ssdlite"), ("inductor", 0.75)),
}
"""The most of the device time, of Inductor's or of the best peer's."""
OURS = ("replay", "fallback", "together", "together, inductor")
EIGHT = (
    *("googlenet", "squeezenet1_1", "resnet18", "mobilenet_v3_large"),
    *("shufflenet_v2_x1_0", "regnet_y_400mf", "efficientnet_b0", "mnasnet1_0"),
)


def timm_model(name: str, side: int, small: int) -> Callable[[bool], Parts]:
    """Return the maker of one network of timm."""

    def make(is_small: bool) -> Parts:
        import timm

        extent = small if is_small else side
        return [(timm.create_model(name, pretrained=False), (1, 3, extent, extent))]

    return make


def vision(name: str) -> Any:
    """Return a classifier of torchvision."""
    import torchvision

    more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return getattr(torchvision.models, name)(weights=None, **more)


def detector(name: str) -> Any:
    """Return a detector's backbone and heads as one module."""
    import torch
    import torchvision

    class Heads(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.backbone, self.head = model.backbone, model.head

        def forward(self, x: Any) -> Any:
            found = self.head([*self.backbone(x).values()])
            return tuple([found[name] for name in sorted(found)])

    return Heads(getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None))


def segmenter() -> Any:
    """Return a segmenter that gives its scores."""
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
    return plain(model, lambda value: value["out"])


def depth() -> Any:
    """Return a depth network that gives its map."""
    # The networks on a backbone of transformers, such as Depth Anything, have hooks. A program would not call these.
    from transformers import GLPNConfig, GLPNForDepthEstimation

    return plain(GLPNForDepthEstimation(GLPNConfig()), lambda value: value.predicted_depth)


def plain(model: Any, tensors: Callable[[Any], Any]) -> Any:
    """Return a module that gives tensors where the model gives a structure of its own."""
    import torch

    class Plain(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return tensors(self.model(x))

    return Plain()


def heads(name: str, side: int) -> Callable[[bool], Parts]:
    """Return the maker of one detector."""
    return lambda small: [(detector(name), (1, 3, 64, 64) if small else (1, 3, side, side))]


def unets(small: bool) -> Parts:
    """Return the five networks of a medical ensemble, over one slice."""
    from monai.networks.nets import BasicUNet

    side = 32 if small else 256
    return [(BasicUNet(spatial_dims=2, in_channels=1, out_channels=2), None if at else (1, 1, side, side)) for at in range(5)]


def unetplusplus(small: bool) -> Parts:
    """Return a U-Net whose decoder is a triangle of blocks."""
    from segmentation_models_pytorch import UnetPlusPlus

    return [(UnetPlusPlus("resnet34", encoder_weights=None), (1, 3, 64, 64) if small else (1, 3, 256, 256))]


def hifigan(small: bool) -> Parts:
    """Return a vocoder, over a second of speech."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    return [(SpeechT5HifiGan(SpeechT5HifiGanConfig()), (8, 80) if small else (64, 80))]


def cameras(small: bool) -> Parts:
    """Return six networks, each with an image of its own."""
    side = 64 if small else 224
    return [(vision("resnet18"), (1, 3, side, side)) for _ in range(6)]


def eight_unlike(small: bool) -> Parts:
    """Return eight networks of different families, over one image."""
    side = 64 if small else 224
    return [(vision(name), None if at else (1, 3, side, side)) for at, name in enumerate(EIGHT)]


def scene(small: bool) -> Parts:
    """Return a detector, a segmenter and a depth network, over one image."""
    side = 64 if small else 384
    return [(detector("fcos_resnet50_fpn"), (1, 3, side, side)), (segmenter(), None), (depth(), None)]


def pyramid(small: bool) -> Parts:
    """Return one network over five sizes of an image."""
    network = vision("resnet18")
    return [(network, (1, 3, side, side)) for side in ((32, 48, 64, 80, 96) if small else (64, 96, 128, 192, 256))]


WORKLOADS: dict[str, Callable[[bool], Parts]] = {
    "hrnet_w18": timm_model("hrnet_w18", 224, 64),
    "nasnetalarge": timm_model("nasnetalarge", 331, 96),
    "pnasnet5large": timm_model("pnasnet5large", 331, 96),
    "retinanet": heads("retinanet_resnet50_fpn_v2", 640),
    "fcos": heads("fcos_resnet50_fpn", 640),
    "ssdlite": heads("ssdlite320_mobilenet_v3_large", 320),
    "unets": unets,
    "unetplusplus": unetplusplus,
    "hifigan": hifigan,
    "hifigan_float32": hifigan,
    "cameras": cameras,
    "eight_unlike": eight_unlike,
    "scene": scene,
    "pyramid": pyramid,
}


def made(torch: Any, name: str, small: bool, device: str) -> Work:
    """Return a workload in float32, with random weights that give values of a usual size.

    A package or a model that is missing raises ImportError, AttributeError or RuntimeError.
    """
    torch.manual_seed(0)
    parts = WORKLOADS[name](small)
    models = [weighted(torch, model).to(device) for model, _ in parts]
    work = Work(torch, models, [shape for _, shape in parts if shape is not None])
    scaled(torch, work, device)
    for module in models:
        module.to(memory_format=torch.channels_last)
    return work


def main() -> None:
    """Run the workloads one after the other."""
    parser = options_of("workloads", __doc__, [*WORKLOADS])
    parser.add_argument(
        "--count", action="store_true", help="count nodes and the longest path on a CPU, at small sizes; time nothing"
    )
    options = parser.parse_args()
    if options.count:
        for name in options.networks:
            print(counted(name), flush=True)
        return
    if options.one:
        print(json.dumps(figures(options.one, options)))
        return
    run_each(__file__, options, {name: name for name in options.networks}, show)


def counted(name: str) -> str:
    """Return a line of Markdown with a workload's nodes on the host driver, and those on the longest path."""
    import torch

    from handlepool.integrations.torch import recorded

    # On the host driver every node has to be the library's, and cuDNN multiplies float32 matrices in TF32 only.
    torch.backends.cuda.matmul.allow_tf32 = True
    warnings.simplefilter("ignore")
    try:
        work = made(torch, name, True, "cpu")
        with torch.no_grad():
            found = recorded(work.model, strict=True, lanes=LANES).program(*work.draw("cpu", torch.float32)).explain()
    except Exception as error:
        return f"{name}: {type(error).__name__}: {str(error)[:200]}"
    nodes, longest = len(found.nodes), found.longest_by_data
    return f"| {name} | {nodes} | {longest} | {nodes / longest:.1f} |"


def figures(name: str, options: Any) -> dict[str, Any]:
    """Return the figures of a workload, or the reason why there are none."""
    try:
        import torch

        work = made(torch, name, False, "cuda")
        with torch.no_grad():
            value = work.model(*work.draw("cuda", torch.float32))
    # A package that is missing or of another version may raise any error.
    except Exception as error:
        return {"unavailable": f"{type(error).__name__}: {str(error)[:200]}"}
    if not all(isinstance(each, torch.Tensor) for each in flat(value)):
        return {"unavailable": f"its value is a {type(value).__name__} that holds more than tensors"}
    dtype = torch.float32 if name.endswith("float32") else torch.float16
    work.model.to(dtype)
    return measured(torch, work, options.ways, options.samples, dtype)


def show(name: str, key: str, found: dict[str, Any]) -> None:
    """Print the figures of a workload, beside its bound."""
    width = found["width"]
    about = f"; {width['nodes']} nodes, width {width['width']:.2f}" if width else ""
    print(f"\n{key}, {found['dtype']}, {found['gpu']}, torch {found['torch']}{about}")
    show_times(found)
    times = found["device"]
    ours, peers = ({way: times[way] for way in times if (way in OURS) is mine} for mine in (True, False))
    peers = {way: time for way, time in peers.items() if way not in ("ours", "dynamo")}
    kind, most = BOUNDS.get(name, ("inductor", None))
    if ours and peers and (kind == "peers" or "inductor" in peers):
        base = min(peers, key=peers.__getitem__) if kind == "peers" else kind
        best = min(ours, key=ours.__getitem__)
        of = "" if most is None else f" of at most {most}"
        print(f"  {best} takes {ours[best] / peers[base]:.2f} of {base}{of}")


if __name__ == "__main__":
    main()

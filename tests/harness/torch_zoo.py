"""Models of torchvision and timm that are recorded beside those of the benchmark."""

import importlib.util

import torch
from harness.torch_host import torchvision
from torch import nn

TORCHVISION = (
    *("alexnet", "vgg11_bn", "resnet34", "resnext50_32x4d", "wide_resnet50_2", "densenet169", "mnasnet0_5", "mobilenet_v2"),
    *("mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_0", "regnet_x_400mf", "efficientnet_v2_s", "convnext_small"),
    *("swin_t", "swin_v2_t", "vit_b_32", "segmentation.fcn_resnet50", "segmentation.deeplabv3_mobilenet_v3_large"),
    *("segmentation.lraspp_mobilenet_v3_large", "video.r3d_18"),
)
TIMM = (
    *("ghostnet_100", "mixer_s32_224", "resmlp_12_224", "deit_tiny_patch16_224", "pit_ti_224", "poolformer_s12"),
    *("edgenext_xx_small", "mobilevit_xxs", "mobileone_s0", "repvgg_a0", "resnest14d", "coat_lite_tiny", "crossvit_tiny_240"),
    *("visformer_tiny", "xcit_nano_12_p16_224", "levit_128s", "fbnetc_100", "lcnet_050", "tinynet_e", "rexnet_100", "dla34"),
    *("dpn48b", "ese_vovnet19b_dw", "selecsls42", "hardcorenas_a", "spnasnet_100", "efficientvit_b0", "efficientformer_l1"),
    *("fastvit_t8", "mobilenetv4_conv_small", "repghostnet_050", "gmlp_ti16_224", "hrnet_w18_small", "cait_xxs24_224"),
    *("res2net50_26w_4s", "legacy_seresnet18", "skresnet18", "eca_resnet33ts", "inception_v4", "xception41"),
)
SIZED = ("xcit_nano_12_p16_224", "levit_128s", "coat_lite_tiny", "edgenext_xx_small", "mobilevit_xxs")
"""Models of timm whose usual size is theirs alone."""
SIDES = {"swin_t": 64, "swin_v2_t": 64, "vit_b_32": 224, "inception_v4": 96}


def made(name):
    """A model with weights that lead to values of a usual size, and its input's shape; None where its library is missing."""
    torch.manual_seed(0)
    side = SIDES.get(name, 64)
    if name in TORCHVISION:
        models = torchvision()
        if models is None:
            return None
        room, _, last = name.rpartition(".")
        more = {"weights_backbone": None} if room == "segmentation" else {}
        model = getattr(getattr(models, room) if room else models, last)(weights=None, **more)
    else:
        if importlib.util.find_spec("timm") is None or torchvision() is None:
            return None
        import timm

        model = timm.create_model(name, pretrained=False)
        known = model.default_cfg
        side = known["input_size"][-1] if known.get("fixed_input_size") or name in SIZED else side
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
            if isinstance(module, nn.Linear) and not module.weight.any():
                module.weight.normal_(0, 0.05)
    shape = (1, 3, 4, side, side) if "video" in name else (1, 3, side, side)
    return model.eval(), shape

"""Figures printed in the papers, for comparison with ours. Each constant names its table and section.

* PETRA: Rivaud, Fournier, Pumir, Belilovsky, Eickenberg, Oyallon, "PETRA: Parallel end-to-end training with reversible
  architectures", ICLR 2025, arXiv 2406.02052.
* RevNet: Gomez, Ren, Urtasun, Grosse, "The reversible residual network", NeurIPS 2017, arXiv 1707.04585.
* InPlace-ABN: Rota Bulò, Porzi, Kontschieder, "In-place activated BatchNorm for memory-optimized training of DNNs", CVPR 2018,
  arXiv 1712.02616.

Accuracies and errors are percentages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Recipe:
    """A training recipe.

    Attributes:
        batch: Images per update of the baseline.
        peak: Learning rate of the baseline after the warm-up.
        warmup: Epochs of linear warm-up from 0.
        drops: When the learning rate is multiplied by 0.1, in ``unit``.
        length: Length of the run, in ``unit``.
        unit: ``epochs`` or ``updates``.
        weight_decay: Not applied to biases and batch normalisation.
    """

    batch: int
    peak: float
    warmup: int
    drops: tuple[int, ...]
    length: int
    weight_decay: float
    nesterov: bool
    unit: str = "epochs"
    momentum: float = 0.9


RECIPES = MappingProxyType(
    {
        "petra/cifar10": Recipe(128, 0.1, 5, (150, 225), 300, 5e-4, nesterov=True),
        "petra/imagenet32": Recipe(128, 0.1, 5, (30, 60, 80), 90, 1e-4, nesterov=True),
        "petra/imagenet": Recipe(256, 0.1, 5, (30, 60, 80), 90, 1e-4, nesterov=True),
        "revnet/cifar10": Recipe(100, 0.1, 0, (40_000, 60_000), 80_000, 2e-4, nesterov=False, unit="updates"),
        "revnet/imagenet": Recipe(256, 0.1, 0, (160_000, 320_000, 480_000), 600_000, 1e-4, nesterov=False, unit="updates"),
    }
)
"""PETRA, section 4.1, and RevNet, appendix 7.1, by name of the preset. PETRA's text prints "128 on ImageNet32 and CIFAR-10, and 256
on ImageNet32"; the last one can only be ImageNet. RevNet's text has no initial learning rate for ImageNet; 0.1 is that of its
CIFAR recipe."""

PETRA_BATCH = 64
"""Images per microbatch of PETRA's runs; the peak rate is 0.1 · 64 k / 256 (PETRA, section 4.1)."""

PETRA_ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
"""Values of k from which PETRA takes the one with the best training accuracy (section 4.1), and those of Fig. 4."""

TABLE1 = {
    "backprop": ("graph", "", "1", "1", "3J", "3J"),
    "reversible": ("0", "0", "1", "4", "4J", "4J"),
    "delayed, graphs kept": ("2(J − j) graphs", "", "2(J − j) / k", "1", "3J", "2"),
    "dsp": ("", "2(J − j)", "1", "1", "4J", "3"),
    "petra": ("0", "0", "1", "4", "4J", "3"),
}
"""PETRA, Table 1 (section 3.2), by method: stored activations of stage j in graphs and in inputs, versions of its parameters, size
of messages, compute, and mean time per batch if a stage runs forward and backward at the same time. The size of 4 is that of
backward messages; forward messages are twice as large as without reversibility (section 3.3)."""

DATASETS = ("cifar10", "imagenet32", "imagenet")
"""Columns of :data:`TABLE2`."""

TABLE2: dict[tuple[str, str], tuple[float | None, float | None, float]] = {
    ("torchvision", "resnet18"): (None, None, 69.8),
    ("backprop", "resnet18"): (95.0, 54.0, 70.8),
    ("reversible", "revnet18"): (94.9, 54.6, 70.8),
    ("petra", "revnet18"): (94.9, 54.6, 71.0),
    ("torchvision", "resnet34"): (None, None, 73.3),
    ("backprop", "resnet34"): (95.5, 56.5, 74.0),
    ("reversible", "revnet34"): (95.3, 56.4, 73.2),
    ("petra", "revnet34"): (94.8, 56.1, 73.5),
    ("torchvision", "resnet50"): (None, None, 76.1),
    ("backprop", "resnet50"): (94.8, 58.8, 75.6),
    ("reversible", "revnet50"): (95.2, 59.7, 75.4),
    ("petra", "revnet50"): (94.5, 59.6, 74.8),
}
"""PETRA, Table 2 (section 4.1): test accuracy by method and model, for :data:`DATASETS`. ``torchvision`` is the first version of
its published weights. The accuracy is the best after the last drop of the learning rate; on CIFAR-10 it is the mean of three
runs."""

PARAMETERS = {"resnet18": 11.7, "revnet18": 12.2, "resnet34": 21.8, "revnet34": 22.3, "resnet50": 25.6, "revnet50": 30.4}
"""PETRA, Table 2: million parameters. With other downsampling blocks, RevNet-50 has 50 million (section 4.1)."""

TABLE3 = {(True, True): (44.5, 0.0), (True, False): (43.6, 2.0), (False, True): (21.2, 52.3), (False, False): (20.3, 54.3)}
"""PETRA, Table 3 (section 4.2): GB and percentage saved. The key is (input buffers, parameter buffers)."""

REVNETS = ("revnet18", "revnet34", "revnet50")
"""Columns of :data:`TABLE4`."""

TABLE4 = {
    "reversible": (77.5, 78.1, 78.5),
    "delayed": (76.5, 76.3, 77.7),
    "dsp": (76.4, 75.5, 76.7),
    "reconstruct_stashed": (75.4, 76.4, 78.3),
    "petra": (75.9, 75.2, 77.2),
}
"""PETRA, Table 4 (section 4.2): test accuracy on CIFAR-100 with k = 1 by method, for :data:`REVNETS`."""


@dataclass(frozen=True)
class IterationTimes:
    """One row of PETRA's Table 5.

    Attributes:
        reversible, petra: Mean milliseconds per microbatch of 256 images.
        speed_up: The printed ratio of the two.
    """

    reversible: float
    petra: float
    speed_up: float


TABLE5 = {"revnet18": IterationTimes(160.3, 53.4, 3.0), "revnet34": IterationTimes(235.6, 97.1, 2.4)}
"""PETRA, Table 5 (section 4.2), on CIFAR-10. The caption speaks of three models; the table has two rows."""

GPUS = {"revnet18": 10, "revnet34": 18, "revnet50": 18}
"""PETRA, section 4.2: number of GPUs by model, one per stage."""

TABLE5_BATCH, TABLE5_WARMUP, TABLE5_TIMED = 256, 500, 50
"""PETRA, section 4.2: images per microbatch, microbatches before the measurement, and measured microbatches."""

TABLE6 = {
    "revnet18": (1.15, 1.01, 1.01, 2.67, 0.52, 1.13, 0.31, 0.57, 0.25, 0.11),
    "revnet34": (1.15, *(1.01,) * 4, 4.2, *(0.52,) * 3, 1.66, *(0.31,) * 3, 0.71, *(0.25,) * 3, 0.11),
}
"""PETRA, Table 6 (appendix A): GB of each stage, CIFAR-10, batches of 256. The table groups stages and counts them from 0."""

FIG5_PER_EPOCH, FIG5_WINDOW = 15, 10
"""PETRA, Fig. 5 (appendix B): measurements per epoch, and length of the moving average in epochs."""

FIG6_EPOCHS = (25, 125, 175, 250)
"""PETRA, Fig. 6 (appendix B). The caption of its panel (d) prints 125, but 25 epochs after the second drop is 250."""

REVNET_TABLE1 = {
    "naive": ("O(L)", "O(L)"),
    "checkpointing": ("O(√L)", "O(L)"),
    "recursive checkpointing": ("O(log L)", "O(L log L)"),
    "reversible": ("O(1)", "O(L)"),
}
"""RevNet, Table 1 (section 4): stored activations and compute of L layers. Section 4 counts 2L for naive backpropagation, and 3L
for checkpointing and for reversible networks, with a backward as expensive as a forward. Section 3.2 counts 3N and 4N
operations."""


@dataclass(frozen=True)
class Architecture:
    """One row of RevNet's Table 2.

    Attributes:
        bottleneck: Whether residual functions are bottlenecks.
        units: Residual units of each group.
        channels: Filters of the stem and of each group; of both streams together for a RevNet.
        parameters: Millions with the classes of CIFAR-10 or ImageNet, and with those of CIFAR-100.
    """

    bottleneck: bool
    units: tuple[int, ...]
    channels: tuple[int, ...]
    parameters: tuple[float, ...]


REVNET_TABLE2 = {
    "resnet32": Architecture(False, (5, 5, 5), (16, 16, 32, 64), (0.46, 0.47)),
    "revnet38": Architecture(False, (3, 3, 3), (32, 32, 64, 112), (0.46, 0.48)),
    "resnet110": Architecture(False, (18, 18, 18), (16, 16, 32, 64), (1.73, 1.73)),
    "revnet110": Architecture(False, (9, 9, 9), (32, 32, 64, 128), (1.73, 1.74)),
    "resnet164": Architecture(True, (18, 18, 18), (16, 16, 32, 64), (1.70, 1.73)),
    "revnet164": Architecture(True, (9, 9, 9), (32, 32, 64, 128), (1.75, 1.79)),
    "resnet101_preact": Architecture(True, (3, 4, 23, 3), (64, 128, 256, 512), (44.5,)),
    "revnet104": Architecture(True, (2, 2, 11, 2), (128, 256, 512, 832), (45.2,)),
}
"""RevNet, Table 2 (section 5)."""

REVNET_TABLE3 = {
    "resnet32": (7.14, 29.95),
    "revnet38": (7.24, 28.96),
    "resnet110": (5.74, 26.44),
    "revnet110": (5.76, 25.40),
    "resnet164": (5.24, 23.37),
    "revnet164": (5.17, 23.69),
}
"""RevNet, Table 3 (section 5.1): classification error on CIFAR-10 and CIFAR-100."""

REVNET_TABLE4 = {"resnet101_preact": 23.01, "revnet104": 23.10}
"""RevNet, Table 4 (section 5.1): top-1 error on ImageNet, single crop. Also the last points of Fig. 3 on the validation images."""

REVNET_FIG4_EXTRA_EPOCHS = 4
"""RevNet, Fig. 4: epochs in which the angle was measured after the regular length of the training."""

INPLACE_ABN_TABLE1 = {
    ("relu", "relu"): (77.74, 93.86, 79.21, 94.67, 79.17, 94.67),
    ("relu", "leaky_relu"): (76.88, 93.42, 78.74, 94.46, 78.37, 94.25),
    ("leaky_relu", "leaky_relu"): (77.04, 93.50, 78.72, 94.47, 77.92, 94.28),
    ("leaky_relu", "relu"): (76.81, 93.53, 78.46, 94.38, 77.84, 94.20),
}
"""InPlace-ABN, Table 1 (section 4.1): ImageNet accuracy of ResNeXt-101 by activation in training and in validation: top-1 and top-5
of the 224² centre crop, ten 224² crops and the 320² centre crop."""

INPLACE_ABN_TABLE2 = {
    ("resnext101", "batchnorm", 256): (77.04, 93.50, 78.72, 94.47, 77.92, 94.28),
    ("resnext101", "inplace_abn", 512): (78.08, 93.79, 79.52, 94.66, 79.38, 94.67),
    ("resnext152", "inplace_abn", 256): (78.28, 94.04, 79.73, 94.82, 79.56, 94.67),
    ("wide_resnet38", "inplace_abn", 256): (79.72, 94.78, 81.03, 95.43, 80.69, 95.27),
    ("resnext101", "inplace_abn, synchronised", 256): (77.70, 93.78, 79.18, 94.60, 78.98, 94.56),
}
"""InPlace-ABN, Table 2 (section 4.1): ImageNet accuracy by network, normalisation and batch size. Columns as in Table 1."""

Crops = tuple[int, int, float]
"""Crops per batch, side of a crop in pixels, and mean intersection over union."""

INPLACE_ABN_TABLE3: Mapping[str, tuple[Crops, Crops, Crops, Crops]] = {
    "batchnorm": ((16, 512, 74.42), (16, 480, 20.30), (20, 512, 75.82), (20, 496, 22.44)),
    "inplace_abn, same crops": ((28, 512, 75.80), (24, 480, 22.63), (28, 512, 77.75), (28, 496, 22.96)),
    "inplace_abn, same batch": ((16, 672, 77.04), (16, 600, 23.35), (20, 640, 78.31), (20, 576, 24.10)),
    "inplace_abn, synchronised, same batch": ((16, 672, 77.58), (16, 600, 24.91), (20, 640, 78.06), (20, 576, 25.11)),
}
"""InPlace-ABN, Table 3 (section 4.2): ResNeXt-101 on Cityscapes and COCO-Stuff, WideResNet-38 on Cityscapes and COCO-Stuff."""

INPLACE_ABN_TABLE4: Mapping[str, Crops] = {
    "Cityscapes, ResNeXt-152, synchronised": (12, 680, 78.49),
    "Cityscapes, WideResNet-38": (16, 712, 78.45),
    "Cityscapes, WideResNet-38, synchronised, 16 crops": (16, 712, 79.02),
    "Cityscapes, WideResNet-38, synchronised, 12 crops": (12, 872, 79.16),
    "Cityscapes, WideResNet-38, synchronised, class-uniform sampling": (12, 872, 79.40),
    "Mapillary Vistas, WideResNet-38, synchronised, class-uniform sampling": (12, 776, 53.12),
}
"""InPlace-ABN, Table 4 (section 4.2)."""

"""Figures printed in the papers, for comparison with ours. Each constant names its table and section.

* PETRA: Rivaud, Fournier, Pumir, Belilovsky, Eickenberg, Oyallon, "PETRA: Parallel end-to-end training with reversible
  architectures", ICLR 2025, arXiv 2406.02052.
* RevNet: Gomez, Ren, Urtasun, Grosse, "The reversible residual network", NeurIPS 2017, arXiv 1707.04585.

Accuracies and errors are percentages.
"""

from __future__ import annotations

from dataclasses import dataclass

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


TABLE5 = {"revnet18": (160.3, 53.4, 3.0), "revnet34": (235.6, 97.1, 2.4)}
"""PETRA, Table 5 (section 4.2), on CIFAR-10: mean milliseconds per microbatch of 256 images of reversible backpropagation and of
PETRA, and the printed ratio of the two. The caption speaks of three models; the table has two rows."""

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
